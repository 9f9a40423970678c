"""One row per sample: what a rollout hands over (lists, arrays, tensors), written where it belongs.

A row is written once, from the caller's object straight into the batch's memory; no loop runs per token.

Shape legend: B samples, L_i tokens of sample i, W columns of a padded field.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sglang_topp.errors import InvalidInputError

__all__ = ["Rows", "check_lengths", "right_align", "right_ones", "row_lengths", "write_row"]

Rows: TypeAlias = Sequence[Any]
"""One entry per sample: a list, a 1-D array, or a 1-D tensor on any device."""

_INTEGERS = "bhilqBHI"
_FLOATS = "efdg"
# By the size of the target's items: its `struct` code, the dtypes that it takes, and their name in words.
_INTO = {
    8: ("q", frozenset(_INTEGERS), "integers that fit int64"),
    4: ("f", frozenset(_INTEGERS + "LQ?" + _FLOATS), "numbers"),
}


def row_lengths(name: str, rows: Rows) -> NDArray[np.int64]:
    """int64 [B]: the length of every sample's row.

    Raises:
        InvalidInputError: no samples, or an entry without a length (a number, None); names the sample.
    """
    if not len(rows):
        raise InvalidInputError(f"{name}: got no samples, expected at least one")
    try:
        return np.fromiter(map(len, rows), np.int64, len(rows))
    except TypeError:
        i = next(i for i, row in enumerate(rows) if not hasattr(row, "__len__") or not np.ndim(row))
        raise InvalidInputError(f"{name}[{i}]: got {rows[i]!r}, expected one value per token") from None


def check_lengths(name: str, rows: Rows, expected: NDArray[np.int64], of: str) -> None:
    """Every sample's row must be exactly as long as `expected`, the lengths of `of`.

    Raises:
        InvalidInputError: another number of samples, or a row of another length; names the sample.
    """
    if len(rows) != len(expected):
        raise InvalidInputError(f"{name}: got {len(rows)} samples, expected {len(expected)}, as in {of}")
    lengths = row_lengths(name, rows)
    if (wrong := np.flatnonzero(lengths != expected)).size:
        i = int(wrong[0])
        raise InvalidInputError(
            f"{name}[{i}]: got {lengths[i]} values, expected {expected[i]}, as in {of}[{i}]"
        )


def write_row(line: NDArray[Any], row: Any, name: str, sample: int) -> None:
    """`line[:] = row`, and no other conversion than from integers to int64 or from numbers to float32.

    Args:
        line: int64 or float32 [L], contiguous; L is the row's length, which `check_lengths` has seen to.
        row: a list or tuple of L Python numbers, or an array [L].
        name, sample: what error messages call the row.

    Raises:
        InvalidInputError: not 1-D, or values of another kind (a float among token ids).
    """
    code, accepted, expected = _INTO[line.itemsize]
    try:
        if isinstance(row, list | tuple):
            # Twice as fast as NumPy's own conversion, which has to find out the type first.
            struct.pack_into(f"{len(row)}{code}", line.data, 0, *row)
            return
        array = np.asarray(row)
        if array.ndim != 1:
            raise TypeError(f"got shape {array.shape}, expected one value per token")
        if array.dtype.char not in accepted and array.size:
            raise TypeError(f"got dtype {array.dtype}, expected {expected}")
        line[:] = array
    except (TypeError, ValueError, OverflowError, struct.error) as error:
        raise InvalidInputError(f"{name}[{sample}]: {error}") from None


def right_align(
    name: str, rows: Rows, lengths: NDArray[np.int64], width: int, dtype: DTypeLike
) -> NDArray[Any]:
    """[B, width]: `out[i, width - lengths[i]:] = rows[i]`, and 0 before it."""
    out = np.zeros((len(rows), width), dtype)
    for i, (line, row, start) in enumerate(zip(out, rows, (width - lengths).tolist(), strict=True)):
        write_row(line[start:], row, name, i)
    return out


def right_ones(lengths: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """int64 [B, width]: 1 in the last `lengths[i]` columns of row i, 0 before."""
    out = np.zeros((len(lengths), width), np.int64)
    for line, start in zip(out, (width - lengths).tolist(), strict=True):
        line[start:] = 1
    return out
