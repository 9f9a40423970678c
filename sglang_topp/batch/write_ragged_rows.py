"""Check rows (lists, arrays, or tensors) of different lengths, and write them into a batch's arrays.

Each list or array is written once, from the caller's object directly into the batch's memory, without a
Python loop over tokens. Tensors on an accelerator are first copied to the host.

Shape legend: B samples, L_i tokens of sample i, W columns of a padded field.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray

from sglang_topp.errors import InvalidInputError
from sglang_topp.to_numpy import to_host, to_numpy

__all__ = [
    "RaggedRows",
    "as_integer",
    "as_integers",
    "check_lengths",
    "count_rows",
    "field_dtype",
    "host_rows",
    "right_align",
    "right_ones",
    "row_lengths",
    "write_row",
]

RaggedRows: TypeAlias = Sequence[Any]
"""One entry per sample: a list, a 1-D array, or a 1-D tensor on any device."""

_INTEGERS = frozenset("bhilqBHI")
_NUMBERS = _INTEGERS | frozenset("LQ?efdg")
# `host_rows` keeps rows of these types, and converts all other rows to NumPy arrays. This constant exists
# because a union type written in the `isinstance` call would be built again for every row.
_HELD = (list, tuple, np.ndarray)
# `_TAKES` maps the dtype of a batch's field to three values: the dtype codes that the caller's rows may have,
# the accepted values in words for error messages, and the format code for `struct`.
_TAKES = {
    np.dtype(np.int64): (_INTEGERS, "integers that fit int64", "q"),
    np.dtype(np.float32): (_NUMBERS, "numbers", "f"),
}


def as_integer(name: str, value: Any) -> int:
    """Check that `value` is an integer of any type, and return it as int.

    Without `as_integer`, NumPy would write 0.5 and "0" into an array of token ids as 0.

    Raises:
        InvalidInputError: `value` is not an integer, or does not fit into int64. For example, a tokenizer
            without a padding token has the `pad_token_id` None.
    """
    try:
        return int(np.int64(operator.index(value)))
    except (TypeError, OverflowError):
        raise InvalidInputError(f"{name}: got {value!r}, expected an integer that fits int64") from None


def as_integers(name: str, values: ArrayLike | torch.Tensor, expected: str) -> NDArray[np.int64]:
    """Check that `values` is a 1-D array or list of integers, possibly empty. Return a 1-D int64 array.

    Raises:
        InvalidInputError: `values` is not a 1-D array of integers. The error message contains
            `expected`, the caller's description of the valid values.
    """
    try:
        array = to_numpy(values)
    except ValueError as error:  # `values` holds lists of different lengths
        raise InvalidInputError(f"{name}: expected {expected}: {error}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InvalidInputError(f"{name}: got {array.dtype} of shape {array.shape}, expected {expected}")
    return array.astype(np.int64)


def count_rows(name: str, rows: RaggedRows, expected: str) -> int:
    """Return the number of rows.

    Raises:
        InvalidInputError: `rows` has no length, or iterates over something other than rows in order: a dict
            over its keys, a set in any order, text and bytes over characters. The message contains
            `expected`.
    """
    try:
        if not isinstance(rows, Mapping | Set | str | bytes | bytearray | memoryview):
            return len(rows)
    except TypeError:
        pass
    raise InvalidInputError(f"{name}: got {rows!r}, expected {expected}")


def row_lengths(name: str, rows: RaggedRows) -> NDArray[np.int64]:
    """Return int64 [B]: the length of every sample's row.

    Raises:
        InvalidInputError: `rows` is empty or is not a sequence, or a row in `rows` has no length. If a row
            has no length, the message names the sample.
    """
    num_rows = count_rows(name, rows, "one row per sample")
    if not num_rows:
        raise InvalidInputError(f"{name}: got no samples, expected at least one")
    try:
        return np.fromiter(map(len, rows), np.int64, num_rows)
    except TypeError:
        i = next(i for i, row in enumerate(rows) if not hasattr(row, "__len__") or not np.ndim(row))
        raise InvalidInputError(f"{name}[{i}]: got {rows[i]!r}, expected one value per token") from None


def check_lengths(name: str, rows: RaggedRows, expected: NDArray[np.int64], of: str) -> None:
    """Check that every row of field `name` is as long as the same sample's row in another field.

    `of` is the name of the field to compare with, and `expected` holds the lengths of that field's rows.

    Raises:
        InvalidInputError: the two fields differ in their number of samples or in the length of a sample's
            row. If a row's length differs, the error message names the sample.
    """
    lengths = row_lengths(name, rows)
    if len(lengths) != len(expected):
        raise InvalidInputError(f"{name}: got {len(lengths)} samples, expected {len(expected)}, as in {of}")
    if (wrong := np.flatnonzero(lengths != expected)).size:
        i = int(wrong[0])
        raise InvalidInputError(
            f"{name}[{i}]: got {lengths[i]} values, expected {expected[i]}, as in {of}[{i}]"
        )


def field_dtype(rows: RaggedRows) -> type[np.int64] | type[np.float32]:
    """Return the dtype for a field that the caller adds: int64 for integer arrays and tensors, else float32.

    A field with lists is always float32, so that its dtype does not depend on the values in a list. Empty
    rows are ignored. If all rows are empty, the dtype is float32.
    """
    dtypes = [getattr(row, "dtype", None) for row in rows if len(row)]
    return np.int64 if dtypes and all(map(_is_integer, dtypes)) else np.float32


def _is_integer(dtype: Any) -> bool:
    if isinstance(dtype, torch.dtype):
        return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return isinstance(dtype, np.dtype) and dtype.kind in "iu"


def host_rows(name: str, rows: RaggedRows, dtype: DTypeLike) -> list[Any]:
    """Return the rows in host memory, each as a list, a tuple, or a NumPy array [L_i].

    The function checks the shapes and dtypes of arrays. `write_row` checks the values in lists and tuples.

    Args:
        dtype: int64 or float32, the dtype that `write_row` will write.

    Raises:
        InvalidInputError: a row is not 1-D, or has the wrong dtype, such as floats for token ids. The error
            message names the sample.
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
    return out  # an empty row may have any dtype: NumPy turns [] into a float64 array


def write_row(line: NDArray[Any], row: Any, name: str, sample: int) -> None:
    """Write `line[:] = row`. `row` must hold integers for an int64 `line`, or numbers for a float32 `line`.

    Args:
        line: the destination, contiguous int64 or float32 [L]. L is the row's length, already verified by
            `check_lengths`.
        row: a row that `host_rows` returned.
        name, sample: the field's name and the sample's index, for error messages.

    Raises:
        InvalidInputError: a list holds a value of another type, such as a float among token ids.
    """
    if isinstance(row, np.ndarray):
        line[:] = row
        return
    code = _TAKES[line.dtype][2]
    try:
        # `struct` is twice as fast as NumPy's conversion, which has to infer the type first.
        struct.pack_into(f"{len(row)}{code}", line.data, 0, *row)
    except (struct.error, TypeError, OverflowError) as error:
        raise InvalidInputError(f"{name}[{sample}]: {error}") from None


def right_align(
    name: str, rows: RaggedRows, lengths: NDArray[np.int64], width: int, dtype: DTypeLike
) -> NDArray[Any]:
    """Return [B, width] with each row right-aligned: `out[i, width - lengths[i]:] = rows[i]`, else 0."""
    out = np.zeros((len(rows), width), dtype)
    for i, (line, row, start) in enumerate(zip(out, rows, (width - lengths).tolist(), strict=True)):
        write_row(line[start:], row, name, i)
    return out


def right_ones(lengths: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Return int64 [B, width]: row i is 1 from column `width - lengths[i]` on, and 0 before."""
    out = np.zeros((len(lengths), width), np.int64)
    for line, start in zip(out, (width - lengths).tolist(), strict=True):
        line[start:] = 1
    return out
