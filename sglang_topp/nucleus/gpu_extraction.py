"""Extract candidate sets with Triton kernels on a GPU: two functions wait for the GPU, and two do not.

`stage_top_p` and `top_p_candidates` extract the nucleus of each row of log-probs for a top-p threshold.
`stage_support` and `support_candidates` extract the tokens that a sampler can draw: those with a sampling
weight above 0.

The host can learn the sizes of the candidate sets only by waiting for the GPU. `stage_top_p` and
`stage_support` do not wait. They write the sets to a staging area of fixed size, and leave out sets that do
not fit. The caller copies the staging area to the host, reads which rows' sets were left out, and extracts
those sets again. `top_p_candidates` and `support_candidates` wait for the set sizes, and allocate memory of
exactly the right size.

Shape legend: B rows of log-probs, R rows with sampling weights, V ids in the vocabulary, W sampling weights
per row, C candidates that fit in the staging area, n candidates in all. Without the argument `token_ids_RW`,
every id of the vocabulary has a weight, and W is V. With `token_ids_RW`, only the ids in `token_ids_RW` have
weights, so W may be less than V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_topp.candidates.csr_operations import offsets_of
from sglang_topp.candidates.torch_tensors import to_device
from sglang_topp.errors import InvalidInputError
from sglang_topp.nucleus import sampler_support_triton, top_p_triton
from sglang_topp.nucleus.argument_checks import row_error
from sglang_topp.nucleus.top_p_torch import sort_key_descending

__all__ = [
    "StagedRows",
    "StagingArea",
    "stage_support",
    "stage_top_p",
    "support_candidates",
    "top_p_candidates",
]

_SIZE, _START, _ERROR_CODE, _ERROR_DETAIL = range(4)


@dataclass(frozen=True)
class StagingArea:
    """Candidate sets in tensors of fixed size, on the device or on the host.

    Attributes:
        entries: int32 [2, C]. `entries[0]` holds the candidates' token ids, and `entries[1]` the bits of
            their float32 log-probs.
        rows: int32 [4, B], or [4, R] from `stage_support`. Each column describes one row of log-probs by
            four numbers: the set size, the index of the set's first candidate in `entries`, an error code,
            and the error's detail. For a set with candidates, an index of -1 means that the set did not fit
            in the staging area. `argument_checks` lists the error codes and their details.
        is_by_id: whether tokens of equal log-probs in a set are in the order of their ids.
    """

    entries: Tensor
    rows: Tensor
    is_by_id: bool

    def map(self, copy_tensor: Callable[[Tensor], Tensor]) -> StagingArea:
        """Return a staging area whose tensors are `copy_tensor(entries)` and `copy_tensor(rows)`.

        If `copy_tensor` is asynchronous, the two copies may still run when this method returns.
        """
        return StagingArea(copy_tensor(self.entries), copy_tensor(self.rows), self.is_by_id)

    def read(self) -> StagedRows:
        """Return the tensors `entries` and `rows` as NumPy arrays.

        `entries` and `rows` must be on the host, and all copies into these two tensors must be finished.
        """
        return StagedRows(self.entries.numpy(), self.rows.numpy(), self.is_by_id)


@dataclass(frozen=True)
class StagedRows:
    """The contents of a `StagingArea` after the copy to the host, as NumPy arrays.

    Attributes:
        entries: int32 [2, C], as in `StagingArea`.
        rows: int32 [4, B] or [4, R], as in `StagingArea`.
        is_by_id: as in `StagingArea`.
    """

    entries: NDArray[np.int32]
    rows: NDArray[np.int32]
    is_by_id: bool

    @property
    def left_out(self) -> NDArray[np.intp]:
        """Indices of the rows whose sets did not fit in the staging area."""
        return np.flatnonzero((self.rows[_SIZE] > 0) & (self.rows[_START] < 0))

    def problems(self, sampled_B: Tensor | None, vocab: int) -> dict[int, InvalidInputError]:
        """Return a dict that maps each invalid row's number to the row's error. An invalid row has no set."""
        codes, details = self.rows[_ERROR_CODE].tolist(), self.rows[_ERROR_DETAIL].tolist()
        wrong = np.flatnonzero(self.rows[_ERROR_CODE]).tolist()
        return {row: row_error(row, codes[row], details[row], sampled_B, vocab) for row in wrong}

    def sets(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]:
        """Return `(token_ids [n], logprobs [n], offsets [B + 1])` of the sets that fit in the staging area.

        Each set is ordered by log-prob, highest first, then by token id. For a row whose set did not fit,
        this method returns an empty set.
        """
        sizes = np.where(self.rows[_START] >= 0, self.rows[_SIZE], 0)
        offsets = offsets_of(sizes)
        # The staging area holds the sets in the order of their rows, without gaps.
        ids, logprobs = self.entries[0, : offsets[-1]], self.entries[1, : offsets[-1]].view(np.float32)
        # The order of `_ordered`. For a few thousand candidates, NumPy takes half as long as torch.
        bits = (np.float32(0.0) - logprobs).view(np.int32)
        keys = (np.arange(len(sizes)).repeat(sizes) << 32) + (bits ^ ((bits >> 31) & 0x7FFFFFFF))
        order = keys.argsort(kind="stable") if self.is_by_id else np.lexsort((ids, keys))
        return ids[order], logprobs[order], offsets


def stage_top_p(
    logprobs_BV: Tensor,
    p_B: NDArray[np.float64],
    sampled_B: Tensor | None,
    *,
    capacity: int,
    lowest: float | None = None,
    is_taken_B: Tensor | None = None,
) -> StagingArea:
    """Extract top-p candidate sets into a staging area, without waiting for the GPU.

    The sizes of all tensors that the function allocates depend only on `capacity` and the arguments' shapes.

    Args:
        logprobs_BV: floats on a GPU, contiguous along a row.
        p_B: float64, the top-p threshold of each row, on the host.
        sampled_B: int64, the sampled token id of each row, on the GPU.
        capacity: C, the number of candidates for which the staging area has room.
        lowest: log-probs at or below this value stand for probability 0. The default of `lowest` is the
            lowest value of the dtype of `logprobs_BV`.
        is_taken_B: bool, on the GPU, whether to extract each row's set. A row with False gets an empty set,
            like a row with a threshold of 0. If `is_taken_B` is None, the function extracts all sets.
    """
    limits_B = _limits(p_B, logprobs_BV)
    if is_taken_B is not None:
        limits_B = torch.where(is_taken_B, limits_B, 0.0)
    cuts = top_p_triton.find_cuts(logprobs_BV, limits_B, sampled_B, _lowest(lowest, logprobs_BV))
    starts_B = top_p_triton.place(cuts.sizes, capacity)
    entries_2C = _entries(capacity, logprobs_BV)
    top_p_triton.compact(logprobs_BV, sampled_B, cuts, starts_B, entries_2C)
    rows = torch.stack([cuts.sizes, starts_B.int(), cuts.error_codes, cuts.highest.view(torch.int32)])
    return StagingArea(entries_2C, rows, is_by_id=True)


def stage_support(
    logprobs_BV: Tensor,
    rows_R: Tensor,
    is_drawn_RW: Tensor,
    token_ids_RW: Tensor | None,
    sampled_R: Tensor,
    *,
    capacity: int,
    lowest: float | None = None,
) -> StagingArea:
    """Without waiting for the GPU, fill a staging area with the tokens that a sampler could draw.

    The sizes of all tensors that the function allocates depend only on `capacity` and the arguments' shapes.

    Args:
        logprobs_BV: floats on a GPU, contiguous along a row.
        rows_R: int64 on the GPU. The log-probs for row `r` of `is_drawn_RW` are in row `rows_R[r]` of
            `logprobs_BV`.
        is_drawn_RW: bool, True where the sampler's weight of a token is above 0.
        token_ids_RW: int32, the token id of each element of `is_drawn_RW`. None means that W is V, and that
            column `i` belongs to token id `i`.
        sampled_R: int64, the sampled token id of each row of `is_drawn_RW`.
        capacity: C, the number of candidates for which the staging area has room.
        lowest: as in `stage_top_p`.
    """
    drawn = (logprobs_BV, rows_R, is_drawn_RW, token_ids_RW, sampled_R)
    found_3R = sampler_support_triton.count(*drawn, _lowest(lowest, logprobs_BV))
    starts_R = top_p_triton.place(found_3R[0], capacity)
    entries_2C = _entries(capacity, logprobs_BV)
    sampler_support_triton.compact(*drawn, found_3R[0], starts_R, entries_2C)
    rows = torch.stack([found_3R[0], starts_R.int(), found_3R[1], found_3R[2]])
    return StagingArea(entries_2C, rows, is_by_id=False)


def top_p_candidates(
    logprobs_BV: Tensor, p_B: NDArray[np.float64], sampled_B: Tensor | None, *, lowest: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sglang_topp.nucleus.top_p_candidates` on a GPU. The caller must have checked the arguments.

    The host waits for the GPU once, to read the set sizes. `lowest` is as in `stage_top_p`.
    """
    logprobs_BV = _with_contiguous_rows(logprobs_BV)
    cuts = top_p_triton.find_cuts(
        logprobs_BV, _limits(p_B, logprobs_BV), sampled_B, _lowest(lowest, logprobs_BV)
    )
    found = torch.stack([cuts.sizes, cuts.sizes, cuts.error_codes, cuts.highest.view(torch.int32)])
    offsets_B1, entries_2n = _allocate_entries(found, sampled_B, logprobs_BV)
    top_p_triton.compact(logprobs_BV, sampled_B, cuts, offsets_B1[:-1], entries_2n)
    return *_ordered(cuts.sizes, entries_2n, is_by_id=True), offsets_B1


def support_candidates(
    logprobs_RV: Tensor,
    weights_RW: Tensor,
    token_ids_RW: Tensor | None,
    sampled_R: Tensor,
    *,
    lowest: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sglang_topp.nucleus.support_candidates` on a GPU. The caller must have checked the arguments.

    The host waits for the GPU once, to read the set sizes. `lowest` is as in `stage_top_p`.
    """
    logprobs_RV = _with_contiguous_rows(logprobs_RV)
    rows_R = torch.arange(len(logprobs_RV), device=logprobs_RV.device)
    ids_RW = None if token_ids_RW is None else token_ids_RW.to(torch.int32).contiguous()
    drawn = (logprobs_RV, rows_R, (weights_RW > 0).contiguous(), ids_RW, sampled_R)
    found_3R = sampler_support_triton.count(*drawn, _lowest(lowest, logprobs_RV))
    sizes_R = found_3R[0]
    offsets_R1, entries_2n = _allocate_entries(torch.cat([sizes_R[None], found_3R]), sampled_R, logprobs_RV)
    sampler_support_triton.compact(*drawn, sizes_R, offsets_R1[:-1], entries_2n)
    return *_ordered(sizes_R, entries_2n, is_by_id=False), offsets_R1


def _allocate_entries(
    found_4R: Tensor, sampled_R: Tensor | None, logprobs_RV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sets' offsets [R + 1], and an uninitialized tensor for the candidates of all rows.

    If any row is invalid, raise the error of the first invalid row.
    """
    found = StagedRows(np.empty((2, 0), np.int32), found_4R.cpu().numpy(), is_by_id=True)
    for first in found.problems(sampled_R, logprobs_RV.shape[1]).values():
        raise first
    offsets = offsets_of(found.rows[_SIZE])
    return to_device(offsets, logprobs_RV.device), _entries(int(offsets[-1]), logprobs_RV)


def _ordered(sizes_R: Tensor, entries_2n: Tensor, *, is_by_id: bool) -> tuple[Tensor, Tensor]:
    """Return the token ids and log-probs of all sets, each ordered by log-prob and then by id.

    The kernels for top-p write a set by id, except that a sampled token outside of the nucleus comes last.
    That token is less likely than all others, so the ids decide nothing about it.
    """
    ids_n, logprobs_n = entries_2n[0], entries_2n[1].view(torch.float32)
    row_n = torch.repeat_interleave(sizes_R, output_size=len(ids_n)).long()
    key_n = (row_n << 32) + sort_key_descending(logprobs_n)
    if is_by_id:
        order_n = key_n.argsort(stable=True)
    else:
        order_n = ids_n.argsort(stable=True)
        order_n = order_n[key_n[order_n].argsort(stable=True)]
    return ids_n[order_n], logprobs_n[order_n]


def _entries(capacity: int, logprobs_BV: Tensor) -> Tensor:
    return torch.empty((2, capacity), dtype=torch.int32, device=logprobs_BV.device)


def _limits(p_B: NDArray[np.float64], logprobs_BV: Tensor) -> Tensor:
    """Return float64 [B] on the GPU: the total probability at which each row's nucleus ends."""
    # With p = 1, the nucleus is the whole row, so the limit is infinite. A limit of 1 could end the nucleus
    # too early, because the rounded probabilities may sum to 1 before the end of the row.
    return to_device(np.where(p_B == 1, np.inf, p_B), logprobs_BV.device)


def _lowest(lowest: float | None, logprobs_BV: Tensor) -> float:
    return torch.finfo(logprobs_BV.dtype).min if lowest is None else lowest


def _with_contiguous_rows(logprobs_BV: Tensor) -> Tensor:
    return logprobs_BV if logprobs_BV.stride(1) == 1 else logprobs_BV.contiguous()
