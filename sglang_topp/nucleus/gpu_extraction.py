"""Extract candidate sets with Triton kernels on a GPU, with or without waiting for the GPU.

`find_top_p` finds the nucleus of each row of log-probs for a top-p threshold. `find_support` finds the tokens
that a sampler can draw: those with a sampling weight above 0. Neither waits for the GPU, so the host does not
know the sizes of the sets that they return (`FoundSets`).

`FoundSets.stage` does not wait either. It writes the sets to a staging area of fixed size, and leaves out
sets that do not fit. The caller copies the staging area to the host, reads which rows' sets were left out,
and extracts those sets again. `FoundSets.complete` waits for the set sizes, and allocates memory of exactly
the right size.

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
from sglang_topp.nucleus import sampler_support_triton as sampler
from sglang_topp.nucleus import top_p_triton
from sglang_topp.nucleus.argument_checks import kernel_error
from sglang_topp.nucleus.extraction_torch import in_set_order

_SIZE, _START, _ERROR = range(3)


@dataclass(frozen=True)
class StagingArea:
    """Candidate sets in tensors of fixed size, on the device or on the host.

    Only `map` may be called before both tensors are on the host.

    Attributes:
        entries: int32 [2, C]. `entries[0]` holds the candidates' token ids, and `entries[1]` the bits of
            their float32 log-probs.
        rows: int64 [B, 3], or [R, 3] from `find_support`. Each row describes one row of log-probs: the set
            size; an index into `entries`, or -1 if the set is empty or did not fit; and an error, or 0
            (`argument_checks.kernel_error`). A row with an error has no set.
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
        return {row: kernel_error(row, int(errors[row]), vocab) for row in np.flatnonzero(errors).tolist()}

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
        # The order of `in_set_order`. For a few thousand candidates, NumPy takes half as long as torch.
        bits = (np.float32(0.0) - logprobs).view(np.int32)
        keys = (np.arange(len(sizes)).repeat(sizes) << 32) + (bits ^ ((bits >> 31) & 0x7FFFFFFF))
        order = keys.argsort(kind="stable") if self.is_by_id else np.lexsort((ids, keys))
        return ids[order], logprobs[order], offsets


@dataclass(frozen=True)
class FoundSets:
    """Candidate sets whose sizes the GPU knows, but not yet the host.

    Attributes:
        rows: int64 [B, 3] on the GPU, as in `StagingArea`, but without the indices into `entries`.
        vocab: V.
        is_by_id: as in `StagingArea`.
        write: writes the candidates to the given `entries`, once `rows` has the indices.
    """

    rows: Tensor
    vocab: int
    is_by_id: bool
    write: Callable[[Tensor], None]

    def stage(self, capacity: int) -> StagingArea:
        """Write the sets to a staging area with room for `capacity` candidates, without waiting for the GPU.

        The sizes of all tensors that this method allocates depend only on `capacity`. Call either `stage` or
        `complete`, and only once.
        """
        with torch.cuda.device(self.rows.get_device()):  # Triton launches kernels on the current device
            top_p_triton.place(self.rows, capacity)
            entries_2C = torch.empty((2, capacity), dtype=torch.int32, device=self.rows.device)
            self.write(entries_2C)
        return StagingArea(entries_2C, self.rows, self.is_by_id)

    def complete(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return `(token_ids, logprobs, offsets)` of all sets on the GPU, as `nucleus.top_p_candidates` does.

        The host waits for the GPU once, to read the set sizes. The kernels for top-p write a set by id,
        except that a sampled token outside of the nucleus comes last. That token is less likely than all
        others, so the ids decide nothing about it.

        Raises:
            InvalidInputError: a row has an error.
        """
        on_host = StagingArea(torch.empty(2, 0), self.rows.cpu(), self.is_by_id)
        for problem in on_host.problems(self.vocab).values():
            raise problem
        offsets = offsets_of(on_host.sizes)
        ids_n, bits_n = self.stage(int(offsets[-1])).entries
        row_n = torch.repeat_interleave(self.rows[:, _SIZE], output_size=len(ids_n))
        return *in_set_order(row_n, ids_n, bits_n.view(torch.float32), self.is_by_id), to_device(
            offsets, self.rows.device
        )


def find_top_p(
    logprobs_BV: Tensor,
    p_B: NDArray[np.float64],
    sampled_B: Tensor | None,
    *,
    lowest: float | None = None,
    is_taken_B: Tensor | None = None,
) -> FoundSets:
    """Find top-p candidate sets, without waiting for the GPU. The caller has checked the arguments.

    The sizes of all tensors that the function allocates depend only on the arguments' shapes.

    Args:
        logprobs_BV: floats on a GPU.
        p_B: float64, the top-p threshold of each row, on the host.
        sampled_B: int64, the sampled token id of each row, on the GPU.
        lowest: log-probs at or below this value stand for probability 0. The default of `lowest` is the
            lowest value of the dtype of `logprobs_BV`.
        is_taken_B: bool, on the GPU, whether to extract each row's set. A row with False gets an empty set,
            like a row with a threshold of 0. If `is_taken_B` is None, the function extracts all sets.
    """
    with torch.cuda.device(logprobs_BV.get_device()):
        # With p = 1, the nucleus is the whole row, so the limit is out of reach. A limit of 1 could end the
        # nucleus too early, because the rounded probabilities may sum to 1 before the end of the row.
        limits = np.ceil(p_B * 2.0**top_p_triton.UNIT_BITS).astype(np.int64)
        limits_B = to_device(np.where(p_B == 1, np.iinfo(np.int64).max, limits), logprobs_BV.device)
        if is_taken_B is not None:
            limits_B = torch.where(is_taken_B, limits_B, 0)
        logprobs_BV, lowest = _prepared(logprobs_BV, lowest)
        cuts = top_p_triton.find_cuts(logprobs_BV, limits_B, sampled_B, lowest)
    write = partial(top_p_triton.compact, logprobs_BV, sampled_B, cuts)
    return FoundSets(cuts.rows, logprobs_BV.shape[1], True, write)


def find_support(
    logprobs_RV: Tensor,
    is_drawn_RW: Tensor,
    token_ids_RW: Tensor | None,
    sampled_R: Tensor,
    *,
    lowest: float | None = None,
) -> FoundSets:
    """Find the tokens that a sampler could draw, without waiting for the GPU, as `find_top_p` does.

    Args:
        logprobs_RV: floats on a GPU.
        is_drawn_RW: bool, True where the sampler's weight of a token is above 0.
        token_ids_RW: integers, the token id of each element of `is_drawn_RW`. None means that W is V, and
            that column `i` belongs to token id `i`.
        sampled_R: int64, the sampled token id of each row.
        lowest: as in `find_top_p`.
    """
    with torch.cuda.device(logprobs_RV.get_device()):
        logprobs_RV, lowest = _prepared(logprobs_RV, lowest)
        ids_RW = None if token_ids_RW is None else token_ids_RW.int().contiguous()
        drawn = logprobs_RV, is_drawn_RW.contiguous(), ids_RW, sampled_R
        rows_R3 = torch.zeros((len(logprobs_RV), 3), dtype=torch.int64, device=logprobs_RV.device)
        sampler.launch(sampler.count_kernel, drawn, rows_R3, logprobs_RV.shape[1], lowest)

    def write(entries_2C: Tensor) -> None:
        sampler.launch(sampler.compact_kernel, drawn, rows_R3, entries_2C, entries_2C.shape[1])

    return FoundSets(rows_R3, logprobs_RV.shape[1], False, write)


def _prepared(logprobs_BV: Tensor, lowest: float | None) -> tuple[Tensor, float]:
    return (
        logprobs_BV if logprobs_BV.stride(1) == 1 else logprobs_BV.contiguous(),
        torch.finfo(logprobs_BV.dtype).min if lowest is None else lowest,
    )
