"""The entries of a batch, checked: which are tensors with rows, and what their elements are as bits.

Shape legend: B rows, W columns, rest: any further dimensions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.batch.layout import Layout
from sglang_topp.batch.row_sets import RowSets
from sglang_topp.errors import InvalidInputError

__all__ = [
    "as_bits",
    "bits_of",
    "count_rows",
    "entries_of",
    "has_rows",
    "is_plain",
    "is_tensordict",
    "mask_of",
    "pad_bits",
    "take_rows",
    "with_columns",
]

# Elements are compared and moved as bit patterns: -0.0 is not 0.0, and a NaN equals itself.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def entries_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch's entries by name; a TensorDict's non-tensors in the wrappers that say which have rows."""
    if not is_tensordict(batch):
        return dict(batch)
    from tensordict import NonTensorData

    entries = {name: batch.get(name) for name in batch.keys()}  # noqa: SIM118  a TensorDict iterates over rows
    return {
        name: value.data if isinstance(value, NonTensorData) and isinstance(value.data, RowSets) else value
        for name, value in entries.items()
    }


def count_rows(entries: Mapping[str, Any]) -> int:
    sizes = {
        name: len(value) for name, value in entries.items() if isinstance(value, RowSets) or is_padded(value)
    }
    if not sizes:
        raise InvalidInputError("batch: got no tensors with rows")
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise InvalidInputError(f"{name}: got {size} rows, expected {sizes[first]}, as in {first}")
    return sizes[first]


def is_padded(value: Any) -> bool:
    """Whether `value` is a tensor with rows, on any device."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return False
    if value.is_nested or value.layout != torch.strided:
        raise InvalidInputError(
            f"batch: got a tensor of layout {value.layout}, expected padded ones; it cannot be cut by rows"
        )
    return True


def is_plain(value: Any) -> bool:
    """Whether `value` is a tensor with rows that NumPy can see."""
    return is_padded(value) and value.device.type == "cpu" and value.itemsize in _BITS


def with_columns(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of two or more dimensions in an entry; those of an inner TensorDict as `name.inner`."""
    if isinstance(value, torch.Tensor):
        if value.ndim > 1:
            yield name, value
    elif is_tensordict(value):
        for inner, part in value.items():
            yield from with_columns(f"{name}.{inner}", part)


def has_rows(value: Any, num_rows: int) -> bool:
    if isinstance(value, RowSets | list) or type(value) is tuple:  # a named tuple is one value
        return len(value) == num_rows
    if isinstance(value, torch.Tensor | np.ndarray) or is_tensordict(value):
        return bool(value.ndim > 0 and value.shape[0] == num_rows)
    return False


def take_rows(value: Any, rows: NDArray[np.int64]) -> Any:
    if isinstance(value, RowSets):
        return value.take(rows)
    if isinstance(value, list | tuple):
        return type(value)(value[i] for i in rows.tolist())
    if len(rows) and (np.diff(rows) == 1).all():
        return value[rows[0] : rows[-1] + 1]  # a view
    return value[rows]


def padded_field(entries: Mapping[str, Any], name: str) -> torch.Tensor:
    if name not in entries:
        raise InvalidInputError(f"{name}: is not in the batch; there are {', '.join(entries)}")
    value = entries[name]
    if not is_plain(value) or value.ndim < 2:
        got = (
            f"{value.dtype} {list(value.shape)} on {value.device}"
            if isinstance(value, torch.Tensor)
            else type(value)
        )
        raise InvalidInputError(f"{name}: got {got}, expected a CPU tensor of two or more dimensions")
    tensor: torch.Tensor = value
    return tensor


def mask_of(entries: Mapping[str, Any], name: str) -> NDArray[Any]:
    """[B, W]: not 0 where the mask `name` is not 0."""
    mask = padded_field(entries, name)
    if mask.ndim != 2:
        raise InvalidInputError(f"{name}: got shape {list(mask.shape)}, expected a mask [rows, columns]")
    # A bfloat16 has no NumPy dtype; its other bits than the sign are 0 for 0.0 and -0.0 alone.
    return as_bits(mask) << 1 if mask.dtype.is_floating_point else as_bits(mask)


def bits_of(entries: Mapping[str, Any], name: str, layout: Layout) -> NDArray[Any]:
    tensor = padded_field(entries, name)
    if tensor.shape[1] != layout.width:
        raise InvalidInputError(
            f"{name}: got {tensor.shape[1]} columns, expected {layout.width}, as its mask has"
        )
    return np.ascontiguousarray(as_bits(tensor))


def as_bits(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach().resolve_conj().resolve_neg()  # those flags are no part of the bits
    bits: NDArray[Any] = tensor.view(_BITS[tensor.itemsize]).numpy()
    return bits


def pad_bits(name: str, dtype: torch.dtype, pad: float) -> int:
    try:
        value = torch.tensor(pad, dtype=dtype)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{name}: pad {pad} is no {dtype}: {error}") from None
    overflows = dtype.is_floating_point and math.isinf(value.item()) and not math.isinf(pad)
    if overflows or (not dtype.is_floating_point and value.item() != pad):
        raise InvalidInputError(f"{name}: pad {pad} is no {dtype}; the nearest is {value.item()}")
    return int(value.view(_BITS[dtype.itemsize]).item())


def is_tensordict(value: Any) -> bool:
    # Who has a TensorDict has imported the package; who has not need not have it.
    module = sys.modules.get("tensordict")
    return module is not None and bool(module.is_tensor_collection(value))
