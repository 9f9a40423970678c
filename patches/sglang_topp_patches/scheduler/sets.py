"""Extract candidate sets from a forward pass's log-probs: on the device, and from there to the host.

`extract` returns each row's nucleus at a threshold p, and `extract_support` the tokens that the sampler could
draw after its top_k, top_p, and min_p filters. Both add the sampled token. On a CPU, the sets are complete
when the function returns (`ExtractedSets`).

On a GPU, the kernels write the sets into a buffer of fixed size, the staging area (`StagedSets`), and the
functions return without waiting for the GPU. The staging area is copied to the host together with SGLang's
own results. The scheduler reads the sizes of the sets only when it processes the results, because an earlier
read would wait for the GPU. If the sets of some rows did not fit into the staging area, the scheduler
extracts these sets again from the log-probs. This second extraction also runs on the GPU, but the scheduler
waits for it.

Until the scheduler processes the results, `StagedSets` keeps the log-probs of the rows that get sets. This is
device memory, so it does not count against the limits on candidates (`memory`), which come from the host's
memory. The kept log-probs can still be read then, for three reasons:

- SGLang records a CUDA event after its copies of the results, and waits for this event before the scheduler
  processes the results. By then, no unfinished GPU work of this pass reads or writes the kept log-probs.
- SGLang changes the kept log-probs in one way only: it replaces -inf with the dtype's lowest value. This
  module reads the dtype's lowest value as -inf.
- Each pass computes its log-probs in a new tensor, so later passes do not overwrite the kept log-probs.

`extract_support` also keeps a tensor that marks the tokens that the sampler could draw. Each pass computes
this tensor anew, so later passes do not overwrite it.
"""

from __future__ import annotations

import importlib.util
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_topp import nucleus
from sglang_topp.candidates.torch_tensors import to_device
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.memory import budget
from sglang_topp_patches.releases import internals
from sglang_topp_patches.set_buffer import PackedSet

if TYPE_CHECKING:
    from sglang_topp.nucleus.gpu_extraction import StagingArea

# All rows of a staging area share its capacity, which is proportional to the number of rows. A staging area
# for fewer than 16 rows gets the capacity for 16 rows, so that a few of its rows can have large sets.
_LEAST_ROWS = 16
_BYTES_PER_CANDIDATE = 8

_Flat: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Token ids, log-probs, and offsets, as in `ExtractedSets`."""
_TakeAgain: TypeAlias = Callable[[NDArray[np.intp]], _Flat]
_Extraction: TypeAlias = Callable[[slice], _Flat]


staging_counts = {"rows_staged": 0, "rows_taken_again": 0}
"""How many rows got a set in a staging area, and how many of these did not fit and were extracted again."""


@dataclass(frozen=True)
class ExtractedSets:
    """The complete sets of some rows of a batch, on the device or the host; n is the number of candidates.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        offsets: int64 [rows + 1], the index in `token_ids` at which each row's set starts, and n at the end.
        problems: maps the index of a row to the reason why the row has no exact set.
    """

    token_ids: Tensor
    logprobs: Tensor
    offsets: Tensor
    problems: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """The number of rows, including the rows that have no set."""
        return len(self.offsets) - 1

    def map(self, copy_tensor: Callable[[Tensor], Tensor]) -> ExtractedSets:
        """Return a copy of this object with `copy_tensor` applied to every tensor.

        If `copy_tensor` is asynchronous, its copies may still run when this method returns.
        """
        return ExtractedSets(
            copy_tensor(self.token_ids), copy_tensor(self.logprobs), copy_tensor(self.offsets), self.problems
        )

    def settled(self) -> ExtractedSets:
        """Return this object, because the sets of an `ExtractedSets` are always complete."""
        return self

    def on_host(self) -> list[PackedSet | str]:
        """Return each row's set, or the reason why it has none. The tensors must already be on the host."""
        return _packed(self.token_ids.numpy(), self.logprobs.numpy(), self.offsets.numpy(), self.problems)


def _packed(
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    offsets: NDArray[np.int64],
    problems: Mapping[int, str],
    lowest: float | None = None,
) -> list[PackedSet | str]:
    if lowest is not None:
        # A sampled token of probability 0 must have the log-prob -inf, but SGLang may have written another.
        logprobs = np.where(logprobs <= lowest, np.float32(-np.inf), logprobs)
    packed: list[PackedSet | str] = [
        (token_ids[low:high].tobytes(), logprobs[low:high].tobytes())
        for low, high in pairwise(offsets.tolist())
    ]
    for row, problem in problems.items():
        packed[row] = problem
    return packed


@dataclass(frozen=True)
class StagedSets:
    """The sets of some rows, in a staging area that is copied to the host.

    Attributes:
        area: the staging area, which holds the sets of R rows.
        vocab: the vocabulary's size.
        lowest: log-probs at or below this value mean a probability of 0.
        take_again: has one function, which extracts the sets of the given rows on the GPU, and waits until
            their sizes are known. All copies of this object share the list, which is cleared to free the
            log-probs: SGLang may keep a pass's results until the next pass.
        rows: the index of each of the R rows in the result of `on_host`, in ascending order. All other rows
            of the result have empty sets.
        num_rows: the number of all rows of the result of `on_host`.
    """

    area: StagingArea
    vocab: int
    lowest: float
    take_again: list[_TakeAgain]
    rows: NDArray[np.intp]
    num_rows: int

    def map(self, copy_tensor: Callable[[Tensor], Tensor]) -> StagedSets:
        """Return a copy of this object with `copy_tensor` applied to the tensors of the staging area.

        If `copy_tensor` is asynchronous, its copies may still run when this method returns.
        """
        return replace(self, area=self.area.map(copy_tensor))

    def settled(self) -> ExtractedSets:
        """Wait for the GPU, and return the complete sets on the GPU."""
        packed = self.map(lambda tensor: tensor.cpu()).on_host()
        sets = [(b"", b"") if isinstance(each, str) else each for each in packed]
        ids, logprobs = (bytearray().join(each[i] for each in sets) for i in (0, 1))
        offsets = np.cumsum([0, *(len(each) // 4 for each, _ in sets)])
        return ExtractedSets(
            torch.from_numpy(np.frombuffer(ids, np.int32)),
            torch.from_numpy(np.frombuffer(logprobs, np.float32)),
            torch.from_numpy(offsets),
            {row: each for row, each in enumerate(packed) if isinstance(each, str)},
        ).map(lambda tensor: tensor.to(self.area.rows.device))

    def on_host(self) -> list[PackedSet | str]:
        """Return each row's set, or the reason why it has none. The tensors of `area` must be on the host.

        This method waits for the GPU only if the sets of some rows did not fit into the staging area. Call
        `on_host` only once, because it clears `take_again`.
        """
        problems = {row: str(each) for row, each in self.area.problems(self.vocab).items()}
        found = _packed(*self.area.sets(), problems, self.lowest)
        staging_counts["rows_staged"] += int(np.count_nonzero(self.area.sizes))
        if len(left_out := self.area.left_out):
            staging_counts["rows_taken_again"] += len(left_out)
            ids, logprobs, offsets = (each.cpu().numpy() for each in self.take_again[0](left_out))
            again = _packed(ids, logprobs, offsets, {}, self.lowest)
            for row, packed in zip(left_out.tolist(), again, strict=True):
                found[row] = packed
        self.take_again.clear()
        by_row = dict(zip(self.rows.tolist(), found, strict=True))
        return [by_row.get(row, (b"", b"")) for row in range(self.num_rows)]


Sets: TypeAlias = ExtractedSets | StagedSets
"""The sets of some rows: complete (`ExtractedSets`), or still in a staging area (`StagedSets`)."""


@dataclass(frozen=True)
class PassSets(ABC):
    """The sets of one forward pass: those of its prompt positions, or those of the tokens that it drew.

    The sets are on the device first, and on the host later. The class implements SGLang's interfaces
    `DeviceAuxiliaryOutput` and `HostAuxiliaryOutput`. Its fields may be tensors, `Sets`, or lists of them.
    """

    def copy_to_host(self, copy_tensor: Callable[[Tensor], Tensor]) -> Self:
        """Start copying the sets to the host. SGLang waits for these copies before `consume` runs.

        Each tensor is copied with `copy_tensor`, always in the same order.
        """
        return self._changed(lambda sets: sets.map(copy_tensor), copy_tensor)

    def settled(self) -> Self:
        """Return a copy of this object in which no set is in a staging area (`StagedSets.settled`)."""
        return self._changed(lambda sets: sets.settled(), lambda tensor: tensor)

    @abstractmethod
    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Add the sets to the requests of `batch`."""

    def _changed(self, change: Callable[[Sets], Sets], change_tensor: Callable[[Tensor], Tensor]) -> Self:
        def changed(value: Any) -> Any:
            if isinstance(value, list):
                return [changed(each) for each in value]
            if isinstance(value, Tensor):
                return change_tensor(value)
            return change(value) if isinstance(value, Sets) else value

        return replace(self, **{each.name: changed(getattr(self, each.name)) for each in fields(self)})


def extract(
    logprobs: Tensor,
    thresholds: Sequence[float],
    sampled_ids: Tensor,
    *,
    lowest: float | None = None,
    is_taken: Tensor | None = None,
) -> Sets:
    """Extract the nucleus of each row whose threshold is not 0, plus the row's sampled token.

    If a row has no exact set, `problems` of the returned object gives the reason. All other rows still get
    their sets.

    Args:
        logprobs: float [B, V], the natural log-probs of B rows over a vocabulary of V tokens. On a GPU, the
            returned object may read `logprobs` again until the scheduler processes the results of the forward
            pass. Until then, the caller must not change `logprobs`, except to replace -inf with the dtype's
            lowest value.
        thresholds: each row's threshold p; a row with a threshold of 0 gets an empty set.
        sampled_ids: integer [B], each row's sampled token, or the next prompt token if the row scores a
            prompt. A set that is not empty contains this token. The caller must not change it either.
        lowest: log-probs at or below this value stand for probability 0. None means the lowest value of the
            dtype of `logprobs`.
        is_taken: bool [B], on the same device as `logprobs`: whether each row gets a set. If `is_taken` is
            None, every row gets a set.
    """
    p = np.array(thresholds, np.float64)
    if is_staged(logprobs):
        return _stage_top_p(logprobs, p, sampled_ids, _bound(logprobs, lowest), is_taken)
    logprobs = _with_zeros(logprobs, lowest)
    if is_taken is not None:
        p = np.where(is_taken.cpu().numpy(), p, 0.0)

    def extraction(rows: slice) -> _Flat:
        return nucleus.top_p_candidates(logprobs[rows], p[rows].tolist(), sampled_ids[rows])

    return _extract_rows(extraction, logprobs, slice(0, len(p)))


def extract_support(
    logprobs: Tensor,
    rows: Sequence[int],
    is_drawn: Tensor | None,
    token_ids: Tensor | None,
    sampled_ids: Tensor,
    is_filtered: Tensor,
    *,
    lowest: float | None = None,
) -> Sets:
    """Extract the set of tokens that the sampler could draw, for each of the R rows that `rows` lists.

    `nucleus.support_candidates` gives the exact definition of these sets. If one of the R rows has no exact
    set, `problems` of the returned object gives the reason, and the other R - 1 rows still get their sets.

    Args:
        logprobs: float [B, V], the same as in `extract`.
        rows: ascending indices into the B rows of `logprobs`.
        is_drawn: bool [R, W], whether each of a row's W filtered probabilities is above 0. None if SGLang
            drew without probabilities; each set is the sampled token then.
        token_ids: int32 [R, W], the token in each column of `is_drawn`, most likely token first. None means
            that W equals V, and that column `i` belongs to token `i`.
        sampled_ids: integer [B], the sampled tokens.
        is_filtered: bool [R], on the same device: False for a row whose set is its sampled token alone,
            because the row is sampled greedily.
        lowest: the same as in `extract`.
    """
    at = to_device(np.asarray(rows), logprobs.device)
    sampled_ids = sampled_ids[at]
    if len(rows) < len(logprobs):
        logprobs = logprobs[at]
    if is_drawn is None:
        is_drawn, token_ids = torch.zeros_like(is_filtered)[:, None], sampled_ids[:, None].int()
    else:
        # A new tensor, because a replay of a CUDA graph later overwrites the sampler's.
        is_drawn = is_drawn & is_filtered[:, None]
    if is_staged(logprobs):
        return _stage_support(logprobs, is_drawn, token_ids, sampled_ids, _bound(logprobs, lowest))
    logprobs = _with_zeros(logprobs, lowest)
    if token_ids is not None:
        # Each row begins with its most likely tokens. The columns from `width` on hold no token that the
        # sampler could draw, so drop these columns.
        width = max(1, int(is_drawn.sum(1).amax()))
        is_drawn, token_ids = is_drawn[:, :width], token_ids[:, :width]

    def extraction(rows: slice) -> _Flat:
        ids = None if token_ids is None else token_ids[rows]
        return nucleus.support_candidates(logprobs[rows], is_drawn[rows], ids, sampled_ids=sampled_ids[rows])

    return _extract_rows(extraction, logprobs, slice(0, len(logprobs)))


def lowest_logprob() -> float | None:
    """Return the bound at or below which a log-prob stands for probability 0.

    None means that the bound is the lowest value of the log-probs' dtype.

    With `SGLANG_SANITIZE_NAN_LOGITS`, which `sglang-topp serve` sets, SGLang replaces logits of -inf with
    -1e30. For greedy rows, SGLang reports the `log_softmax` of the logits. So a token whose logit was -inf
    has a finite log-prob near -1e30, which is below the bound of -1e20.
    """
    return -1e20 if internals().sanitizes_logits() else None


def _extract_rows(extraction: _Extraction, logprobs: Tensor, rows: slice) -> ExtractedSets:
    """Extract the sets of some rows. If one of them has no exact set, halve the rows until it is alone."""
    try:
        return ExtractedSets(*extraction(rows))
    except InvalidInputError as error:
        if rows.stop - rows.start == 1:
            none, offsets = logprobs.new_empty(0, dtype=torch.float32), torch.zeros(2, dtype=torch.int64)
            return ExtractedSets(none.int(), none, offsets.to(logprobs.device), {0: str(error)})
    middle = (rows.start + rows.stop) // 2
    low = _extract_rows(extraction, logprobs, slice(rows.start, middle))
    high = _extract_rows(extraction, logprobs, slice(middle, rows.stop))
    return ExtractedSets(
        torch.cat([low.token_ids, high.token_ids]),
        torch.cat([low.logprobs, high.logprobs]),
        torch.cat([low.offsets, high.offsets[1:] + low.offsets[-1]]),
        {**low.problems, **{low.num_rows + row: problem for row, problem in high.problems.items()}},
    )


def _bound(logprobs: Tensor, lowest: float | None) -> float:
    return torch.finfo(logprobs.dtype).min if lowest is None else lowest


def _with_zeros(logprobs: Tensor, lowest: float | None) -> Tensor:
    return logprobs if lowest is None else logprobs.masked_fill(logprobs <= lowest, -torch.inf)


def is_staged(logprobs: Tensor) -> bool:
    """Return whether the sets of `logprobs` are extracted into a staging area.

    A staging area needs Triton, and also a GPU or Triton's interpreter (`TRITON_INTERPRET=1`).
    """
    return _has_kernels(logprobs.is_cuda)


@cache
def _has_kernels(is_cuda: bool) -> bool:
    runs = is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return runs and importlib.util.find_spec("triton") is not None


def _stage_top_p(
    logprobs: Tensor,
    p: NDArray[np.float64],
    sampled_ids: Tensor,
    lowest: float,
    is_taken: Tensor | None,
) -> StagedSets:
    from sglang_topp.nucleus import gpu_extraction

    rows, num_rows = np.flatnonzero(p), len(p)
    if len(rows) < num_rows:
        p, at = p[rows], to_device(rows, logprobs.device)
        logprobs, sampled_ids = logprobs[at], sampled_ids[at]
        is_taken = None if is_taken is None else is_taken[at]
    sampled_ids = sampled_ids.long()

    def take_again(which: NDArray[np.intp]) -> _Flat:
        wanted = np.zeros_like(p)
        wanted[which] = p[which]
        found = gpu_extraction.find_top_p(logprobs, wanted, sampled_ids, lowest=lowest)
        ids, values, offsets = found.complete()
        ends = to_device(np.append(which, len(p)), offsets.device)
        return ids, values, offsets[ends]

    found = gpu_extraction.find_top_p(logprobs, p, sampled_ids, lowest=lowest, is_taken_B=is_taken)
    area = found.stage(_capacity(len(p)))
    return StagedSets(area, logprobs.shape[1], lowest, [take_again], rows, num_rows)


def _stage_support(
    logprobs: Tensor,
    is_drawn: Tensor,
    token_ids: Tensor | None,
    sampled_ids: Tensor,
    lowest: float,
) -> StagedSets:
    from sglang_topp.nucleus import gpu_extraction

    num_rows, sampled_ids = len(logprobs), sampled_ids.long()

    def take_again(which: NDArray[np.intp]) -> _Flat:
        at = to_device(which, logprobs.device)
        ids = None if token_ids is None else token_ids[at]
        return gpu_extraction.find_support(
            logprobs[at], is_drawn[at], ids, sampled_ids[at], lowest=lowest
        ).complete()

    found = gpu_extraction.find_support(logprobs, is_drawn, token_ids, sampled_ids, lowest=lowest)
    area = found.stage(_capacity(num_rows))
    return StagedSets(area, logprobs.shape[1], lowest, [take_again], np.arange(num_rows), num_rows)


@cache
def warm_up(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels before the first request for sets, so that no request waits for the compiler."""
    logprobs = torch.full((1, vocab), -math.log(vocab), dtype=dtype, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    extract(logprobs, [0.5], first)
    is_drawn = torch.ones((1, vocab), dtype=torch.bool, device=device)
    for drawn in (None, is_drawn):
        extract_support(logprobs, [0], drawn, None, first, is_drawn[:, 0])


def max_staging_bytes(scheduler: Any) -> int:
    """Return the size of the largest staging area that a decode step of SGLang's `Scheduler` may need."""
    slots = getattr(scheduler.server_args, "speculative_num_draft_tokens", None) or 1
    return _BYTES_PER_CANDIDATE * _capacity(scheduler.max_running_requests * slots)


def _capacity(num_rows: int) -> int:
    return max(num_rows, _LEAST_ROWS) * budget().staged_candidates_per_row
