"""What a pass took comes to the host with SGLang's results, and is committed with the tokens that became
visible.

SGLang 0.5.19 and later do it by themselves (auxiliary outputs). Before, what was taken rides on a field of
the pass's output; its copies are issued right before SGLang's own, under the same event; and between the
step that appends the tokens to their requests and the one that sends them it is consumed. So overlap,
retraction and stops are resolved as SGLang resolves them: a token that did not become visible is not among
the commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_topp_patches.internals.customized_info import take
from sglang_topp_patches.releases import internals

__all__ = ["Committed", "commit", "copy_to_host", "process", "process_on_prefill_server"]

_HOST = "sglang_topp_host_output"
_KEPT = "sglang_topp_kept"


@dataclass(frozen=True)
class Committed:
    """The tokens of one request that became visible in a step.

    Attributes:
        output_index: the place of the first among the request's.
        token_ids: all of them.
    """

    output_index: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Step:
    """A step whose tokens are being appended."""

    output: Any
    batch: Any
    starts: list[int]

    def consume(self) -> None:
        """The tokens are there now."""
        pairs = zip(self.batch.reqs, self.starts, strict=True)
        self.output.consume(self.batch, [_committed(req, start) for req, start in pairs])


_step: _Step | None = None  # a scheduler process handles one result at a time


def copy_to_host(self: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook on `GenerationBatchResult.copy_to_cpu`, which records its event behind the copies."""
    output = take(self.logits_output)
    if output is not None:
        setattr(self, _HOST, output.copy_to_host(_copy))
        setattr(self, _KEPT, output)  # until the copies are done: they may run on a stream of their own


def process(original: Callable[..., Any], self: Any, batch: Any, result: Any) -> Any:
    """AROUND hook on `process_batch_result_prefill` and `process_batch_result_decode`."""
    global _step
    step = _step_of(batch, result)
    if step is None:
        return original(self, batch, result)
    _step = step
    try:
        return original(self, batch, result)
    finally:
        _step = None
        _let_go(result)


def process_on_prefill_server(original: Callable[..., Any], self: Any, batch: Any, result: Any) -> None:
    """AROUND hook on `process_batch_result_disagg_prefill`, whose tokens are sent when the KV cache has been,
    in no step: what it sends meanwhile are requests that failed."""
    step = _step_of(batch, result)
    try:
        original(self, batch, result)
        if step is not None:
            step.consume()
    finally:
        _let_go(result)


def commit(self: Any, reqs: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """BEFORE hook on `stream_output`, which sends the tokens that a step has appended."""
    global _step
    step, _step = _step, None
    if step is not None:
        step.consume()
    internals().align(reqs)


def _step_of(batch: Any, result: Any) -> _Step | None:
    """What a pass took, on the host; None where that is nothing."""
    output = getattr(result, _HOST, None)
    if output is None and (taken := take(getattr(result, "logits_output", None))) is not None:
        # Without overlap scheduling SGLang copies where it reads.
        output = taken.copy_to_host(lambda tensor: tensor.cpu())
    return None if output is None else _Step(output, batch, [_num_visible(req) for req in batch.reqs])


def _let_go(result: Any) -> None:
    setattr(result, _HOST, None)
    setattr(result, _KEPT, None)


def _num_visible(req: Any) -> int:
    """A stop string may end a request before its last token."""
    return len(req.output_ids) if req.finished_len is None else int(req.finished_len)


def _committed(req: Any, start: int) -> Committed | None:
    stop = _num_visible(req)
    return Committed(start, tuple(req.output_ids[start:stop])) if stop > start else None


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Without a wait: torch takes pinned memory for it."""
    return tensor.to("cpu", non_blocking=True)
