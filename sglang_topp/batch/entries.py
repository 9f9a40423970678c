"""The entries of a batch, checked: which are tensors with rows, and what their elements are as bits.

Shape legend: B rows, W columns, rest: any further dimensions.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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
    "has_rows",
    "is_plain",
    "is_tensordict",
    "mask_of",
    "pad_bits",
    "take_rows",
]

# Elements are compared and moved as bit patterns: -0.0 is not 0.0, and a NaN equals itself.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def count_rows(entries: Mapping[str, Any]) -> int:
    sizes = {
        name: len(value) for name, value in entries.items() if isinstance(value, RowSets) or is_plain(value)
    }
    if not sizes:
        raise InvalidInputError("batch: got no tensors with rows")
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            raise InvalidInputError(f"{name}: got {size} rows, expected {sizes[first]}, as in {first}")
    return sizes[first]


def is_plain(value: Any) -> bool:
    """Whether `value` is a tensor with rows that NumPy can see."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return False
    if value.is_nested or value.layout != torch.strided:
        raise InvalidInputError(
            f"batch: got a tensor of layout {value.layout}, expected padded ones; it cannot be cut by rows"
        )
    return value.device.type == "cpu" and value.itemsize in _BITS


def has_rows(value: Any, num_rows: int) -> bool:
    if isinstance(value, RowSets | list | tuple):
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
    bits: NDArray[Any] = tensor.detach().view(_BITS[tensor.itemsize]).numpy()
    return bits


def pad_bits(name: str, dtype: torch.dtype, pad: float) -> int:
    try:
        value = torch.tensor(pad, dtype=dtype)
    except (RuntimeError, OverflowError, ValueError) as error:
        raise InvalidInputError(f"{name}: pad {pad} is no {dtype}: {error}") from None
    if not dtype.is_floating_point and value.item() != pad:
        raise InvalidInputError(f"{name}: pad {pad} is no {dtype}; the nearest is {value.item()}")
    return int(value.view(_BITS[dtype.itemsize]).item())


def is_tensordict(value: Any) -> bool:
    # Who has a TensorDict has imported the package; who has not need not have it.
    module = sys.modules.get("tensordict")
    return module is not None and bool(isinstance(value, module.TensorDictBase))
