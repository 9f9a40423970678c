"""Candidate sets of a GPU's log-probs, taken without a wait.

A set's size is known on the device only. So the sets go one after the other into a staging area that is
as large as its caller says, and a row that does not fit is left out: its size tells so once the host has
it, and the caller takes it again, by then with a size that is known.

Shape legend: B rows of log-probs, R those of them that are drawn from, V vocabulary, W weights of a row, C
places of the staging area, n entries of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp.nucleus import support_triton, triton
from sglang_topp.nucleus._words import problem
from sglang_topp.nucleus.host import to_device
from sglang_topp.nucleus.select import falling

__all__ = [
    "Staged",
    "StagedRows",
    "stage_support",
    "stage_top_p",
    "support_candidates",
    "top_p_candidates",
]

_SIZE, _START, _WORD, _DETAIL = range(4)


@dataclass(frozen=True)
class Staged:
    """Sets on their way to the host.

    Attributes:
        entries: int32 [2, C], token ids and the bits of their float32 log-probs.
        rows: int32 [4, B], of each row its set's size, its place or -1, and two words (`_words`).
    """

    entries: Tensor
    rows: Tensor

    def map(self, copy_tensor: Callable[[Tensor], Tensor]) -> Staged:
        """The same with both tensors copied; the copies may still be under way."""
        return Staged(copy_tensor(self.entries), copy_tensor(self.rows))

    def read(self) -> StagedRows:
        """What has arrived; both tensors must be on the host by now."""
        return StagedRows(self.entries.numpy(), self.rows.numpy())


@dataclass(frozen=True)
class StagedRows:
    """`Staged`, on the host.

    Attributes:
        entries: int32 [2, C].
        rows: int32 [4, B].
    """

    entries: NDArray[np.int32]
    rows: NDArray[np.int32]

    @property
    def left_out(self) -> NDArray[np.intp]:
        """The rows that did not fit."""
        return np.flatnonzero((self.rows[_SIZE] > 0) & (self.rows[_START] < 0))

    def problems(self, sampled_B: Tensor | None, vocab: int) -> dict[int, InvalidInputError]:
        """What is wrong with a row, which then has no set. `sampled_B` is read where it is to blame."""
        words, details = self.rows[_WORD].tolist(), self.rows[_DETAIL].tolist()
        wrong = np.flatnonzero(self.rows[_WORD]).tolist()
        return {row: problem(row, words[row], details[row], sampled_B, vocab) for row in wrong}

    def sets(self) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]:
        """`(token_ids [n], logprobs [n], offsets [B + 1])` of the rows that fit, ordered as a set is."""
        sizes = np.where(self.rows[_START] >= 0, self.rows[_SIZE], 0)
        offsets = _offsets(sizes)
        # Rows stand in the staging area in their order, without a gap.
        token_ids = self.entries[0, : offsets[-1]]
        logprobs = self.entries[1, : offsets[-1]].view(np.float32)
        keys = falling(torch.from_numpy(logprobs)).numpy()
        order = np.lexsort((token_ids, keys, np.repeat(np.arange(len(sizes)), sizes)))
        return token_ids[order], logprobs[order], offsets


def stage_top_p(
    logprobs_BV: Tensor,
    p_B: NDArray[np.float64],
    sampled_B: Tensor | None,
    *,
    capacity: int,
    lowest: float | None = None,
) -> Staged:
    """Take the sets of `top_p_candidates`; waits for nothing, and allocates by shapes alone.

    Args:
        logprobs_BV: floats on a GPU, contiguous along a row.
        p_B: thresholds on the host.
        sampled_B: int64, on the GPU.
        capacity: C.
        lowest: log-probs at or below it stand for probability 0; the dtype's lowest value by default.
    """
    cuts = triton.find_cuts(logprobs_BV, _limits(p_B, logprobs_BV), sampled_B, _lowest(lowest, logprobs_BV))
    starts_B = triton.place(cuts.sizes, capacity)
    entries_2C = _entries(capacity, logprobs_BV)
    triton.compact(logprobs_BV, sampled_B, cuts, starts_B, entries_2C)
    return Staged(entries_2C, torch.stack([cuts.sizes, starts_B, cuts.words, cuts.highest.view(torch.int32)]))


def stage_support(
    logprobs_BV: Tensor,
    rows_R: Tensor,
    is_drawn_RW: Tensor,
    token_ids_RW: Tensor | None,
    sampled_R: Tensor,
    *,
    capacity: int,
    lowest: float | None = None,
) -> Staged:
    """Take the sets of `support_candidates`; waits for nothing, and allocates by shapes alone.

    Args:
        logprobs_BV: floats on a GPU, contiguous along a row.
        rows_R: int64 on the GPU, whose the weights are.
        is_drawn_RW: bool, which weights are above 0.
        token_ids_RW: int32, or None where W is V.
        sampled_R: int64.
        capacity: C.
        lowest: as for `stage_top_p`.
    """
    drawn = (logprobs_BV, rows_R, is_drawn_RW, token_ids_RW, sampled_R)
    found_3R = support_triton.count(*drawn, _lowest(lowest, logprobs_BV))
    starts_R = triton.place(found_3R[0], capacity)
    entries_2C = _entries(capacity, logprobs_BV)
    support_triton.compact(*drawn, found_3R[0], starts_R, entries_2C)
    return Staged(entries_2C, torch.stack([found_3R[0], starts_R, found_3R[1], found_3R[2]]))


def top_p_candidates(
    logprobs_BV: Tensor, p_B: NDArray[np.float64], sampled_B: Tensor | None, *, lowest: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`sglang_topp.nucleus.top_p_candidates` for arguments that went through `checked`; waits once, for
    the sizes. `lowest` is as for `stage_top_p`."""
    logprobs_BV = _with_contiguous_rows(logprobs_BV)
    cuts = triton.find_cuts(logprobs_BV, _limits(p_B, logprobs_BV), sampled_B, _lowest(lowest, logprobs_BV))
    found = torch.stack([cuts.sizes, cuts.sizes, cuts.words, cuts.highest.view(torch.int32)])
    offsets_B1, entries_2n = _exact_room(found, sampled_B, logprobs_BV)
    triton.compact(logprobs_BV, sampled_B, cuts, offsets_B1[:-1], entries_2n)
    return _ordered(cuts.sizes, entries_2n, offsets_B1)


def support_candidates(
    logprobs_RV: Tensor,
    weights_RW: Tensor,
    token_ids_RW: Tensor | None,
    sampled_R: Tensor,
    *,
    lowest: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`sglang_topp.nucleus.support_candidates` for arguments that went through its checks; waits once, for
    the sizes. `lowest` is as for `stage_top_p`."""
    logprobs_RV = _with_contiguous_rows(logprobs_RV)
    rows_R = torch.arange(len(logprobs_RV), device=logprobs_RV.device)
    ids_RW = None if token_ids_RW is None else token_ids_RW.to(torch.int32).contiguous()
    drawn = (logprobs_RV, rows_R, (weights_RW > 0).contiguous(), ids_RW, sampled_R)
    found_3R = support_triton.count(*drawn, _lowest(lowest, logprobs_RV))
    sizes_R = found_3R[0]
    offsets_R1, entries_2n = _exact_room(torch.cat([sizes_R[None], found_3R]), sampled_R, logprobs_RV)
    support_triton.compact(*drawn, sizes_R, offsets_R1[:-1], entries_2n)
    return _ordered(sizes_R, entries_2n, offsets_R1)


def _exact_room(found_4R: Tensor, sampled_R: Tensor | None, logprobs_RV: Tensor) -> tuple[Tensor, Tensor]:
    """The rows' offsets and room for their entries; raises what is wrong with the first wrong row."""
    found = StagedRows(np.empty((2, 0), np.int32), found_4R.cpu().numpy())
    for first in found.problems(sampled_R, logprobs_RV.shape[1]).values():
        raise first
    offsets = _offsets(found.rows[_SIZE])
    return to_device(offsets, logprobs_RV.device), _entries(int(offsets[-1]), logprobs_RV)


def _ordered(sizes_R: Tensor, entries_2n: Tensor, offsets_R1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ids_n, logprobs_n = entries_2n[0], entries_2n[1].view(torch.float32)
    row_n = torch.repeat_interleave(sizes_R, output_size=len(ids_n)).long()
    by_id = ids_n.argsort(stable=True)
    order_n = by_id[((row_n << 32) + falling(logprobs_n))[by_id].argsort(stable=True)]
    return ids_n[order_n], logprobs_n[order_n], offsets_R1


def _offsets(sizes: NDArray[np.int32]) -> NDArray[np.int64]:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _entries(capacity: int, logprobs_BV: Tensor) -> Tensor:
    return torch.empty((2, capacity), dtype=torch.int32, device=logprobs_BV.device)


def _limits(p_B: NDArray[np.float64], logprobs_BV: Tensor) -> Tensor:
    """float64 [B]: a token is inside while the mass above it is less."""
    # p = 1 keeps all of a row, also where rounding lets a part of it sum to 1 or more.
    return to_device(np.where(p_B == 1, np.inf, p_B), logprobs_BV.device)


def _lowest(lowest: float | None, logprobs_BV: Tensor) -> float:
    return torch.finfo(logprobs_BV.dtype).min if lowest is None else lowest


def _with_contiguous_rows(logprobs_BV: Tensor) -> Tensor:
    return logprobs_BV if logprobs_BV.stride(1) == 1 else logprobs_BV.contiguous()
