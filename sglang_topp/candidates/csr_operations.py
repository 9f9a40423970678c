"""Array operations on CSR data: offsets, row indices, sorting within rows, and log-sum-exp.

Shape legend: T rows, n values in all. In candidate sets, a row is a position with its candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.errors import InvalidInputError

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]

# The approximate number of candidates in each block that `blocks_of` yields. The temporary arrays for one
# block fit in a core's cache.
_AT_ONCE = 1 << 16


def offsets_of(sizes: Sequence[int] | NDArray[np.integer[Any] | np.bool_]) -> Int64Array:
    """Return int64 [T + 1]: the CSR offsets of T rows of the given sizes, from 0 to the sum of the sizes."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def rows_of(offsets: Int64Array) -> Int32Array:
    """Return int32 [n]: the position of each candidate.

    The function is more than twice as fast as `np.repeat`.
    """
    rows = np.zeros(offsets[-1], np.int32)
    filled = np.flatnonzero(np.diff(offsets))
    rows[offsets[filled]] = np.diff(filled, prepend=0)
    return np.cumsum(rows, dtype=np.int32, out=rows)


def row_keys(rows: Int32Array, token_ids: Int32Array) -> Int64Array:
    """Return int64 [n]: one sort key per candidate.

    The high 32 bits of a key hold the candidate's position, and the low 32 bits hold the token id.
    """
    return rows.astype(np.int64) << 32 | token_ids


def sorted_by_id(rows: Int32Array, token_ids: Int32Array) -> Int32Array:
    """Return `token_ids` [n], sorted within each row, lowest first.

    `rows`, the row index of each candidate, must ascend. Ids must be at least 0.
    """
    return (np.sort(row_keys(rows, token_ids)) & 0x7FFFFFFF).astype(np.int32)


def blocks_of(offsets: Int64Array) -> Iterator[slice]:
    """Yield slices that together cover all positions.

    Each slice is a block of consecutive positions. A block has at most `_AT_ONCE` candidates, unless the
    block has only one position. Callers compute one block at a time, so that each block reuses the memory of
    the previous block's temporary arrays. The first access to newly allocated memory would take longer than
    a block's computation.
    """
    start = 0
    while start < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[start] + _AT_ONCE, side="right")) - 1
        stop = max(stop, start + 1)
        yield slice(start, stop)
        start = stop


def log_sum_exp(values: NDArray[np.floating[Any]], offsets: Int64Array) -> NDArray[np.float64]:
    """Return float64 [T]: the log-sum-exp of each row's values, or 0 if the row is empty.

    Row t's values are `values[offsets[t]:offsets[t + 1]]`. The first value of a row must be its highest.
    """
    out = np.zeros(len(offsets) - 1, np.float64)
    for block in blocks_of(offsets):
        inside = offsets[block.start : block.stop + 1]
        sizes = np.diff(inside)
        rows = np.flatnonzero(sizes)
        if len(rows):
            part = values[inside[0] : inside[-1]]
            starts = inside[rows] - inside[0]
            peak = part[starts].astype(np.float64)
            shifted = np.exp(part - np.repeat(peak, sizes[rows]))
            out[block][rows] = peak + np.log(np.add.reduceat(shifted, starts))
    return out


def first_true(mask: NDArray[np.bool_]) -> int | None:
    """Return the index of the first True in `mask`, or None if `mask` has no True."""
    if not len(mask):
        return None
    index = int(mask.argmax())
    return index if mask[index] else None


def integer_array(name: str, values: ArrayLike, expected: str) -> NDArray[np.integer[Any]]:
    """Return a list, an array, or a tensor on any device of integers, possibly empty, as a 1-D array.

    Raises:
        InvalidInputError: `values` are not integers, or not one per entry. The message has their `name`, and
            says what is `expected`.
    """
    try:
        array = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    except (TypeError, ValueError, RuntimeError) as error:
        # `values` holds lists of different lengths, or is a tensor that NumPy cannot read.
        raise InvalidInputError(f"{name}: expected {expected}: {error}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidInputError(f"{name}: got {array.dtype} of shape {array.shape}, expected {expected}")
    return array


def indices(name: str, values: ArrayLike, limit: int) -> Int64Array:
    """Return `values` as int64 [k], each from 0 to `limit - 1`.

    Raises:
        InvalidInputError: `values` is not a list or 1-D array of integers, or an integer is out of range.
    """
    index = integer_array(name, values, "integers [any]")
    if (i := first_true((index < 0) | (index >= limit))) is not None:
        raise InvalidInputError(f"{name}: got {index[i]}, expected 0 to {limit - 1}")
    return index.astype(np.int64)
