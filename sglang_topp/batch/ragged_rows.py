"""Check rows (lists, arrays, or tensors) of different lengths, and write them into a batch's arrays.

Each list or array is written once, from the caller's object directly into the batch's memory, without a
Python loop over tokens. Tensors on an accelerator are first copied to the host, one after the other.

Shape legend: B samples, L_i tokens of sample i.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.candidates.csr_operations import first_true, offsets_of
from sglang_topp.candidates.torch_tensors import to_numpy
from sglang_topp.errors import InvalidInputError

RaggedRows: TypeAlias = Sequence[Any]
"""One entry per sample: a list, a 1-D array, or a 1-D tensor on any device."""

_INTEGERS = frozenset("bhilqBHI")
# A union type written in an `isinstance` call would be built again for every row.
_LISTS, _HELD = (list, tuple), (list, tuple, np.ndarray)
# `_TAKES` maps the dtype of a batch's field to three values: the dtype codes that the caller's rows may have,
# the accepted values in words for error messages, and the format code for `struct`.
_TAKES = {
    np.dtype(np.int64): (_INTEGERS, "integers that fit int64", "q"),
    np.dtype(np.float32): (_INTEGERS | frozenset("LQ?efdg"), "numbers", "f"),
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


def filled(shape: tuple[int, int], pad_token_id: Any) -> NDArray[np.int64]:
    """Return int64 of the given shape, full of `pad_token_id`, which must be an integer."""
    pad = as_integer("pad_token_id", pad_token_id)
    # `np.zeros` gets memory that is already zero.
    return np.full(shape, pad, np.int64) if pad else np.zeros(shape, np.int64)


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


def row_lengths(
    name: str, rows: RaggedRows, of: str = "", num_samples: int | None = None
) -> NDArray[np.int64]:
    """Return int64 [B]: the length of every sample's row.

    Raises:
        InvalidInputError: `rows` is empty or is not a sequence, does not have the `num_samples` rows of the
            field `of`, or has a row without a length. The message names that row's sample.
    """
    num_rows = count_rows(name, rows, "one row per sample")
    if not num_rows:
        raise InvalidInputError(f"{name}: got no samples, expected at least one")
    if num_samples not in (None, num_rows):
        raise InvalidInputError(f"{name}: got {num_rows} samples, expected {num_samples}, as in {of}")
    try:
        return np.fromiter(map(len, rows), np.int64, num_rows)
    except TypeError:
        i = next(i for i, row in enumerate(rows) if not hasattr(row, "__len__") or not np.ndim(row))
        raise InvalidInputError(f"{name}[{i}]: got {rows[i]!r}, expected one value per token") from None


def check_lengths(name: str, rows: RaggedRows, expected: NDArray[np.int64], of: str) -> None:
    """Raise InvalidInputError unless row i has `expected[i]` values, as in the field `of`."""
    lengths = row_lengths(name, rows, of, len(expected))
    if (i := first_true(lengths != expected)) is not None:
        raise InvalidInputError(
            f"{name}[{i}]: got {lengths[i]} values, expected {expected[i]}, as in {of}[{i}]"
        )


def to_host(rows: RaggedRows) -> list[Any]:
    """Return the rows as lists, tuples, and arrays."""
    return [row if isinstance(row, _HELD) else to_numpy(row) for row in rows]


def field_dtype(rows: RaggedRows) -> type[np.int64] | type[np.float32]:
    """Return the dtype for a field that the caller adds: int64 for integer arrays, else float32.

    A field with lists is always float32, so that its dtype does not depend on the values in a list. Empty
    rows are ignored. If all rows are empty, the dtype is float32. The rows are those of `to_host`.
    """
    kinds = {getattr(getattr(row, "dtype", None), "kind", "list") for row in rows if len(row)}
    return np.int64 if kinds and kinds <= {"i", "u"} else np.float32


def write_rows(name: str, rows: RaggedRows, starts: NDArray[np.int64], out: NDArray[Any]) -> NDArray[Any]:
    """Write row i to `out.flat[starts[i]:starts[i] + L_i]`, and return `out`.

    Args:
        name: the field's name, for error messages.
        rows: B rows as `to_host` returns them, of integers for an int64 `out`, or of numbers for a float32
            `out`. The caller has checked that they fit.
        starts: int64 [B].
        out: a contiguous int64 or float32 array.

    Raises:
        InvalidInputError: a row is not 1-D or has values of another type, such as a float among token ids.
            The message names the sample.
    """
    flat = out.reshape(-1)
    memory, (accepted, expected, code) = flat.data, _TAKES[out.dtype]
    for i, (row, start) in enumerate(zip(rows, starts.tolist(), strict=True)):
        if isinstance(row, _LISTS):
            try:
                # `struct` is twice as fast as NumPy's conversion, which has to infer the type first.
                struct.pack_into(f"{len(row)}{code}", memory, start * out.itemsize, *row)
            except (struct.error, TypeError, OverflowError) as error:
                raise InvalidInputError(f"{name}[{i}]: {error}") from None
            continue
        # NumPy turns [] into a float64 array.
        if row.ndim != 1 or (row.dtype.char not in accepted and row.size):
            got = f"dtype {row.dtype}" if row.ndim == 1 else f"shape {row.shape}"
            raise InvalidInputError(f"{name}[{i}]: got {got}, expected {expected}, one per token")
        flat[start : start + len(row)] = row
    return out


def write_sequence_rows(
    name: str,
    rows: RaggedRows,
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    shape: tuple[int, int],
) -> torch.Tensor:
    """Return zeros of `shape` and the rows' further dimensions, with row i from `out.flat[starts[i]]` on.

    Raises:
        InvalidInputError: there are not B rows, or a row is no integer array [L_i, ...] or [L_i - 1, ...]
            with the further dimensions of the others.
    """
    row_lengths(name, rows, "prompts", len(lengths))
    arrays = [np.asarray(row) for row in to_host(rows)]
    tail = arrays[0].shape[1:]
    for i, (array, length) in enumerate(zip(arrays, lengths.tolist(), strict=True)):
        if array.dtype.kind not in "iu" or array.shape[1:] != tail:
            got = f"{array.dtype} {list(array.shape)}"
            raise InvalidInputError(f"{name}[{i}]: got {got}, expected integers {['tokens', *tail]}")
        if length - len(array) not in (0, 1):
            raise InvalidInputError(
                f"{name}[{i}]: got {len(array)} rows for {length} tokens of prompt and response, expected as"
                " many, or one less"
            )
    dtype = np.result_type(*(array.dtype for array in arrays))
    if dtype.char in "HI":  # torch has few operations for uint16 and uint32
        dtype = np.dtype(np.int32 if dtype.char == "H" else np.int64)
    if dtype.char not in _INTEGERS:
        raise InvalidInputError(f"{name}: got {dtype}, expected integers that fit int64")
    out = np.zeros((*shape, *tail), dtype)
    flat = out.reshape(-1, *tail)
    for array, start in zip(arrays, starts.tolist(), strict=True):
        flat[start : start + len(array)] = array
    return torch.from_numpy(out)


def write_ones(
    starts: NDArray[np.int64], lengths: NDArray[np.int64], shape: tuple[int, int]
) -> NDArray[np.int64]:
    """Return int64 zeros of the given shape, with ones in `out.flat[starts[i]:starts[i] + lengths[i]]`."""
    out = np.zeros(shape, np.int64)
    flat = out.reshape(-1)
    for start, stop in zip(starts.tolist(), (starts + lengths).tolist(), strict=True):
        flat[start:stop] = 1
    return out


# -- loss masks ---------------------------------------------------------------------------------------------


def pack_loss_mask(mask: Any, *, length: int | None = None) -> NDArray[np.int8]:
    """Return a sample's loss mask as a read-only int8 [L] of zeros and ones, for a transfer to a process.

    A pickled list of ints takes two bytes per token, and one pointer per token once unpickled. An int8 array
    takes one byte, and the receiver reads it without a copy. Count the ones with `mask.sum()`. Python's
    built-in `sum` overflows above 127.

    Args:
        mask: a list of L ints or bools, an array [L], or a tensor [L] on any device; the result is a copy.
        length: the expected L, such as the response's length, or None to accept any length.

    Raises:
        InvalidInputError: `mask` has a value other than 0 and 1, has the wrong length, or is not 1-D.
    """
    (values,) = mask_rows("loss mask", [mask])
    if length is not None and len(values) != length:
        raise InvalidInputError(f"loss mask: got {len(values)} values, expected {length}")
    values.flags.writeable = False
    return values


def unpack_loss_masks(
    masks: Sequence[Any], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Copy the masks of many samples to a device, in one transfer of one byte per token.

    Mask i of the result is `dtype` [L_i], a view of one shared buffer.

    Raises:
        InvalidInputError: a value is not 0 or 1, or a mask is not 1-D. The message names the sample.
    """
    rows = mask_rows("loss masks", masks)
    flat = torch.from_numpy(np.concatenate([np.empty(0, np.int8), *rows])).to(device).to(dtype)
    return list(torch.split(flat, [len(row) for row in rows])) if rows else []


def mask_rows(name: str, masks: Sequence[Any]) -> list[NDArray[np.int8]]:
    """Return every sample's mask as int8 [L_i] of zeros and ones, copied.

    Raises:
        InvalidInputError: a value is not 0 or 1, or a mask is not 1-D. The message names the sample.
    """
    arrays = [np.empty(0, np.int8)]
    for i, mask in enumerate(to_host(masks)):
        try:
            array = _mask_array(mask)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"{name}[{i}]: {error}") from None
        if array.ndim != 1 or (array.dtype.kind not in "fiub" and array.size):
            raise InvalidInputError(
                f"{name}[{i}]: got {array.dtype} of shape {array.shape}, expected one 0 or 1 per token"
            )
        arrays.append(array if array.size else arrays[0])
    # Check all masks at once: a check of each would take longer than the conversion.
    flat, offsets = np.concatenate(arrays), offsets_of([len(one) for one in arrays[1:]])
    ones = flat != 0
    if (wrong := first_true(flat != ones)) is not None:
        i = int(np.searchsorted(offsets, wrong, side="right")) - 1
        raise InvalidInputError(
            f"{name}[{i}]: got {flat[wrong]} at token {wrong - offsets[i]}, expected 0 or 1"
        )
    values = ones.view(np.int8)
    return [values[start:stop] for start, stop in pairwise(offsets.tolist())]


def _mask_array(mask: Any) -> NDArray[Any]:
    if isinstance(mask, list | tuple):
        try:
            return np.frombuffer(bytearray(mask), np.uint8)  # several times as fast as `np.asarray`
        except (TypeError, ValueError):
            pass  # a value is a float, or does not fit a byte
    return np.asarray(mask)
