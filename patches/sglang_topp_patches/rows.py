"""Which rows of a forward pass ask for candidate sets, noted where SGLang builds the pass.

SGLang copies a `ForwardBatch` field by field on its way to the model, so the note rides on a field:
`top_logprobs_nums`, a list that also reaches the code that scores the prompt. Wherever SGLang takes
that list apart, the note is gone, no sets are taken, and the requests end as errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_topp_patches.payload import THRESHOLD, custom_params

if TYPE_CHECKING:
    from sglang_topp_patches.prefill import PromptSets

__all__ = ["Rows", "note_rows", "rows_of"]


@dataclass
class Rows:
    """The rows of one forward pass that reach a client through this process.

    Attributes:
        request_ids: each row's request.
        thresholds: each row's threshold, 0 where its request asks for no sets.
        prompt: the prompt positions' sets, once the pass has scored them.
    """

    request_ids: tuple[str, ...]
    thresholds: tuple[float, ...]
    prompt: PromptSets | None = None


class _TopLogprobsNums(list[int]):
    """SGLang's `top_logprobs_nums` with the note on it."""

    rows: Rows


def note_rows(forward_batch: Any, cls: type[Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook on `ForwardBatch.init_new`, which sees the requests in row order."""
    if batch.return_logprob and _answers_requests():
        thresholds = tuple(_threshold(req) for req in batch.reqs)
        if any(thresholds):
            nums = _TopLogprobsNums(forward_batch.top_logprobs_nums)
            nums.rows = Rows(tuple(req.rid for req in batch.reqs), thresholds)
            forward_batch.top_logprobs_nums = nums
    return forward_batch


def rows_of(top_logprobs_nums: list[int] | None) -> Rows | None:
    """The note that a `top_logprobs_nums` carries, or None where no row asks for sets."""
    return getattr(top_logprobs_nums, "rows", None)


def _threshold(req: Any) -> float:
    return custom_params(req).get(THRESHOLD) or 0.0


def _answers_requests() -> bool:
    """Whether this rank's results reach the client; the other ranks only mirror them."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)
