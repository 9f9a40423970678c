"""One row per sample: what a rollout hands over (lists, arrays, tensors), written where it belongs.

A row is written once, from the caller's object straight into the batch's memory; no loop runs per token.

Shape legend: B samples, L_i tokens of sample i, W columns of a padded field.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sglang_topp._tensors import to_numpy
from sglang_topp.batch.host import to_host
from sglang_topp.errors import InvalidInputError

__all__ = [
    "Rows",
    "as_integer",
    "as_integers",
    "check_lengths",
    "host_rows",
    "right_align",
    "right_ones",
    "row_lengths",
    "write_row",
]

Rows: TypeAlias = Sequence[Any]
"""One entry per sample: a list, a 1-D array, or a 1-D tensor on any device."""

_INTEGERS = frozenset("bhilqBHI")
_NUMBERS = _INTEGERS | frozenset("LQ?efdg")
# What rows may be held as; a tuple, for a union would be built again for every row.
_HELD = (list, tuple, np.ndarray)
# By the dtype that rows are written as: which dtypes it takes, their name in words, and its `struct` code.
_TAKES = {
    np.dtype(np.int64): (_INTEGERS, "integers that fit int64", "q"),
    np.dtype(np.float32): (_NUMBERS, "numbers", "f"),
}


def as_integer(name: str, value: Any) -> int:
    """`value`, an integer of any type; NumPy would write 0.5 and "0" into an array of ids as 0.

    Raises:
        InvalidInputError: `value` is something else (None, of a tokenizer without a padding token), or
            does not fit int64.
    """
    try:
        return int(np.int64(operator.index(value)))
    except (TypeError, OverflowError):
        raise InvalidInputError(f"{name}: got {value!r}, expected an integer that fits int64") from None


def as_integers(name: str, values: ArrayLike | torch.Tensor, expected: str) -> NDArray[np.int64]:
    """int64 [k]: integers as callers hold them, checked; an empty list is of any kind.

    Raises:
        InvalidInputError: not 1-D, or not integers; says what was `expected`.
    """
    try:
        array = to_numpy(values)
    except ValueError as error:  # lists of several lengths
        raise InvalidInputError(f"{name}: expected {expected}: {error}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidInputError(f"{name}: got {array.dtype} of shape {array.shape}, expected {expected}")
    return array.astype(np.int64)


def row_lengths(name: str, rows: Rows) -> NDArray[np.int64]:
    """int64 [B]: the length of every sample's row.

    Raises:
        InvalidInputError: no samples, no rows at all (None), or an entry without a length (a number,
            None); names the sample.
    """
    try:
        num_rows = len(rows)
    except TypeError:
        raise InvalidInputError(f"{name}: got {rows!r}, expected one row per sample") from None
    if not num_rows:
        raise InvalidInputError(f"{name}: got no samples, expected at least one")
    try:
        return np.fromiter(map(len, rows), np.int64, num_rows)
    except TypeError:
        i = next(i for i, row in enumerate(rows) if not hasattr(row, "__len__") or not np.ndim(row))
        raise InvalidInputError(f"{name}[{i}]: got {rows[i]!r}, expected one value per token") from None


def check_lengths(name: str, rows: Rows, expected: NDArray[np.int64], of: str) -> None:
    """Every sample's row must be exactly as long as `expected`, the lengths of `of`.

    Raises:
        InvalidInputError: another number of samples, or a row of another length; names the sample.
    """
    lengths = row_lengths(name, rows)
    if len(lengths) != len(expected):
        raise InvalidInputError(f"{name}: got {len(lengths)} samples, expected {len(expected)}, as in {of}")
    if (wrong := np.flatnonzero(lengths != expected)).size:
        i = int(wrong[0])
        raise InvalidInputError(
            f"{name}[{i}]: got {lengths[i]} values, expected {expected[i]}, as in {of}[{i}]"
        )


def host_rows(name: str, rows: Rows, dtype: DTypeLike) -> list[Any]:
    """The rows in host memory, checked as far as their types tell: lists, tuples, and arrays [L_i].

    Args:
        dtype: int64 or float32, what `write_row` will write them as.

    Raises:
        InvalidInputError: a row is not 1-D, or an array of another kind (floats as token ids); names the
            sample.
    """
    accepted, expected, _ = _TAKES[np.dtype(dtype)]
    out = [row if isinstance(row, _HELD) else np.asarray(row) for row in to_host(rows)]
    kinds = {(row.ndim, row.dtype.char) for row in out if isinstance(row, np.ndarray)}
    if all(ndim == 1 and char in accepted for ndim, char in kinds):
        return out
    for i, row in enumerate(out):
        if isinstance(row, np.ndarray):
            if row.ndim != 1:
                raise InvalidInputError(f"{name}[{i}]: got shape {row.shape}, expected one value per token")
            if row.dtype.char not in accepted and row.size:
                raise InvalidInputError(f"{name}[{i}]: got dtype {row.dtype}, expected {expected}")
    return out  # what looked wrong is empty, and NumPy makes an empty list of any kind float64


def write_row(line: NDArray[Any], row: Any, name: str, sample: int) -> None:
    """`line[:] = row`, and no other conversion than from integers to int64 or from numbers to float32.

    Args:
        line: int64 or float32 [L], contiguous; L is the row's length, which `check_lengths` has seen to.
        row: one of `host_rows`.
        name, sample: what error messages call the row.

    Raises:
        InvalidInputError: a list holds values of another kind (a float among token ids).
    """
    if isinstance(row, np.ndarray):
        line[:] = row
        return
    code = _TAKES[line.dtype][2]
    try:
        # Twice as fast as NumPy's own conversion, which has to find out the type first.
        struct.pack_into(f"{len(row)}{code}", line.data, 0, *row)
    except (struct.error, TypeError, OverflowError) as error:
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
