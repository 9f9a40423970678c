"""Extract the candidate sets of a GPU pass without waiting for the device, through a buffer of fixed size.

The buffer is called the staging area. The kernels write the sets into it, and it is copied to the host
together with SGLang's own results. Until then, the host reads no value from the device, so it does not know
the sizes of the sets. It learns them when the scheduler processes the results. If some rows' sets did not
fit, the host extracts these sets again from the log-probs, and waits for the device.

Until the scheduler processes the results, this module keeps the log-probs of rows that ask for sets. Their
memory counts against the limits (`memory.budget`). The values of the kept log-probs stay valid, for three
reasons:

1. SGLang waits for the CUDA event after its copies, so all earlier work on the sampling stream is done.
2. If the host extracts sets again, it waits for the device before it frees the log-probs.
3. SGLang changes the log-probs in one way only: it replaces -inf with the dtype's lowest value. This module
   reads that value as -inf.

`sampler_support` copies what the sets need of the sampler's filtered probabilities, because the next replay
of a CUDA graph overwrites them.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.nucleus.host_to_device import to_device
from sglang_topp_patches.memory.budget import InFlight, budget
from sglang_topp_patches.scheduler.extracted_sets import ExtractedSets
from sglang_topp_patches.scheduler.process_state import SchedulerProcess

if TYPE_CHECKING:
    from sglang_topp.nucleus.gpu_extraction import StagingArea

__all__ = ["StagedSets", "by_threshold", "by_weights", "is_staged", "warm_up"]

_LEAST_ROWS = 16  # so that a small batch has room for a few rows with large sets
_BYTES_PER_CANDIDATE = 8


def is_staged(logprobs: torch.Tensor) -> bool:
    """Return whether sets are staged: on a GPU or in Triton's interpreter, with Triton installed."""
    return (logprobs.is_cuda or _is_interpreted()) and _has_triton()


@cache
def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


_TakeAgain: TypeAlias = Callable[[NDArray[np.intp]], ExtractedSets]


class _Kept:
    """The tensors from which a pass's sets can be extracted again. `free` drops these tensors.

    Attributes:
        process: the scheduler process, which counts the tensors' memory.
        sampled_ids: int64 [R], the sampled tokens.
        vocab: the vocabulary's size.
        lowest: log-probs at or below this value stand for probability 0; None means the dtype's lowest value.
        take_again: extracts the sets of some of the R rows on the device, and waits until their sizes are
            known.
    """

    def __init__(
        self,
        process: SchedulerProcess,
        sampled_ids: torch.Tensor,
        vocab: int,
        lowest: float | None,
        take_again: _TakeAgain,
        num_bytes: int,
    ) -> None:
        self.process, self.sampled_ids, self.vocab, self.lowest = process, sampled_ids, vocab, lowest
        self.take_again: _TakeAgain | None = take_again
        self._account = process.in_flight.open(None)
        self._account.add(num_bytes // _BYTES_PER_CANDIDATE, 0)

    def free(self) -> None:
        """Drop the tensors now, because SGLang may keep a pass's results until the next pass."""
        self.take_again = None
        self._account.close()


def by_threshold(
    process: SchedulerProcess,
    logprobs: torch.Tensor,
    thresholds: Sequence[float],
    sampled_ids: torch.Tensor,
    lowest: float | None,
    is_taken: torch.Tensor | None = None,
) -> StagedSets:
    """Extract each row's set at its threshold p, without waiting for the device like `extraction.extract`."""
    from sglang_topp.nucleus import gpu_extraction

    asked = np.array(thresholds, np.float64)
    rows = np.flatnonzero(asked)
    if len(rows) < len(asked):
        on_device = to_device(rows, logprobs.device)
        logprobs, sampled_ids = logprobs[on_device], sampled_ids[on_device]
        is_taken = None if is_taken is None else is_taken[on_device]
    elif logprobs.stride(1) != 1:
        logprobs = logprobs.contiguous()
    # Copy the sampled tokens, because SGLang may replace them in place. It does so if a grammar or another
    # rank chooses the token.
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
    kept = _Kept(process, sampled_ids, logprobs.shape[1], lowest, take_again, logprobs.nbytes)
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
    """Extract the sets of tokens that the sampler could draw, without waiting for the device.

    The arguments are those of `extraction.extract_support`, with one difference: `sampled_ids` has one token
    per entry of `rows`.
    """
    from sglang_topp.nucleus import gpu_extraction

    num_rows, device = len(rows), logprobs.device
    if num_rows < len(logprobs):
        logprobs = logprobs[rows]
    elif logprobs.stride(1) != 1:
        logprobs = logprobs.contiguous()
    is_drawn, sampled_ids = is_drawn.contiguous(), sampled_ids.long()
    token_ids = None if token_ids is None else token_ids.int().contiguous()

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
        torch.arange(num_rows, device=device),
        is_drawn,
        token_ids,
        sampled_ids,
        capacity=_capacity(num_rows),
        lowest=lowest,
    )
    num_bytes = sum(each.nbytes for each in (logprobs, is_drawn, token_ids) if each is not None)
    kept = _Kept(process, sampled_ids, logprobs.shape[1], lowest, take_again, num_bytes)
    return StagedSets(area, kept, np.arange(num_rows), num_rows)


@cache
def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels before the first request for sets, so that no request waits for the compiler."""
    logprobs = torch.full((1, vocab), -math.log(vocab), dtype=dtype, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    process = SchedulerProcess(InFlight(sys.maxsize))  # a separate counter, for sets that are not kept
    by_threshold(process, logprobs, [0.5], first, None)
    for width in (1, vocab):
        is_drawn = torch.ones((1, width), dtype=torch.bool, device=device)
        by_weights(
            process, logprobs, first, is_drawn, None if width == vocab else first[None].int(), first, None
        )


def _capacity(num_rows: int) -> int:
    return max(num_rows, _LEAST_ROWS) * budget().staged_candidates_per_row


@dataclass(frozen=True)
class StagedSets:
    """The sets of some rows, in a staging area that is copied to the host.

    Attributes:
        area: the staging area, which holds the sets of R rows.
        kept: the tensors from which the sets can be extracted again.
        rows: the indices of the R rows, ascending. All other rows have empty sets.
        num_rows: the total number of rows.
        problems: maps the index of a row without an exact set to the reason. `on_host` finds further reasons.
    """

    area: StagingArea
    kept: _Kept
    rows: NDArray[np.intp]
    num_rows: int
    problems: Mapping[int, str] = field(default_factory=dict)

    def map(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StagedSets:
        """Apply `copy_tensor` to the staging area, and return the sets. Asynchronous copies may still run."""
        return replace(self, area=self.area.map(copy_tensor))

    def with_problems(self, problems: Mapping[int, str]) -> StagedSets:
        """Return the same sets, with more rows marked as having no exact set."""
        return replace(self, problems={**self.problems, **problems})

    def settled(self) -> ExtractedSets:
        """Wait until the sets are complete, and return them on the device."""
        device = self.area.rows.device
        return self.map(lambda tensor: tensor.cpu()).on_host().map(lambda tensor: tensor.to(device))

    def on_host(self) -> ExtractedSets:
        """Return the sets from the staging area, which must already be on the host. Call this method once.

        The method waits for the device only if some rows' sets did not fit. Before it returns, it frees the
        kept tensors.
        """
        read = self.area.read()
        found = read.problems(self.kept.sampled_ids, self.kept.vocab)
        problems = {**{int(self.rows[i]): str(problem) for i, problem in found.items()}, **self.problems}
        ids, logprobs, offsets = read.sets()
        counts = self.kept.process.staging
        counts.rows_staged += int((read.rows[0] > 0).sum())
        if len(left_out := read.left_out):
            counts.rows_taken_again += len(left_out)
            assert self.kept.take_again is not None
            again = self.kept.take_again(left_out).map(lambda tensor: tensor.cpu())
            ids, logprobs, offsets = _inserted((ids, logprobs, offsets), left_out, again)
        self.kept.free()
        # For rows that were extracted again, SGLang may have replaced the sampled token's log-prob of -inf.
        lowest = np.finfo(np.float32).min if self.kept.lowest is None else self.kept.lowest
        logprobs = np.where(logprobs <= lowest, np.float32(-np.inf), logprobs)
        sizes = np.zeros(self.num_rows, np.int64)
        sizes[self.rows] = np.diff(offsets)
        offsets = np.concatenate([[0], sizes.cumsum()])
        return ExtractedSets(
            torch.from_numpy(ids), torch.from_numpy(logprobs), torch.from_numpy(offsets), problems
        )


_Flat: TypeAlias = tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]


def _inserted(sets: _Flat, rows: NDArray[np.intp], again: ExtractedSets) -> _Flat:
    """Return `sets`, in which `rows` are empty, with the sets of these rows inserted from `again`."""
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
