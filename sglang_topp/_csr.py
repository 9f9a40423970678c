"""Arithmetic on CSR offsets: which position an entry belongs to, and the other way round.

Shape legend: T positions, n entries in all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["blocks_of", "first_true", "offsets_of", "row_keys", "rows_of"]

Int32Array: TypeAlias = NDArray[np.int32]
Int64Array: TypeAlias = NDArray[np.int64]

# Entries that are looked at together.
_AT_ONCE = 1 << 16


def offsets_of(sizes: NDArray[np.integer[Any]]) -> Int64Array:
    """int64 [T + 1]: where each of T spans begins, and where the last one ends."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def rows_of(offsets: Int64Array) -> Int32Array:
    """int32 [n]: the position of every entry. `np.repeat` says the same, at more than twice the time."""
    rows = np.zeros(offsets[-1], np.int32)
    filled = np.flatnonzero(np.diff(offsets))
    rows[offsets[filled]] = np.diff(filled, prepend=0)
    return np.cumsum(rows, dtype=np.int32, out=rows)


def row_keys(rows: Int32Array, token_ids: Int32Array) -> Int64Array:
    """int64 [n]: position and token id of every entry in one number."""
    return rows.astype(np.int64) << 32 | token_ids


def blocks_of(offsets: Int64Array) -> Iterator[slice]:
    """All positions, some at a time: temporaries that fit a core's cache, and that the next ones can reuse.
    Memory that is touched for the first time costs more than what is computed on it."""
    start = 0
    while start < len(offsets) - 1:
        stop = int(np.searchsorted(offsets, offsets[start] + _AT_ONCE, side="right")) - 1
        stop = max(stop, start + 1)
        yield slice(start, stop)
        start = stop


def first_true(mask: NDArray[np.bool_]) -> int | None:
    """Index of the first True, or None."""
    if not len(mask):
        return None
    index = int(mask.argmax())
    return index if mask[index] else None
