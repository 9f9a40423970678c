"""Copy a pass's candidate sets to the host and add them to their requests, on SGLang before 0.5.19.

Later releases do this for every auxiliary output of a pass. Here, the sets are an attribute of the pass's
result. The hooks copy the sets right before SGLang's own copies, under the same event. They add the sets to
the requests after SGLang has appended the tokens, and before it sends them. By then SGLang has resolved
overlap, retraction, and stops, so only visible tokens get a set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from sglang_topp_patches.compat.internals.sglang_0_5_16_to_0_5_18 import take
from sglang_topp_patches.compat.releases import internals

__all__ = ["Committed", "commit", "copy_to_host", "process", "process_on_prefill_server"]

_HOST = "sglang_topp_host_output"
_KEPT = "sglang_topp_kept"


@dataclass(frozen=True)
class Committed:
    """The tokens of one request that became visible in a step.

    Attributes:
        output_index: the index of the first token in the request's output.
        token_ids: the tokens.
    """

    output_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Step:
    """A scheduler step whose tokens SGLang is appending to their requests."""

    output: Any
    batch: Any
    starts: list[int]

    def consume(self) -> None:
        """Add the sets to their requests, to which SGLang has appended the tokens by now."""
        pairs = zip(self.batch.reqs, self.starts, strict=True)
        self.output.consume(self.batch, [_committed(req, start) for req, start in pairs])


# SGLang's function that sends tokens does not get the step that they belong to.
_step: ContextVar[_Step | None] = ContextVar("sglang_topp_step", default=None)


def copy_to_host(self: Any, *args: Any, **kwargs: Any) -> None:
    """Issue the copies to the host: BEFORE hook on `GenerationBatchResult.copy_to_cpu`.

    SGLang records the event of its own copies afterward, so the event covers these copies too.
    """
    output = take(self.logits_output)
    if output is not None:
        setattr(self, _HOST, output.copy_to_host(_copy))
        setattr(self, _KEPT, output)  # until the copies end, which may run on another stream


def process(original: Callable[..., Any], self: Any, batch: Any, result: Any) -> Any:
    """Record the step: AROUND hook on `process_batch_result_prefill` and `process_batch_result_decode`."""
    step = _step_of(batch, result)
    if step is None:
        return original(self, batch, result)
    token = _step.set(step)
    try:
        return original(self, batch, result)
    finally:
        _step.reset(token)
        _free(result)


def process_on_prefill_server(original: Callable[..., Any], self: Any, batch: Any, result: Any) -> None:
    """Commit a prefill server's first tokens: AROUND hook on `process_batch_result_disagg_prefill`.

    SGLang sends these tokens later, once the KV cache is transferred. Within the step, it sends only requests
    that failed.
    """
    step = _step_of(batch, result)
    try:
        original(self, batch, result)
        if step is not None:
            step.consume()
    finally:
        _free(result)


def commit(self: Any, reqs: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """Add the step's sets to their requests: BEFORE hook on `stream_output`, which sends the tokens."""
    if (step := _step.get()) is not None:
        _step.set(None)
        step.consume()
    internals().align(reqs)


def _step_of(batch: Any, result: Any) -> _Step | None:
    """Return the step with its output on the host, or None if the pass has no output."""
    output = getattr(result, _HOST, None)
    if output is None and (taken := take(getattr(result, "logits_output", None))) is not None:
        # Without overlap scheduling, SGLang copies each value where it reads it.
        output = taken.copy_to_host(lambda tensor: tensor.cpu())
    return None if output is None else _Step(output, batch, [_num_visible(req) for req in batch.reqs])


def _free(result: Any) -> None:
    setattr(result, _HOST, None)
    setattr(result, _KEPT, None)


def _num_visible(req: Any) -> int:
    """Return how many tokens are visible. A stop string may end a request before its last token."""
    return len(req.output_ids) if req.finished_len is None else int(req.finished_len)


def _committed(req: Any, start: int) -> Committed | None:
    stop = _num_visible(req)
    return Committed(start, tuple(req.output_ids[start:stop])) if stop > start else None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to pinned host memory without waiting for the device."""
    return tensor.to("cpu", non_blocking=True)
