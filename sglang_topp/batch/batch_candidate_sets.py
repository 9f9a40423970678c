"""`BatchCandidateSets`: the candidate sets of all samples of a batch, in one shared `CandidateSets`.

A row of a batch holds the candidate sets of one sample, one set per position. `place` moves the sets into the
rows of a packed tensor, each of which may hold several samples.

Shape legend: B rows, T positions over all rows, N rows and W columns of the packed tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.batch.ragged_rows import as_integers
from sglang_topp.candidates import NO_TOKEN, CandidateSets
from sglang_topp.candidates.csr_operations import offsets_of
from sglang_topp.errors import InvalidInputError

__all__ = ["BatchCandidateSets", "cut", "row_index"]


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

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [B]: the number of positions in each row."""
        return np.diff(self.row_offsets)

    @property
    def nbytes(self) -> int:
        """The total size, in bytes, of the arrays that a transfer to another process sends."""
        arrays = (*self.sets._arrays(), self.row_offsets)
        return sum(array.nbytes for array in arrays if array is not None)

    @overload
    def __getitem__(self, index: int) -> CandidateSets: ...
    @overload
    def __getitem__(self, index: slice) -> BatchCandidateSets: ...
    def __getitem__(self, index: int | slice) -> CandidateSets | BatchCandidateSets:
        """Return one row's CandidateSets for `batch[i]`, or a smaller batch for `batch[a:b]`.

        The candidates are not copied.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise InvalidInputError(f"slice step: got {step}, expected 1; use `take` to re-order")
            stop = max(start, stop)
            low, high = self.row_offsets[start], self.row_offsets[stop]
            return BatchCandidateSets(self.sets[low:high], self.row_offsets[start : stop + 1] - low)
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
        index, sets = row_index(rows, len(self)), self.sets
        candidates = sets.offsets[self.row_offsets]  # the index of each row's first candidate
        taken = CandidateSets.unchecked(
            cut(sets.token_ids, candidates, index),
            None if sets._logprobs is None else cut(sets._logprobs, candidates, index),
            offsets_of(cut(sets.sizes, self.row_offsets, index)),
            cut(sets.sampled_ids, self.row_offsets, index),
        )
        return BatchCandidateSets(taken, offsets_of(self.lengths[index]))

    def place(self, into: ArrayLike, starts: ArrayLike, shape: tuple[int, int]) -> BatchCandidateSets:
        """Return the candidate sets in the layout of a padded [N, W] tensor: one set per tensor element.

        Row `i` of this batch goes to row `into[i]` of the padded tensor, in columns `starts[i]` to
        `starts[i] + lengths[i] - 1`. Elements outside these columns have empty candidate sets. The result
        has N rows of W positions each. Position `row * W + column` of the result's `sets` belongs to element
        `[row, column]` of the tensor. Candidates are neither copied nor changed.

        Args:
            into: integers [B]. Row `i` of this batch goes to row `into[i]` of the tensor.
            starts: integers [B]. Row `i` of this batch starts in column `starts[i]` of the tensor. Row
                `i + 1` of this batch must start after the end of row `i`: in a later row of the tensor, or in
                a later column of the same row. If necessary, reorder the rows with `take` before `place`.
            shape: the tensor's shape (N, W).

        Raises:
            InvalidInputError: a value is not an integer, a row does not fit in the tensor, or a row starts
                before the end of the previous row.
        """
        num_rows, width = shape
        lines, columns = as_integers("into", into, "integers"), as_integers("starts", starts, "integers")
        if lines.shape != (len(self),) or columns.shape != (len(self),):
            raise InvalidInputError(
                f"into, starts: got shapes {lines.shape} and {columns.shape}, expected ({len(self)},)"
            )
        misfit = (lines < 0) | (lines >= num_rows) | (columns < 0) | (columns + self.lengths > width)
        first = lines * width + columns
        misfit[1:] |= first[1:] < (first + self.lengths)[:-1]
        if misfit.any():
            i = int(misfit.argmax())
            raise InvalidInputError(
                f"row {i} of {self.lengths[i]} positions: cannot lie at row {lines[i]}, column {columns[i]}"
                f" of a {num_rows} x {width} field, after the row before it"
            )
        sizes, sampled = np.zeros(num_rows * width, np.int64), np.full(num_rows * width, NO_TOKEN, np.int32)
        bounds = self.row_offsets.tolist()
        for at, low, high in zip(first.tolist(), bounds[:-1], bounds[1:], strict=True):
            sizes[at : at + high - low] = self.sets.sizes[low:high]
            sampled[at : at + high - low] = self.sets.sampled_ids[low:high]
        sets = CandidateSets.unchecked(self.sets.token_ids, self.sets._logprobs, offsets_of(sizes), sampled)
        return BatchCandidateSets(sets, np.arange(num_rows + 1, dtype=np.int64) * width)


def row_index(rows: ArrayLike, num_rows: int) -> NDArray[np.int64]:
    """Return `rows` as int64 [k], after checking that each value is from 0 to `num_rows - 1`.

    Raises:
        InvalidInputError: `rows` is not a 1-D array of integers, or an integer is out of range.
    """
    index = as_integers("rows", rows, "integers [any]")
    if index.size and (index.min() < 0 or index.max() >= num_rows):
        wrong = index[(index < 0) | (index >= num_rows)][0]
        raise InvalidInputError(f"rows: got {wrong}, expected 0 to {num_rows - 1}")
    return index


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
