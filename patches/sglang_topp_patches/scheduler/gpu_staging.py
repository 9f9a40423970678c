"""Extract candidate sets into a GPU buffer of fixed size (the staging area), without waiting for the GPU.

The kernels write the sets of a forward pass into the staging area. The staging area is copied to the host
together with SGLang's own results. The scheduler reads the sizes of the sets only when it processes the
results, because an earlier read would wait for the GPU. If the sets of some rows did not fit into the staging
area, the scheduler extracts these sets again from the log-probs. This second extraction also runs on the GPU,
but the scheduler waits for it.

Until the scheduler processes the results, this module keeps the log-probs of the rows whose requests ask for
sets. This is device memory, so it does not count against the limits on candidates (`memory.budget`), which
come from the host's memory. When the scheduler processes the results, this module can still read the original
log-probs, for three reasons:

- SGLang records a CUDA event after its copies of the results, and waits for this event before the scheduler
  processes the results. By then, no unfinished GPU work of this pass reads or writes the kept log-probs.
- SGLang changes the kept log-probs in one way only: it replaces -inf with the dtype's lowest value. This
  module reads the dtype's lowest value as -inf.
- Each pass computes its log-probs in a new tensor, so later passes do not overwrite the kept log-probs.

If the scheduler extracts sets again, it waits for the GPU before it frees the kept log-probs. For requests
with `top_logprobs_source: "sampler"`, this module also keeps a tensor that marks the tokens that the sampler
could draw. Each pass computes this tensor anew, so later passes do not overwrite it.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.candidates.torch_tensors import to_device
from sglang_topp_patches.memory.budget import budget
from sglang_topp_patches.scheduler.extracted_sets import ExtractedSets
from sglang_topp_patches.scheduler.process_state import SchedulerProcess

if TYPE_CHECKING:
    from sglang_topp.nucleus.gpu_extraction import StagingArea

__all__ = ["StagedSets", "by_threshold", "by_weights", "is_staged", "max_bytes", "warm_up"]

# All rows of a staging area share its capacity, which is proportional to the number of rows. A staging area
# for fewer than 16 rows gets the capacity for 16 rows, so that a few of its rows can have large sets.
_LEAST_ROWS = 16
_BYTES_PER_CANDIDATE = 8


def is_staged(logprobs: torch.Tensor) -> bool:
    """Return whether the sets of `logprobs` are extracted into a staging area.

    A staging area needs Triton, and also a GPU or Triton's interpreter (`TRITON_INTERPRET=1`).
    """
    return (logprobs.is_cuda or _is_interpreted()) and _has_triton()


@cache
def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


_TakeAgain: TypeAlias = Callable[[NDArray[np.intp]], ExtractedSets]


class _Kept:
    """The tensors that the host needs to repeat the extraction of a pass's sets. `free` drops the tensors.

    Attributes:
        process: the state of this scheduler process.
        vocab: the vocabulary's size.
        lowest: log-probs at or below this value mean a probability of 0.
        take_again: extracts the sets of the given rows on the GPU, and waits until the sizes of the sets are
            known. None after `free`.
    """

    def __init__(
        self,
        process: SchedulerProcess,
        logprobs: torch.Tensor,
        lowest: float | None,
        take_again: _TakeAgain,
    ) -> None:
        self.process, self.vocab = process, logprobs.shape[1]
        self.lowest = torch.finfo(logprobs.dtype).min if lowest is None else lowest
        self.take_again: _TakeAgain | None = take_again

    def free(self) -> None:
        """Drop the kept tensors now, because SGLang may keep a pass's results until the next pass."""
        self.take_again = None


def by_threshold(
    process: SchedulerProcess,
    logprobs: torch.Tensor,
    thresholds: Sequence[float],
    sampled_ids: torch.Tensor,
    lowest: float | None,
    is_taken: torch.Tensor | None = None,
) -> StagedSets:
    """Extract each row's set at its threshold p, without waiting for the GPU.

    The arguments are those of `extraction.extract`.
    """
    from sglang_topp.nucleus import gpu_extraction

    asked = np.array(thresholds, np.float64)
    rows = np.flatnonzero(asked)
    if len(rows) < len(asked):
        on_device = to_device(rows, logprobs.device)
        logprobs, sampled_ids = logprobs[on_device], sampled_ids[on_device]
        is_taken = None if is_taken is None else is_taken[on_device]
    # Copy the sampled tokens, because SGLang may overwrite them in place, for example when it synchronizes
    # the tokens of tensor-parallel ranks.
    sampled_ids, p = sampled_ids.long().clone(), asked[rows]

    def take_again(which: NDArray[np.intp]) -> ExtractedSets:
        wanted = np.zeros_like(p)
        wanted[which] = p[which]
        ids, values, offsets = gpu_extraction.top_p_candidates(logprobs, wanted, sampled_ids, lowest=lowest)
        ends = to_device(np.append(which, len(p)), offsets.device)
        return ExtractedSets(ids, values, offsets[ends])

    area = gpu_extraction.stage_top_p(
        logprobs, p, sampled_ids, capacity=_capacity(len(p)), lowest=lowest, is_taken_B=is_taken
    )
    kept = _Kept(process, logprobs, lowest, take_again)
    return StagedSets(area, kept, rows, len(asked))


def by_weights(
    process: SchedulerProcess,
    logprobs: torch.Tensor,
    rows: torch.Tensor,
    is_drawn: torch.Tensor,
    token_ids: torch.Tensor | None,
    sampled_ids: torch.Tensor,
    lowest: float | None,
) -> StagedSets:
    """Start to extract the sets of tokens that the sampler could draw; do not wait for the device.

    The arguments are those of `extraction.extract_support`, except that `sampled_ids` has one token for each
    element of `rows`.
    """
    from sglang_topp.nucleus import gpu_extraction

    num_rows, device = len(rows), logprobs.device
    if num_rows < len(logprobs):
        logprobs = logprobs[rows]
    sampled_ids = sampled_ids.long()

    def take_again(which: NDArray[np.intp]) -> ExtractedSets:
        at = to_device(which, device)
        ids = None if token_ids is None else token_ids[at]
        return ExtractedSets(
            *gpu_extraction.support_candidates(
                logprobs[at], is_drawn[at], ids, sampled_ids[at], lowest=lowest
            )
        )

    area = gpu_extraction.stage_support(
        logprobs,
        is_drawn,
        token_ids,
        sampled_ids,
        capacity=_capacity(num_rows),
        lowest=lowest,
    )
    kept = _Kept(process, logprobs, lowest, take_again)
    return StagedSets(area, kept, np.arange(num_rows), num_rows)


@cache
def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels before the first request for sets, so that no request waits for the compiler."""
    logprobs = torch.full((1, vocab), -math.log(vocab), dtype=dtype, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    process = SchedulerProcess()
    by_threshold(process, logprobs, [0.5], first, None)
    for width in (1, vocab):
        is_drawn = torch.ones((1, width), dtype=torch.bool, device=device)
        by_weights(
            process, logprobs, first, is_drawn, None if width == vocab else first[None].int(), first, None
        )


def max_bytes(scheduler: Any) -> int:
    """Return the size of the largest staging area that a decode step of SGLang's `Scheduler` may need."""
    slots = getattr(scheduler.server_args, "speculative_num_draft_tokens", None) or 1
    return _BYTES_PER_CANDIDATE * _capacity(scheduler.max_running_requests * slots)


def _capacity(num_rows: int) -> int:
    return max(num_rows, _LEAST_ROWS) * budget().staged_candidates_per_row


@dataclass(frozen=True)
class StagedSets:
    """The sets of some rows, in a staging area that is copied to the host.

    Attributes:
        area: the staging area, which holds the sets of R rows.
        kept: the tensors from which the host can extract the sets again.
        rows: the index of each of the R rows in the result of `on_host`, in ascending order. All other rows
            of the result have empty sets.
        num_rows: the number of all rows of the result of `on_host`.
        problems: the reason why a row has no exact set, keyed by the row's index in the result of `on_host`.
            The `problems` of this result also contain the problems that the GPU kernels found.
    """

    area: StagingArea
    kept: _Kept
    rows: NDArray[np.intp]
    num_rows: int
    problems: Mapping[int, str] = field(default_factory=dict)

    def map(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StagedSets:
        """Return a copy of this object with `copy_tensor` applied to the tensors of the staging area.

        If `copy_tensor` is asynchronous, its copies may still run when this method returns.
        """
        return replace(self, area=self.area.map(copy_tensor))

    def with_problems(self, problems: Mapping[int, str]) -> StagedSets:
        """Return a copy of this object with the given problems added to its `problems`."""
        return replace(self, problems={**self.problems, **problems})

    def settled(self) -> ExtractedSets:
        """Wait for the GPU, and return the complete sets on the GPU."""
        device = self.area.rows.device
        return self.map(lambda tensor: tensor.cpu()).on_host().map(lambda tensor: tensor.to(device))

    def on_host(self) -> ExtractedSets:
        """Return the complete sets on the host. The tensors of `area` must already be on the host.

        This method waits for the GPU only if the sets of some rows did not fit into the staging area. Call
        `on_host` only once, because it frees the tensors in `kept`.
        """
        found = self.area.problems(self.kept.vocab)
        problems = {**{int(self.rows[i]): str(problem) for i, problem in found.items()}, **self.problems}
        ids, logprobs, offsets = self.area.sets()
        counts = self.kept.process.staging
        counts.rows_staged += int(np.count_nonzero(self.area.sizes))
        if len(left_out := self.area.left_out):
            counts.rows_taken_again += len(left_out)
            assert self.kept.take_again is not None
            again = self.kept.take_again(left_out).map(lambda tensor: tensor.cpu())
            ids, logprobs, offsets = _inserted((ids, logprobs, offsets), left_out, again)
        self.kept.free()
        # A sampled token of probability 0 must have the log-prob -inf. SGLang may have written a finite
        # log-prob instead (see `lowest` in `_Kept`), so restore -inf.
        logprobs = np.where(logprobs <= self.kept.lowest, np.float32(-np.inf), logprobs)
        sizes = np.zeros(self.num_rows, np.int64)
        sizes[self.rows] = np.diff(offsets)
        offsets = np.concatenate([[0], sizes.cumsum()])
        return ExtractedSets(
            torch.from_numpy(ids), torch.from_numpy(logprobs), torch.from_numpy(offsets), problems
        )


_Flat: TypeAlias = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]


def _inserted(sets: _Flat, rows: NDArray[np.intp], again: ExtractedSets) -> _Flat:
    """Return a copy of `sets` in which the sets of `again` replace the empty sets at the indices `rows`."""
    ids, logprobs, offsets = sets
    sizes = np.diff(offsets)
    added = again.offsets.diff().numpy()
    at = np.repeat(offsets[rows], added)
    sizes[rows] = added
    return (
        np.insert(ids, at, again.token_ids.numpy()),
        np.insert(logprobs, at, again.logprobs.numpy()),
        np.concatenate([[0], sizes.cumsum()]),
    )
