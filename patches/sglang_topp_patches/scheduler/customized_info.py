"""Append the candidate sets of new tokens to their request's `SetBuffer` in `customized_info`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_topp_patches.releases import internals
from sglang_topp_patches.scheduler.request_budget import buffer_of, charge, end_without_set
from sglang_topp_patches.set_buffer import PackedSet

__all__ = ["STREAM_OUTPUT", "STREAM_OUTPUT_BEFORE_0_5_13", "add_sets", "lowest_logprob"]

STREAM_OUTPUT = (
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
)
"""SGLang's function that sends new tokens, with `customized_info`, in SGLang 0.5.13 and later."""

STREAM_OUTPUT_BEFORE_0_5_13 = (
    "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin.stream_output"
)


def add_sets(
    req: Any, output_index: int, found: Sequence[tuple[PackedSet | None, str]], weight_version: str
) -> None:
    """Append the sets of a request's new tokens. If one is missing, the request ends with an error.

    Args:
        req: SGLang's `Req`.
        output_index: the index of the first new token in the request's output.
        found: one pair per token: the token's set and an empty string, or None and the reason why the set is
            missing.
        weight_version: the version of the weights that drew the tokens.
    """
    buffer = buffer_of(req)
    if output_index < buffer.end:
        # After SGLang retracts a request whose prompt consists of embeddings, SGLang generates the whole
        # output again. Drop the sets of the tokens that SGLang generated before the retraction.
        buffer.truncate(output_index)
    elif output_index > buffer.end:
        found = [(None, "a token became visible without passing through the sampler")]
        output_index = buffer.end
    candidates = 0
    for index, (packed, problem) in enumerate(found, output_index):
        if packed is None:
            return end_without_set(req, f"no candidate set at position {index}: {problem}")
        buffer.append(packed, weight_version)
        candidates += len(packed[0]) // 4
    charge(req, candidates, len(found))


def lowest_logprob() -> float | None:
    """Return the bound at or below which a log-prob stands for probability 0.

    None means that the bound is the lowest value of the log-probs' dtype.

    With `SGLANG_SANITIZE_NAN_LOGITS`, which `sglang-topp serve` sets, SGLang replaces logits of -inf with
    -1e30. For greedy rows, SGLang reports the `log_softmax` of the logits. So a token whose logit was -inf
    has a finite log-prob near -1e30, which is below the bound of -1e20.
    """
    return -1e20 if internals().sanitizes_logits() else None
