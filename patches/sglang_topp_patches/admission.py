"""The scheduler's own door: who asks for sets past the checks of `request` is refused.

An HTTP side that knows nothing of candidate sets (SGLang's Rust server, a gRPC server, a worker without
the plugin) hands `custom_params` on as they came. It would answer with a 200 without the sets.
"""

from __future__ import annotations

from typing import Any

from sglang_topp_patches.mode import refusals_of, source_refusals, temperature_refusal
from sglang_topp_patches.payload import FIELDS, KEY, SOURCE, asking_field, custom_params
from sglang_topp_patches.seams import status

__all__ = ["check_request"]


def check_request(self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook on `Scheduler._add_request_to_queue`.

    Only here are the sampling parameters what the sampler will use: SGLang fills in a model's defaults
    before it sends them.
    """
    custom = custom_params(req)
    field = asking_field(custom.get)
    if not field or req.to_finish is not None:
        return
    problem = temperature_refusal(req.sampling_params.temperature) or _unscored_prompt(req)
    if KEY not in custom:
        causes = (*status().problems, *refusals_of(self.server_args))
        problem = "; ".join(causes) or "it came by a way that cannot carry candidate sets; ask POST /generate"
    elif field == SOURCE and (causes := source_refusals()):
        problem = "; ".join(causes)
    if problem:
        for name in FIELDS:
            custom.pop(name, None)
        req.set_finish_with_abort(f"{field}: candidate sets are not served here: {problem}")


def _unscored_prompt(req: Any) -> str:
    """SGLang drops `logprob_start_len` in streaming sessions, with a line in its log."""
    if not getattr(getattr(req, "session", None), "streaming", False):
        return ""
    start = req.logprob_start_len
    if not 0 <= start < len(req.origin_input_ids):
        return ""
    return f"logprob_start_len: got {start} in a streaming session, where SGLang scores no prompt"
