"""Append the candidate set of each new token to the `customized_info` of the token's request.

SGLang sends a request's `customized_info` from the scheduler to the HTTP process. The module
`scheduler_messages` of this package defines the entries that this module appends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_topp_patches.compat.releases import internals
from sglang_topp_patches.scheduler.request_budget import charge, end_without_set
from sglang_topp_patches.scheduler_messages import KEY, Entry, PackedSet

__all__ = ["STREAM_OUTPUT", "STREAM_OUTPUT_BEFORE_0_5_13", "add_entries", "lowest_logprob"]

STREAM_OUTPUT = (
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
)
"""SGLang's function that sends new tokens, with `customized_info`, in SGLang 0.5.13 and later."""

STREAM_OUTPUT_BEFORE_0_5_13 = (
    "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin.stream_output"
)


def add_entries(
    req: Any, output_index: int, found: Sequence[tuple[PackedSet | None, str]], weight_version: str
) -> None:
    """Append one `Entry` for each new token to a request's `customized_info`.

    If a token's set is missing, the token's `Entry` holds the reason, and the request ends with an error.

    Args:
        req: SGLang's `Req`.
        output_index: the index of the first new token in the request's output.
        found: one pair per token: the token's set and an empty string, or None and the reason why the set is
            missing.
        weight_version: the version of the weights that drew the tokens.
    """
    if req.customized_info is None:
        req.customized_info = {}
    entries = req.customized_info.setdefault(KEY, [])
    # After SGLang retracts a request whose prompt consists of embeddings, SGLang generates the whole output
    # again. Drop the sets of the tokens that SGLang generated before the retraction.
    del entries[output_index:]
    skipped = output_index - len(entries)
    entries += [Entry(None, "a token became visible without passing through the sampler")] * skipped
    entries += [Entry(each, problem, weight_version=weight_version) for each, problem in found]
    if skipped > 0 or any(problem for _, problem in found):
        end_without_set(req)
    else:
        charge(req, sum(len(each[0]) // 4 for each, _ in found if each is not None), len(found))


def lowest_logprob() -> float | None:
    """Return the bound at or below which a log-prob stands for probability 0.

    None means that the bound is the lowest value of the log-probs' dtype.

    With `SGLANG_SANITIZE_NAN_LOGITS`, which `sglang-topp serve` sets, SGLang replaces logits of -inf with
    -1e30. For greedy rows, SGLang reports the `log_softmax` of the logits. So a token whose logit was -inf
    has a finite log-prob near -1e30, which is below the bound of -1e20.
    """
    return -1e20 if internals().sanitizes_logits() else None
