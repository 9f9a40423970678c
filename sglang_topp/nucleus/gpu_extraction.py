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
from functools import partial

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

__all__ = ["StagingArea", "stage_support", "stage_top_p", "support_candidates", "top_p_candidates"]

_SIZE, _START, _ERROR = range(3)


@dataclass(frozen=True)
class StagingArea:
    """Candidate sets in tensors of fixed size, on the device or on the host.

    Only `map` may be called before both tensors are on the host.

    Attributes:
        entries: int32 [2, C]. `entries[0]` holds the candidates' token ids, and `entries[1]` the bits of
            their float32 log-probs.
        rows: int64 [B, 3], or [R, 3] from `stage_support`. Each row describes one row of log-probs: the set
            size; an index into `entries`, or -1 if the set is empty or did not fit; and an error, or 0
            (`argument_checks.row_error`). A row with an error has no set.
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

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The size of each row's set, whether it fit or not."""
        sizes: NDArray[np.int64] = self.rows.numpy()[:, _SIZE]
        return sizes

    @property
    def left_out(self) -> NDArray[np.intp]:
        """Indices of the rows whose sets did not fit in the staging area."""
        return np.flatnonzero((self.sizes > 0) & (self.rows.numpy()[:, _START] < 0))

    def problems(self, vocab: int) -> dict[int, InvalidInputError]:
        """Return a dict that maps each invalid row's number to the row's error. An invalid row has no set."""
        errors = self.rows.numpy()[:, _ERROR]
        return {row: row_error(row, int(errors[row]), vocab) for row in np.flatnonzero(errors).tolist()}

    def sets(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]:
        """Return `(token_ids [n], logprobs [n], offsets [B + 1])` of the sets that fit in the staging area.

        Each set is ordered by log-prob, highest first, then by token id. For a row whose set did not fit,
        this method returns an empty set.
        """
        sizes = np.where(self.rows.numpy()[:, _START] >= 0, self.sizes, 0)
        offsets = offsets_of(sizes)
        # The staging area holds the sets in the order of their rows, without gaps.
        ids, bits = self.entries.numpy()[:, : offsets[-1]]
        logprobs = bits.view(np.float32)
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
        logprobs_BV: floats on a GPU.
        p_B: float64, the top-p threshold of each row, on the host.
        sampled_B: int64, the sampled token id of each row, on the GPU.
        capacity: C, the number of candidates for which the staging area has room.
        lowest: log-probs at or below this value stand for probability 0. The default of `lowest` is the
            lowest value of the dtype of `logprobs_BV`.
        is_taken_B: bool, on the GPU, whether to extract each row's set. A row with False gets an empty set,
            like a row with a threshold of 0. If `is_taken_B` is None, the function extracts all sets.
    """
    with torch.cuda.device(logprobs_BV.get_device()):  # Triton launches kernels on the current device
        rows_B3, write = _find_top_p(logprobs_BV, p_B, sampled_B, lowest, is_taken_B)
        return StagingArea(_place_and_write(rows_B3, write, capacity), rows_B3, is_by_id=True)


def stage_support(
    logprobs_RV: Tensor,
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
        logprobs_RV: floats on a GPU.
        is_drawn_RW: bool, True where the sampler's weight of a token is above 0.
        token_ids_RW: integers, the token id of each element of `is_drawn_RW`. None means that W is V, and
            that column `i` belongs to token id `i`.
        sampled_R: int64, the sampled token id of each row.
        capacity: C, the number of candidates for which the staging area has room.
        lowest: as in `stage_top_p`.
    """
    with torch.cuda.device(logprobs_RV.get_device()):
        rows_R3, write = _find_support(logprobs_RV, is_drawn_RW, token_ids_RW, sampled_R, lowest)
        return StagingArea(_place_and_write(rows_R3, write, capacity), rows_R3, is_by_id=False)


def top_p_candidates(
    logprobs_BV: Tensor, p_B: NDArray[np.float64], sampled_B: Tensor | None, *, lowest: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sglang_topp.nucleus.top_p_candidates` on a GPU. The caller must have checked the arguments.

    The host waits for the GPU once, to read the set sizes. `lowest` is as in `stage_top_p`.
    """
    with torch.cuda.device(logprobs_BV.get_device()):
        rows_B3, write = _find_top_p(logprobs_BV, p_B, sampled_B, lowest)
        return _wait_and_write(rows_B3, write, logprobs_BV.shape[1], is_by_id=True)


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
    with torch.cuda.device(logprobs_RV.get_device()):
        rows_R3, write = _find_support(logprobs_RV, weights_RW > 0, token_ids_RW, sampled_R, lowest)
        return _wait_and_write(rows_R3, write, logprobs_RV.shape[1], is_by_id=False)


_Write = Callable[[Tensor], None]
"""Writes the candidates to the given entries, as soon as the sets have their places."""


def _find_top_p(
    logprobs_BV: Tensor,
    p_B: NDArray[np.float64],
    sampled_B: Tensor | None,
    lowest: float | None,
    is_taken_B: Tensor | None = None,
) -> tuple[Tensor, _Write]:
    # With p = 1, the nucleus is the whole row, so the limit is out of reach. A limit of 1 could end the
    # nucleus too early, because the rounded probabilities may sum to 1 before the end of the row.
    limits = np.ceil(p_B * 2.0**top_p_triton.UNIT_BITS).astype(np.int64)
    limits_B = to_device(np.where(p_B == 1, np.iinfo(np.int64).max, limits), logprobs_BV.device)
    if is_taken_B is not None:
        limits_B = torch.where(is_taken_B, limits_B, 0)
    logprobs_BV, lowest = _prepared(logprobs_BV, lowest)
    cuts = top_p_triton.find_cuts(logprobs_BV, limits_B, sampled_B, lowest)
    return cuts.rows, partial(top_p_triton.compact, logprobs_BV, sampled_B, cuts)


def _find_support(
    logprobs_RV: Tensor,
    is_drawn_RW: Tensor,
    token_ids_RW: Tensor | None,
    sampled_R: Tensor,
    lowest: float | None,
) -> tuple[Tensor, _Write]:
    logprobs_RV, lowest = _prepared(logprobs_RV, lowest)
    ids_RW = None if token_ids_RW is None else token_ids_RW.int().contiguous()
    drawn = sampler_support_triton.Drawn(logprobs_RV, is_drawn_RW.contiguous(), ids_RW, sampled_R)
    rows_R3 = sampler_support_triton.count(drawn, lowest)
    return rows_R3, partial(sampler_support_triton.compact, drawn, rows_R3)


def _prepared(logprobs_BV: Tensor, lowest: float | None) -> tuple[Tensor, float]:
    return (
        logprobs_BV if logprobs_BV.stride(1) == 1 else logprobs_BV.contiguous(),
        torch.finfo(logprobs_BV.dtype).min if lowest is None else lowest,
    )


def _place_and_write(rows_R3: Tensor, write: _Write, capacity: int) -> Tensor:
    top_p_triton.place(rows_R3, capacity)
    entries_2C = torch.empty((2, capacity), dtype=torch.int32, device=rows_R3.device)
    write(entries_2C)
    return entries_2C


def _wait_and_write(
    rows_R3: Tensor, write: _Write, vocab: int, *, is_by_id: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(token_ids, logprobs, offsets)` of all sets, each ordered by log-prob and then by id.

    The kernels for top-p write a set by id, except that a sampled token outside of the nucleus comes last.
    That token is less likely than all others, so the ids decide nothing about it.
    """
    found = StagingArea(torch.empty(2, 0), rows_R3.cpu(), is_by_id)
    for problem in found.problems(vocab).values():
        raise problem
    offsets = offsets_of(found.sizes)
    ids_n, bits_n = _place_and_write(rows_R3, write, int(offsets[-1]))
    logprobs_n = bits_n.view(torch.float32)
    row_n = torch.repeat_interleave(rows_R3[:, _SIZE], output_size=len(ids_n))
    key_n = (row_n << 32) + sort_key_descending(logprobs_n)
    if is_by_id:
        order_n = key_n.argsort(stable=True)
    else:
        order_n = ids_n.argsort(stable=True)
        order_n = order_n[key_n[order_n].argsort(stable=True)]
    return ids_n[order_n], logprobs_n[order_n], to_device(offsets, rows_R3.device)
