"""Which rows of a forward pass ask for candidate sets, noted where SGLang builds the pass.

SGLang copies a `ForwardBatch` field by field on its way to the model, so the note rides on a field:
`top_logprobs_nums`, a list that also reaches the code that scores the prompt. Wherever SGLang takes
that list apart, the note is gone, no sets are taken, and the requests end as errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_topp_patches.budget import is_refused
from sglang_topp_patches.payload import THRESHOLD, custom_params, from_sampler
from sglang_topp_patches.releases import internals

__all__ = ["Rows", "note_rows", "rows_of"]


@dataclass
class Rows:
    """The rows of one forward pass.

    Attributes:
        request_ids: each row's request.
        thresholds: each row's threshold, 0 where its request asks for no sets by one.
        drawn: rows whose sets are what the sampler could draw.
        greedy: those of them that are drawn greedily.
        answers: whether this process's results reach the client. Other ranks only mirror them: all they
            need to know is how to sample as this one does.
        prompt: SGLang's auxiliary output with the prompt positions' sets, once the pass has scored them.
    """

    request_ids: tuple[str, ...]
    thresholds: tuple[float, ...]
    drawn: tuple[int, ...] = ()
    greedy: frozenset[int] = frozenset()
    answers: bool = True
    prompt: Any = None

    def asks(self, row: int) -> bool:
        """Whether this row's request asks for sets."""
        return row < len(self.thresholds) and (self.thresholds[row] > 0 or row in self.drawn)


class _TopLogprobsNums(list[int]):
    """SGLang's `top_logprobs_nums` with the note on it."""

    rows: Rows


def note_rows(forward_batch: Any, cls: type[Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook on `ForwardBatch.init_new`, which sees the requests in row order."""
    if not batch.return_logprob:
        return forward_batch
    answers = internals().answers_requests()
    thresholds = tuple(_threshold(req) if answers and not is_refused(req) else 0.0 for req in batch.reqs)
    drawn = tuple(row for row, req in enumerate(batch.reqs) if from_sampler(custom_params(req).get))
    if any(thresholds) or drawn:
        # SGLang has made 1 of the top_k of a request at temperature 0.
        greedy = frozenset(row for row in drawn if batch.reqs[row].sampling_params.top_k == 1)
        nums = _TopLogprobsNums(forward_batch.top_logprobs_nums)
        nums.rows = Rows(tuple(req.rid for req in batch.reqs), thresholds, drawn, greedy, answers)
        internals().carry(nums, batch, forward_batch)
    return forward_batch


def rows_of(top_logprobs_nums: list[int] | None) -> Rows | None:
    """The note that a `top_logprobs_nums` carries, or None where no row asks for sets."""
    return getattr(top_logprobs_nums, "rows", None)


def _threshold(req: Any) -> float:
    return custom_params(req).get(THRESHOLD) or 0.0
