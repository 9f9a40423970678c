"""The scheduler's own door: a threshold that did not come through the checks of `request` ends its request.

An HTTP side that knows nothing of candidate sets (SGLang's Rust server, a gRPC server, a worker without
the plugin) hands `custom_params` on as they came. It would answer with a 200 without the sets.
"""

from __future__ import annotations

from typing import Any

from sglang_topp_patches.mode import refusals_of, temperature_refusal
from sglang_topp_patches.payload import KEY, THRESHOLD, custom_params
from sglang_topp_patches.seams import status

__all__ = ["check_request"]


def check_request(self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook on `Scheduler._add_request_to_queue`.

    Only here are the sampling parameters what the sampler will use: SGLang fills in a model's defaults
    before it sends them.
    """
    custom = custom_params(req)
    if not custom.get(THRESHOLD) or req.to_finish is not None:
        return
    problem = temperature_refusal(req.sampling_params.temperature)
    if KEY not in custom:
        causes = (*status().problems, *refusals_of(self.server_args))
        problem = "; ".join(causes) or "it came by a way that cannot carry candidate sets; ask POST /generate"
    if problem:
        del custom[THRESHOLD]
        req.set_finish_with_abort(f"{THRESHOLD}: candidate sets are not served here: {problem}")
