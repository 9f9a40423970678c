"""Record which rows of a forward pass ask for candidate sets.

When SGLang builds a `ForwardBatch`, the hook `note_requested_rows` creates a `ForwardPass`, which records the
rows that ask for candidate sets. Before the model runs, SGLang copies the `ForwardBatch` field by field, so
the copy would lack any attribute that the hook adds. The hook therefore replaces the batch's list
`top_logprobs_nums` with a `TopLogprobsNums`, a subclass of list that has the `ForwardPass` as an attribute.
The hooks that extract sets find the `ForwardPass` in the copied batch's list `top_logprobs_nums`. When SGLang
scores prompts, the metadata of the logits has the same list, and the hooks find the `ForwardPass` there. If
SGLang replaces `top_logprobs_nums` with a new list, the hooks find no `ForwardPass` and extract no sets. The
requests that ask for sets then end with an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sglang_topp_patches.hooks import after
from sglang_topp_patches.releases import internals
from sglang_topp_patches.request import sets_request
from sglang_topp_patches.scheduler.process_state import SchedulerProcess
from sglang_topp_patches.scheduler.request_budget import is_refused

__all__ = [
    "ForwardPass",
    "RequestedRows",
    "TopLogprobsNums",
    "forward_pass_of",
    "note_requested_rows",
    "requested_rows",
]


@dataclass(frozen=True)
class RequestedRows:
    """The rows of one forward pass, and the sets that each row asks for.

    Attributes:
        request_ids: the id of each row's request.
        thresholds: each row's threshold p (`top_logprobs_p`); 0 if the row gets no set at a threshold.
        drawn: the indices, ascending, of the rows whose requests ask for the tokens that the sampler could
            draw.
        greedy: the indices of the rows that are sampled greedily.
        answers: whether SGLang sends this rank's results to the client. If `answers` is False, the hooks
            extract no sets on this rank. `drawn` still lists the rows, because the samplers of all ranks must
            run in the same way.
    """

    request_ids: tuple[str, ...]
    thresholds: tuple[float, ...]
    drawn: tuple[int, ...] = ()
    greedy: frozenset[int] = frozenset()
    answers: bool = True

    def asks(self, row: int) -> bool:
        """Return whether the request at index `row` of the batch asks for sets."""
        return row in self._asking

    @cached_property
    def _asking(self) -> frozenset[int]:
        return frozenset([*self.drawn, *(row for row, p in enumerate(self.thresholds) if p)])


@dataclass
class ForwardPass:
    """One forward pass, for a batch with at least one request for sets.

    Attributes:
        process: the state of this scheduler process.
        rows: the rows of the pass.
        prompt: the candidate sets of the pass's prompt positions; None until the pass has scored its prompts.
    """

    process: SchedulerProcess
    rows: RequestedRows
    prompt: Any = None


class TopLogprobsNums(list[int]):
    """SGLang's list `top_logprobs_nums`, with the `ForwardPass` of its batch as an attribute."""

    forward_pass: ForwardPass


@after("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", state=SchedulerProcess)
def note_requested_rows(
    process: SchedulerProcess, forward_batch: Any, cls: type[Any], batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Record the rows that ask for sets.

    The rows of the pass are in the order of the batch's requests.
    """
    rows = requested_rows(batch)
    if rows is not None:
        nums = TopLogprobsNums(forward_batch.top_logprobs_nums)
        nums.forward_pass = ForwardPass(process, rows)
        internals().carry(nums, batch, forward_batch)
    return forward_batch


def requested_rows(batch: Any) -> RequestedRows | None:
    """Return which requests of SGLang's `ScheduleBatch` ask for sets, or None if none does."""
    if not batch.return_logprob:
        return None
    answers = internals().answers_requests()
    wanted = [sets_request(req) for req in batch.reqs]
    thresholds = tuple(
        one.threshold if answers and not is_refused(req) else 0.0
        for one, req in zip(wanted, batch.reqs, strict=True)
    )
    drawn = tuple(row for row, one in enumerate(wanted) if one.is_from_sampler)
    if not any(thresholds) and not drawn:
        return None
    # A greedy request has a top_k of 1, because SGLang replaces temperature 0 with a top_k of 1.
    greedy = frozenset(row for row, req in enumerate(batch.reqs) if req.sampling_params.top_k == 1)
    return RequestedRows(tuple(req.rid for req in batch.reqs), thresholds, drawn, greedy, answers)


def forward_pass_of(top_logprobs_nums: list[int] | None) -> ForwardPass | None:
    """Return the `ForwardPass` attached to the list `top_logprobs_nums`, or None if there is none."""
    return getattr(top_logprobs_nums, "forward_pass", None)
