"""On SGLang before 0.5.19, copy a pass's candidate sets to the host, and add the sets to the requests.

Since 0.5.19, SGLang itself copies auxiliary output (extra results of a forward pass) to the host and passes
the copies to the plugin. On SGLang before 0.5.19, the hooks in this module copy the candidate sets and add
them to the requests, in two steps:

1. Right before SGLang starts to copy its own results to the host, `copy_to_host` starts to copy the sets.
   SGLang then records a CUDA event, which covers SGLang's copies and the copies of the sets.
2. SGLang drops the tokens that a stop condition, a retraction, or overlap scheduling made invalid, and
   appends the other tokens to their requests. `commit` then adds the sets of the appended tokens. Finally,
   SGLang sends the tokens.

Between `copy_to_host` and `commit`, an attribute of SGLang's `GenerationBatchResult` holds the sets.

Without overlap scheduling, SGLang does not call the function that `copy_to_host` wraps. The hooks then copy
the sets right before SGLang processes the results. On a prefill server, the hook `process_on_prefill_server`
adds the sets instead of `commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from sglang_topp_patches.hooks import around, before
from sglang_topp_patches.releases import take
from sglang_topp_patches.set_buffer import KEY, SetBuffer

_COMPONENTS = "sglang.srt.managers.scheduler_components"
_RESULTS = f"{_COMPONENTS}.batch_result_processor.SchedulerBatchResultProcessor.process_batch_result"
_OUTPUT_BEFORE_0_5_13 = "sglang.srt.managers.scheduler_output_processor_mixin.SchedulerOutputProcessorMixin"
_RESULTS_BEFORE_0_5_13 = f"{_OUTPUT_BEFORE_0_5_13}.process_batch_result"
_PREFILL_SERVER = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
_COPIED = "sglang_topp_copied"


@dataclass(frozen=True)
class Committed:
    """The tokens that one scheduler step adds to one request's output.

    Attributes:
        output_index: the index, in the request's output, of the first token of `token_ids`.
        token_ids: the tokens.
    """

    output_index: int
    token_ids: tuple[int, ...]


# `_step` adds the sets of the running scheduler step to the requests. SGLang does not pass the step to
# `stream_output`, so `_step` is a context variable.
_step: ContextVar[Callable[[], None] | None] = ContextVar("sglang_topp_step", default=None)


@before("sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu", until="0.5.19")
def copy_to_host(self: Any, *args: Any, **kwargs: Any) -> None:
    """Start copying the sets to the host.

    The CUDA event that SGLang records after its own copies also covers the copies of the candidate sets.
    """
    output = take(self.logits_output)
    if output is not None:
        # The copy stream may still read the device tensors, so keep a reference to `output`.
        setattr(self, _COPIED, (output.copy_to_host(_copy), output))


@around(f"{_RESULTS}_prefill", f"{_RESULTS}_decode", since="0.5.13", until="0.5.19")
@around(f"{_RESULTS_BEFORE_0_5_13}_prefill", f"{_RESULTS_BEFORE_0_5_13}_decode", until="0.5.13")
def process(original: Callable[..., Any], self: Any, batch: Any, result: Any) -> Any:
    """Record the scheduler step for `commit`.

    These functions are `process_batch_result_prefill` and `process_batch_result_decode`.
    """
    step = _step_of(batch, result)
    if step is None:
        return original(self, batch, result)
    token = _step.set(step)
    try:
        return original(self, batch, result)
    finally:
        _step.reset(token)
        setattr(result, _COPIED, None)


@around(f"{_PREFILL_SERVER}.process_batch_result_disagg_prefill", until="0.5.19")
def process_on_prefill_server(original: Callable[..., Any], self: Any, batch: Any, result: Any) -> None:
    """Add the sets of first tokens to the requests.

    A prefill server generates only each request's first token. SGLang sends this token to the HTTP process
    later, after the transfer of the request's KV cache. The hooked function sends no tokens, so the hook can
    add the sets after the hooked function returns.
    """
    step = _step_of(batch, result)
    try:
        original(self, batch, result)
        if step is not None:
            step()
    finally:
        setattr(result, _COPIED, None)


@before(
    f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer.stream_output", since="0.5.13", until="0.5.19"
)
@before(f"{_OUTPUT_BEFORE_0_5_13}.stream_output", until="0.5.13")
def commit(self: Any, reqs: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """Add the step's sets to the requests before SGLang sends the tokens.

    If a request has a `SetBuffer`, every request gets one. Up to 0.5.14, SGLang sends the values of a key
    only for the requests that have it, and looks them up by the request's position in the whole batch. It
    would give some requests the sets of others.
    """
    if (step := _step.get()) is not None:
        _step.set(None)
        step()
    if any(req.customized_info and KEY in req.customized_info for req in reqs):
        for req in reqs:
            req.customized_info = req.customized_info or {}
            req.customized_info.setdefault(KEY, SetBuffer())


def _step_of(batch: Any, result: Any) -> Callable[[], None] | None:
    """Return what adds the sets of `result` to the requests, after SGLang has appended the tokens to them.

    Return None if `result` has no sets.
    """
    output, _ = getattr(result, _COPIED, None) or (None, None)
    if output is None and (taken := take(getattr(result, "logits_output", None))) is not None:
        # Without overlap scheduling, SGLang does not call `copy_to_cpu`, so the sets are still on the device.
        output = taken.copy_to_host(lambda tensor: tensor.cpu())
    if output is None:
        return None
    starts = [_num_visible(req) for req in batch.reqs]

    def consume() -> None:
        output.consume(batch, [_committed(*pair) for pair in zip(batch.reqs, starts, strict=True)])

    return consume


def _num_visible(req: Any) -> int:
    """Return how many of a request's output tokens SGLang sends to the caller.

    If a stop string ends the request, SGLang may hide the last tokens from the caller.
    """
    return len(req.output_ids) if req.finished_len is None else int(req.finished_len)


def _committed(req: Any, start: int) -> Committed | None:
    stop = _num_visible(req)
    return Committed(start, tuple(req.output_ids[start:stop])) if stop > start else None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to pinned host memory without waiting for the device."""
    return tensor.to("cpu", non_blocking=True)
