"""Which rows of a forward pass ask for candidate sets, noted where SGLang builds the pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_topp_patches.request import THRESHOLD

__all__ = ["Rows", "note_rows", "rows_of"]

_ATTRIBUTE = "_sglang_topp_rows"


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass that reach a client through this process.

    Attributes:
        request_ids: each row's request.
        thresholds: each row's threshold, 0 where its request asks for no sets.
    """

    request_ids: tuple[str, ...]
    thresholds: tuple[float, ...]


def note_rows(forward_batch: Any, cls: type[Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook on `ForwardBatch.init_new`, which sees the requests in row order."""
    if batch.return_logprob and _answers_requests():
        thresholds = tuple(_threshold(req) for req in batch.reqs)
        if any(thresholds):
            setattr(forward_batch, _ATTRIBUTE, Rows(tuple(req.rid for req in batch.reqs), thresholds))
    return forward_batch


def rows_of(forward_batch: Any) -> Rows | None:
    """What `note_rows` found, or None where no row asks for sets."""
    return getattr(forward_batch, _ATTRIBUTE, None)


def _threshold(req: Any) -> float:
    custom = req.sampling_params.custom_params
    return (custom.get(THRESHOLD) or 0.0) if custom else 0.0


def _answers_requests() -> bool:
    """Whether this rank's results reach the client; the other ranks only mirror them."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)
