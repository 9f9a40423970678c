"""`CompressedMask`: a padding mask [B, W] of a batch, stored as runs or bits. True marks elements to keep.

`nest_batch` drops a batch's padding, and stores this mask, so that `unnest_batch` can restore the padding. A
batch field has the shape [B, W, *rest]. `gather` returns the field's elements where the mask is true.
`scatter` writes given elements to the field where the mask is true.

Shape legend: B rows, W columns, n kept elements in all, and `rest` for a field's further dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp.batch.batch_candidate_sets import cut
from sglang_topp.candidates.csr_operations import offsets_of

__all__ = ["CompressedMask", "blocks"]

_BLOCK_BYTES = 1 << 20  # a block of rows of this size fits in a core's cache


@dataclass(frozen=True, eq=False)
class CompressedMask:
    """A [B, W] mask of the elements to keep, stored as runs of columns, or as bits if runs would be larger.

    Runs and bits can both represent any mask, including masks with gaps and rows of zeros. `take` selects
    rows of the mask, and keeps the `width` of the whole batch.

    Args:
        width: the number of columns W.
        offsets: int64 [B + 1]. Row i's kept elements are `gather(field)[offsets[i]:offsets[i + 1]]`, in
            column order.
        runs: int32 [runs, 2], each run's first column and its exclusive end column, row after row. None if
            the mask is stored as bits.
        run_offsets: int64 [B + 1]. Row i's runs are `runs[run_offsets[i]:run_offsets[i + 1]]`. None if the
            mask is stored as bits.
        bits: uint8 [B, ceil(W / 8)], column c in bit `c % 8` of byte `c // 8`. None if the mask is stored as
            runs.
    """

    width: int
    offsets: NDArray[np.int64]
    runs: NDArray[np.int32] | None
    run_offsets: NDArray[np.int64] | None
    bits: NDArray[np.uint8] | None

    @classmethod
    def of(cls, mask: NDArray[Any]) -> CompressedMask:
        """Compress `mask` [B, W], of any dtype. The result keeps the elements where `mask` is not 0."""
        num_rows, width = mask.shape
        pairs, counts = [], np.zeros(num_rows, np.int64)
        for low, high in blocks(num_rows, width):
            # Concatenate the mask's rows, with a 0 before and after each row. In the concatenated rows, each
            # change between 0 and 1 starts or ends a run.
            line = np.zeros((high - low) * (width + 1) + 1, np.uint8)
            np.not_equal(mask[low:high], 0, out=line.view(np.bool_)[1:].reshape(-1, width + 1)[:, :width])
            changes = np.bitwise_xor(line[1:], line[:-1])
            lines, columns = np.divmod(_nonzero(changes), width + 1)
            pairs.append(columns.astype(np.int32).reshape(-1, 2))
            counts[low:high] = np.bincount(lines[::2], minlength=high - low)
        runs = np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int32)
        run_offsets = offsets_of(counts)
        offsets = offsets_of(runs[:, 1] - runs[:, 0])[run_offsets]
        if runs.nbytes <= num_rows * -(-width // 8):
            return cls(width, offsets, runs, run_offsets, None)
        return cls(width, offsets, None, None, np.packbits(mask != 0, axis=1, bitorder="little"))

    def __len__(self) -> int:
        """Return the number of rows B."""
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """The total size of all arrays in bytes."""
        arrays = (self.offsets, self.runs, self.run_offsets, self.bits)
        return sum(array.nbytes for array in arrays if array is not None)

    def keep(self) -> NDArray[np.bool_]:
        """Return the mask as bool [B, W]."""
        if self.bits is not None:
            unpacked = np.unpackbits(self.bits, axis=1, count=self.width, bitorder="little")
            return unpacked.view(np.bool_)
        keep = np.zeros((len(self), self.width), np.bool_)
        flat = keep.reshape(-1)
        for first, stop in self._spans():
            flat[first:stop] = True
        return keep

    def gather(
        self, field: NDArray[Any], on_block: Callable[[NDArray[Any]], object] | None = None
    ) -> NDArray[Any]:
        """Return [n, *rest]: the kept elements of `field` [B, W, *rest], row after row.

        The function passes each block of rows to `on_block` just before gathering the block. `on_block` can
        thus inspect all of `field`, and the CPU reads each block from memory only once.
        """
        values = np.empty((self.offsets[-1], *field.shape[2:]), field.dtype)
        flat = field.reshape(len(self) * self.width, *field.shape[2:])
        keep = self.keep() if self.bits is not None else None
        spans = list(self._spans()) if keep is None else []
        for low, high in blocks(len(self), field.nbytes // max(1, len(self))):
            if on_block is not None:
                on_block(field[low:high])
            out = values[self.offsets[low] : self.offsets[high]]
            if keep is not None:
                out[:] = field[low:high][keep[low:high]]
            elif len(out):
                assert self.run_offsets is not None
                runs = spans[self.run_offsets[low] : self.run_offsets[high]]
                np.concatenate([flat[first:stop] for first, stop in runs], out=out)
        return values

    def scatter(self, values: NDArray[Any], field: NDArray[Any]) -> None:
        """Write `values` [n, *rest] to the kept elements of the contiguous `field` [B, W, *rest]."""
        if self.bits is not None:
            field[self.keep()] = values
            return
        flat = field.reshape(len(self) * self.width, *field.shape[2:])
        at = 0
        for first, stop in self._spans():
            flat[first:stop] = values[at : at + stop - first]
            at += stop - first

    def take(self, rows: NDArray[np.int64]) -> CompressedMask:
        """Return the mask of the given rows, in the given order."""
        offsets = offsets_of(np.diff(self.offsets)[rows])
        if self.runs is None or self.run_offsets is None:
            assert self.bits is not None
            return CompressedMask(self.width, offsets, None, None, self.bits[rows])
        run_offsets = offsets_of(np.diff(self.run_offsets)[rows])
        return CompressedMask(self.width, offsets, cut(self.runs, self.run_offsets, rows), run_offsets, None)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Yield every run of kept elements as `(first, stop)`, two indices into the flattened [B * W] field.

        A Python loop over the runs is fast enough, because `CompressedMask.of` stores a mask as runs only if
        the mask has at most about one run per 64 elements.
        """
        assert self.runs is not None
        assert self.run_offsets is not None
        base = np.repeat(np.arange(len(self)) * self.width, np.diff(self.run_offsets))
        spans = self.runs + base[:, None]
        return zip(spans[:, 0].tolist(), spans[:, 1].tolist(), strict=True)


def blocks(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Split `num_rows` rows into blocks about as large as a core's cache.

    Yield the bounds `(low, high)` of each block.
    """
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    return ((low, min(low + step, num_rows)) for low in range(0, num_rows, step))


def _nonzero(sparse: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Return `np.flatnonzero(sparse)`, but four times as fast.

    The function skips 8-byte words of zeros, which make up most of a sparse array.
    """
    words = np.zeros(-(-len(sparse) // 8), np.uint64)
    padded = words.view(np.uint8)
    padded[: len(sparse)] = sparse
    found = np.flatnonzero(words != 0)
    which, byte = np.nonzero(padded.reshape(-1, 8)[found])
    return found[which] * 8 + byte
