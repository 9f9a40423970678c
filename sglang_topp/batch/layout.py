"""Which elements of a padded [B, W] field are kept, small enough to travel beside the values.

Shape legend: B rows, W columns, n kept elements in all, rest: any further dimensions of a field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp.batch.row_sets import cut

__all__ = ["Layout", "blocks"]

_BLOCK_BYTES = 1 << 20  # work on pieces that stay in a core's cache


@dataclass(frozen=True, eq=False)
class Layout:
    """The kept elements of B rows, as runs of columns or, where runs would be larger, as bits.

    Either form allows every mask: holes, empty rows, all kept. Rows keep their `width` when they are
    cut from their batch, so a part of a batch unpads to the whole batch's shape.

    Args:
        width: W.
        offsets: int64 [B + 1]; row i's values are `values[offsets[i]:offsets[i + 1]]`, in column order.
        runs: int32 [runs, 2], first column and the one after the last; row after row. Or None.
        run_offsets: int64 [B + 1] into `runs`. Or None.
        bits: uint8 [B, ceil(W / 8)], column c in bit `c % 8` of byte `c // 8`. Or None.
    """

    width: int
    offsets: NDArray[np.int64]
    runs: NDArray[np.int32] | None
    run_offsets: NDArray[np.int64] | None
    bits: NDArray[np.uint8] | None

    @classmethod
    def of(cls, mask: NDArray[Any]) -> Layout:
        """The layout of the non-zero elements of `mask` [B, W], of any dtype."""
        num_rows, width = mask.shape
        pairs, counts = [], np.zeros(num_rows, np.int64)
        for low, high in blocks(num_rows, width):
            # Rows side by side with a 0 between them: every change starts a run or ends one.
            line = np.zeros((high - low) * (width + 1) + 1, np.uint8)
            np.not_equal(mask[low:high], 0, out=line.view(np.bool_)[1:].reshape(-1, width + 1)[:, :width])
            changes = np.bitwise_xor(line[1:], line[:-1])
            lines, columns = np.divmod(_nonzero(changes), width + 1)
            pairs.append(columns.astype(np.int32).reshape(-1, 2))
            counts[low:high] = np.bincount(lines[::2], minlength=high - low)
        runs = np.concatenate(pairs) if pairs else np.zeros((0, 2), np.int32)
        run_offsets = _cumulated(counts)
        offsets = _cumulated(runs[:, 1] - runs[:, 0])[run_offsets]
        if runs.nbytes <= num_rows * -(-width // 8):
            return cls(width, offsets, runs, run_offsets, None)
        return cls(width, offsets, None, None, np.packbits(mask != 0, axis=1, bitorder="little"))

    def __len__(self) -> int:
        """Number of rows B."""
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (self.offsets, self.runs, self.run_offsets, self.bits)
        return sum(array.nbytes for array in arrays if array is not None)

    def keep(self) -> NDArray[np.bool_]:
        """bool [B, W]: the mask that this layout was made of."""
        if self.bits is not None:
            unpacked = np.unpackbits(self.bits, axis=1, count=self.width, bitorder="little")
            return unpacked.view(np.bool_)
        keep = np.zeros((len(self), self.width), np.bool_)
        flat = keep.reshape(-1)
        for first, stop in self._spans():
            flat[first:stop] = True
        return keep

    def gather(
        self, field: NDArray[Any], look: Callable[[NDArray[Any]], object] | None = None
    ) -> NDArray[Any]:
        """[n, *rest]: the kept elements of `field` [B, W, *rest], row after row.

        `look` is shown all of `field` on the way, block of rows after block of rows: memory is what
        gathering waits for, and this way it is read once.
        """
        values = np.empty((self.offsets[-1], *field.shape[2:]), field.dtype)
        flat = field.reshape(len(self) * self.width, *field.shape[2:])
        keep = self.keep() if self.bits is not None else None
        spans = list(self._spans()) if keep is None else []
        for low, high in blocks(len(self), field.nbytes // max(1, len(self))):
            if look is not None:
                look(field[low:high])
            out = values[self.offsets[low] : self.offsets[high]]
            if keep is not None:
                out[:] = field[low:high][keep[low:high]]
            elif len(out):
                assert self.run_offsets is not None
                runs = spans[self.run_offsets[low] : self.run_offsets[high]]
                np.concatenate([flat[first:stop] for first, stop in runs], out=out)
        return values

    def scatter(self, values: NDArray[Any], field: NDArray[Any]) -> None:
        """Write `values` [n, *rest] to the kept elements of `field` [B, W, *rest], contiguous."""
        if self.bits is not None:
            field[self.keep()] = values
            return
        flat = field.reshape(len(self) * self.width, *field.shape[2:])
        at = 0
        for first, stop in self._spans():
            flat[first:stop] = values[at : at + stop - first]
            at += stop - first

    def take(self, rows: NDArray[np.int64]) -> Layout:
        """The layout of these rows, in this order."""
        offsets = _cumulated(np.diff(self.offsets)[rows])
        if self.runs is None or self.run_offsets is None:
            assert self.bits is not None
            return Layout(self.width, offsets, None, None, self.bits[rows])
        run_offsets = _cumulated(np.diff(self.run_offsets)[rows])
        return Layout(self.width, offsets, cut(self.runs, self.run_offsets, rows), run_offsets, None)

    def _spans(self) -> Iterator[tuple[int, int]]:
        """Every run as a span of the flattened [B * W] field; at most one for 64 elements."""
        assert self.runs is not None
        assert self.run_offsets is not None
        base = np.repeat(np.arange(len(self)) * self.width, np.diff(self.run_offsets))
        spans = self.runs + base[:, None]
        return zip(spans[:, 0].tolist(), spans[:, 1].tolist(), strict=True)


def blocks(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that together cover `num_rows`, each of about a cache's size."""
    step = max(1, _BLOCK_BYTES // max(1, row_bytes))
    return ((low, min(low + step, num_rows)) for low in range(0, num_rows, step))


def _cumulated(counts: NDArray[Any]) -> NDArray[np.int64]:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _nonzero(sparse: NDArray[np.uint8]) -> NDArray[np.int64]:
    """`np.flatnonzero`, four times as fast where few are: it passes over words of zeros."""
    words = np.zeros(-(-len(sparse) // 8), np.uint64)
    padded = words.view(np.uint8)
    padded[: len(sparse)] = sparse
    found = np.flatnonzero(words != 0)
    which, byte = np.nonzero(padded.reshape(-1, 8)[found])
    return found[which] * 8 + byte
