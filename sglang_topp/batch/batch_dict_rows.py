"""Read the entries of a batch (a dict or TensorDict): count rows, select rows, and view tensors as raw bits.

`nested_batch.py` compresses batches with these functions.

Shape legend: B rows, W columns, and `rest` for any further dimensions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets
from sglang_topp.batch.compressed_padding_mask import CompressedMask
from sglang_topp.candidates.csr_operations import offsets_of
from sglang_topp.errors import InvalidInputError

__all__ = [
    "as_bits",
    "bits_of",
    "count_rows",
    "entries_of",
    "has_rows",
    "is_jagged",
    "is_plain",
    "is_tensordict",
    "jagged_tensor",
    "mask_of",
    "nbytes_of",
    "pad_bits",
    "take_rows",
    "with_columns",
]

# `nested_batch.py` compares and copies elements as bit patterns. As bit patterns, -0.0 differs from 0.0, and
# a NaN equals itself.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def entries_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `batch` as a dict that maps names to values.

    If a TensorDict holds a BatchCandidateSets in a `NonTensorData`, the dict holds the BatchCandidateSets
    itself. All other values stay as they are.
    """
    if not is_tensordict(batch):
        return dict(batch)
    from tensordict import NonTensorData

    entries = {name: batch.get(name) for name in batch.keys()}  # noqa: SIM118  a TensorDict iterates over rows
    return {
        name: value.data
        if isinstance(value, NonTensorData) and isinstance(value.data, BatchCandidateSets)
        else value
        for name, value in entries.items()
    }


def count_rows(entries: Mapping[str, Any]) -> int:
    sizes = {
        name: len(value)
        for name, value in entries.items()
        if isinstance(value, BatchCandidateSets) or is_jagged(value) or is_padded(name, value)
    }
    if not sizes:
        raise InvalidInputError("batch: got no tensors with rows")
    first = next(iter(sizes))
    for name, size in sizes.items():
        if size != sizes[first]:
            hint = _rows_come_second(entries, name, sizes[first]) or _rows_come_second(entries, first, size)
            raise InvalidInputError(f"{name}: got {size} rows, expected {sizes[first]}, as in {first}{hint}")
    return sizes[first]


def _rows_come_second(entries: Mapping[str, Any], name: str, num_rows: int) -> str:
    """Return a hint for an error message: dimension 1 of the tensor `name` may hold the rows.

    The hint is for tensors such as `position_ids` [3, B, W]. If the size of dimension 1 is not `num_rows`,
    the hint is empty.
    """
    value = entries[name]
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == num_rows:
        return f"; if the rows of {name} are dimension 1, pass {name}.transpose(0, 1)"
    return ""


def is_jagged(value: Any) -> bool:
    """Return whether `value` is a `torch.nested` tensor with `layout=torch.jagged`, on any device."""
    return isinstance(value, torch.Tensor) and value.layout == torch.jagged


def is_padded(name: str, value: Any) -> bool:
    """Return whether `value` is a padded tensor: strided, with the rows in dimension 0, on any device.

    Raises:
        InvalidInputError: `value` is a tensor that cannot be sliced by rows, such as a sparse tensor.
    """
    if not isinstance(value, torch.Tensor) or not value.ndim or is_jagged(value):
        return False
    if value.is_nested or value.layout != torch.strided:
        kind = "nested tensor" if value.is_nested else "tensor"
        raise InvalidInputError(
            f"{name}: got a {kind} of layout {value.layout}, which cannot be cut by rows; expected a padded"
            " tensor, or a nested one with layout=torch.jagged"
        )
    return True


def is_plain(name: str, value: Any) -> bool:
    """Return whether `value` is a padded CPU tensor that NumPy can view."""
    return is_padded(name, value) and value.device.type == "cpu" and value.itemsize in _BITS


def with_columns(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield `(name, tensor)` for each padded tensor with two dimensions or more in the batch entry `value`.

    If `value` is a TensorDict, its tensors are named `name.inner`.
    """
    if isinstance(value, torch.Tensor):
        if value.ndim > 1 and not is_jagged(value):
            yield name, value
    elif is_tensordict(value):
        for inner, part in value.items():
            yield from with_columns(f"{name}.{inner}", part)


def has_rows(value: Any, num_rows: int) -> bool:
    # `type(value) is tuple` excludes named tuples, which hold fields instead of rows.
    if isinstance(value, BatchCandidateSets | list) or type(value) is tuple:
        return len(value) == num_rows
    if isinstance(value, torch.Tensor | np.ndarray) or is_tensordict(value):
        return bool(value.ndim > 0 and value.shape[0] == num_rows)
    return False


def take_rows(value: Any, rows: NDArray[np.int64]) -> Any:
    if isinstance(value, BatchCandidateSets):
        return value.take(rows)
    if isinstance(value, list | tuple):
        return type(value)(value[i] for i in rows.tolist())
    if is_jagged(value):
        return _take_jagged(value, rows)
    if len(rows) and (np.diff(rows) == 1).all():
        return value[rows[0] : rows[-1] + 1]  # a view
    return value[rows]


def _take_jagged(value: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """Copy the given rows of a jagged tensor to a new tensor, whose pickle holds only these rows."""
    # Tell torch which dimension is ragged. By default, `nested_tensor_from_jagged` assumes that dimension 1
    # is ragged.
    ragged = next(dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt))
    held = value.unbind()
    parts = [held[i] for i in rows.tolist()]
    values = torch.cat(parts, ragged - 1) if parts else value.values().narrow(ragged - 1, 0, 0)
    return jagged_tensor(values, offsets_of([part.shape[ragged - 1] for part in parts]), ragged)


def jagged_tensor(values: torch.Tensor, offsets: NDArray[np.int64], ragged: int = 1) -> torch.Tensor:
    """Return a jagged tensor. Row i is the slice `offsets[i]:offsets[i + 1]` of dimension `ragged - 1`.

    The tensor knows its shortest and its longest row. Without them, `torch.nested.to_padded_tensor` takes the
    padded width from another dimension, and drops values.
    """
    lengths = np.diff(offsets)
    return torch.nested.nested_tensor_from_jagged(
        values,
        torch.tensor(offsets, device=values.device),
        jagged_dim=ragged,
        min_seqlen=int(lengths.min()) if len(lengths) else 0,
        max_seqlen=int(lengths.max(initial=0)),
    )


def nbytes_of(value: Any) -> int:
    """Return the size in bytes of candidate sets or a jagged tensor, and 0 for any other entry."""
    if isinstance(value, BatchCandidateSets):
        return value.nbytes
    if is_jagged(value):
        return int(value.values().nbytes + value.offsets().nbytes)
    return 0


def padded_field(entries: Mapping[str, Any], name: str) -> torch.Tensor:
    if name not in entries:
        raise InvalidInputError(f"{name}: is not in the batch; there are {', '.join(entries)}")
    value = entries[name]
    if not is_plain(name, value) or value.ndim < 2:
        got = (
            f"{value.dtype} {list(value.shape)} on {value.device}"
            if isinstance(value, torch.Tensor)
            else type(value)
        )
        raise InvalidInputError(f"{name}: got {got}, expected a padded CPU tensor of two or more dimensions")
    tensor: torch.Tensor = value
    return tensor


def mask_of(entries: Mapping[str, Any], name: str) -> NDArray[Any]:
    """Return the mask `name` as integers [B, W]: 0 where the mask is 0, and nonzero integers elsewhere."""
    mask = padded_field(entries, name)
    if mask.ndim != 2:
        raise InvalidInputError(f"{name}: got shape {list(mask.shape)}, expected a mask [rows, columns]")
    # NumPy has no bfloat16, so `mask_of` returns the bit patterns of a float mask. The left shift drops the
    # sign bit, so -0.0 counts as 0.
    return as_bits(mask) << 1 if mask.dtype.is_floating_point else as_bits(mask)


def bits_of(entries: Mapping[str, Any], name: str, layout: CompressedMask, columns: int) -> NDArray[Any]:
    """Return the bit patterns of field `name` as [B, W, *rest], with dimension `columns` moved to index 1."""
    tensor = padded_field(entries, name)
    if not 1 <= columns < tensor.ndim:
        raise InvalidInputError(
            f"{name}: got columns={columns}, expected a dimension from 1 to {tensor.ndim - 1}"
        )
    if (width := tensor.shape[columns]) != layout.width:
        fitting = [dim for dim in range(1, tensor.ndim) if tensor.shape[dim] == layout.width]
        hint = (
            f"; for its dimension {fitting[0]}, pass NestedFieldSpec(columns={fitting[0]})" if fitting else ""
        )
        raise InvalidInputError(
            f"{name}: got {width} columns, expected {layout.width}, as its mask has{hint}"
        )
    return np.ascontiguousarray(np.moveaxis(as_bits(tensor), columns, 1))


def as_bits(tensor: torch.Tensor) -> NDArray[Any]:
    # `view` would ignore a conjugation or negation that torch has not yet applied to the tensor's memory.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    bits: NDArray[Any] = tensor.view(_BITS[tensor.itemsize]).numpy()
    return bits


def pad_bits(name: str, dtype: torch.dtype, pad: float) -> int:
    try:
        value = torch.tensor(pad, dtype=dtype)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{name}: pad {pad} is not a valid {dtype}: {error}") from None
    overflows = dtype.is_floating_point and math.isinf(value.item()) and not math.isinf(pad)
    if overflows or (not dtype.is_floating_point and value.item() != pad):
        raise InvalidInputError(f"{name}: pad {pad} is not a valid {dtype}; the nearest is {value.item()}")
    return int(value.view(_BITS[dtype.itemsize]).item())


def is_tensordict(value: Any) -> bool:
    # A caller that has a TensorDict has already imported tensordict, so this function need not import it.
    module = sys.modules.get("tensordict")
    return module is not None and bool(module.is_tensor_collection(value))
