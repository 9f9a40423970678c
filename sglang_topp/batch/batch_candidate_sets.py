"""`BatchCandidateSets`: the candidate sets of all samples of a batch, in one shared `CandidateSets`.

A row of a batch holds the candidate sets of one sample, one set per position.

Shape legend: B rows, T positions over all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import indices, offsets_of
from sglang_topp.errors import InvalidInputError


@dataclass(frozen=True, eq=False)
class BatchCandidateSets:
    """The candidate sets of B rows, stored as one `CandidateSets` with row offsets.

    The positions of row `i` are `sets[row_offsets[i]:row_offsets[i + 1]]`.

    Args:
        sets: the candidate sets of all T positions, row after row.
        row_offsets: int64 [B + 1], `row_offsets[0] == 0`, never decreasing, `row_offsets[B] == T`.

    Raises:
        InvalidInputError: `row_offsets` has a wrong dtype or shape, decreases, or does not run from 0 to T.
    """

    sets: CandidateSets
    row_offsets: NDArray[np.int64]

    def __post_init__(self) -> None:
        offsets = np.asarray(self.row_offsets)
        if offsets.ndim != 1 or offsets.dtype != np.int64 or not len(offsets):
            raise InvalidInputError(
                f"row_offsets: got {offsets.dtype} of shape {offsets.shape}, expected int64 [rows + 1]"
            )
        if offsets[0] != 0 or offsets[-1] != len(self.sets) or np.any(offsets[1:] < offsets[:-1]):
            raise InvalidInputError(
                f"row_offsets: run from {offsets[0]} to {offsets[-1]},"
                f" expected to rise from 0 to {len(self.sets)}, the number of positions"
            )
        view = offsets.view()
        view.flags.writeable = False
        object.__setattr__(self, "row_offsets", view)

    @classmethod
    def from_rows(cls, rows: Sequence[CandidateSets]) -> BatchCandidateSets:
        """Build a batch from one CandidateSets per row. Each array is copied once.

        Raises:
            InvalidInputError: some rows with candidates have log-probs, and other rows with candidates have
                none.
        """
        return cls(CandidateSets.concat(rows, "candidates"), offsets_of([len(row) for row in rows]))

    def __len__(self) -> int:
        """Return the number of rows B."""
        return len(self.row_offsets) - 1

    def __eq__(self, other: object) -> bool:
        """Return whether `other` has the same rows, with equal candidate sets."""
        if not isinstance(other, BatchCandidateSets):
            return NotImplemented
        return np.array_equal(self.row_offsets, other.row_offsets) and self.sets == other.sets

    __hash__ = None  # type: ignore[assignment]  # hashing would have to read all of the large arrays

    @overload
    def __getitem__(self, index: int) -> CandidateSets: ...
    @overload
    def __getitem__(self, index: slice) -> BatchCandidateSets: ...
    def __getitem__(self, index: int | slice) -> CandidateSets | BatchCandidateSets:
        """Return one row's CandidateSets for `batch[i]`, or the rows of a slice, which copies no candidates
        if its step is 1.
        """
        if isinstance(index, slice):
            return self.take(np.arange(len(self))[index])
        i = range(len(self))[index]
        return self.sets[self.row_offsets[i] : self.row_offsets[i + 1]]

    def __iter__(self) -> Iterator[CandidateSets]:
        """Yield the CandidateSets of each row."""
        return (self[i] for i in range(len(self)))

    def take(self, rows: ArrayLike) -> BatchCandidateSets:
        """Return the given rows, in the given order. A row may occur more than once.

        Args:
            rows: [k], integers from 0 to B - 1, for any k.

        Raises:
            InvalidInputError: a row index is not an integer, or is out of range.
        """
        index, sets = indices("rows", rows, len(self)), self.sets
        candidates = sets.offsets[self.row_offsets]  # the index of each row's first candidate
        taken = CandidateSets.unchecked(
            cut(sets.token_ids, candidates, index),
            None if sets._logprobs is None else cut(sets._logprobs, candidates, index),
            offsets_of(cut(sets.sizes, self.row_offsets, index)),
            cut(sets.sampled_ids, self.row_offsets, index),
        )
        return BatchCandidateSets(taken, offsets_of(np.diff(self.row_offsets)[index]))


def cut(values: NDArray[Any], offsets: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Concatenate the slices `values[offsets[i]:offsets[i + 1]]` for i in `rows`.

    The result is a view if the rows are consecutive.
    """
    if not len(rows):
        return values[:0]
    if (np.diff(rows) == 1).all():
        return values[offsets[rows[0]] : offsets[rows[-1] + 1]]
    lows, highs = offsets[rows].tolist(), offsets[rows + 1].tolist()
    return np.concatenate([values[low:high] for low, high in zip(lows, highs, strict=True)])
