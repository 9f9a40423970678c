"""`NestedBatch`: a batch whose padded fields are stored without padding, for transfers between processes.

Each nested field has a mask and a pad value. Elements where the mask is not 0 are sent, and so are those that
differ from the pad value, so that `unnest_batch` restores the padded field exactly.

Shape legend: B rows, W columns, n values of one field over all rows, and `rest` for any further dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets, cut
from sglang_topp.candidates.csr_operations import indices, offsets_of
from sglang_topp.errors import InvalidInputError, describe

# Elements are compared and copied as bit patterns: -0.0 differs from 0.0, and a NaN equals itself.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class _Mask:
    """A mask [B, W] of the columns that are kept. Row i keeps the values `offsets[i]:offsets[i + 1]`."""

    bits: NDArray[np.uint8]
    """[B, ceil(W / 8)], one bit per column."""
    width: int
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, keep: NDArray[np.bool_]) -> tuple[_Mask, NDArray[np.int64]]:
        """Return the mask of `keep` [B, W], and what `kept` returns for it."""
        kept = np.flatnonzero(keep)
        offsets = np.searchsorted(kept, np.arange(len(keep) + 1) * keep.shape[1])
        return cls(np.packbits(keep, axis=1), keep.shape[1], offsets), kept

    def kept(self) -> NDArray[np.int64]:
        """Return int64 [n]: the kept elements, as indices of the flattened [B * W] field."""
        # NumPy searches booleans four times as fast as bytes.
        return np.flatnonzero(np.unpackbits(self.bits, axis=1, count=self.width).view(np.bool_))

    def take(self, rows: NDArray[np.int64]) -> _Mask:
        return _Mask(_take(self.bits, rows), self.width, offsets_of(np.diff(self.offsets)[rows]))


@dataclass(frozen=True, eq=False)
class _Tensor:
    """The values of a whole tensor as a NumPy array, which pickle protocol 5 transfers without a copy."""

    values: NDArray[Any]
    """[B, *rest], as bit patterns."""
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _Field(_Tensor):
    """The kept values [n, *rest] of a nested field."""

    mask: _Mask
    """The field's mask, which other fields may share."""
    pad: int
    """The pad value's bit pattern."""


@dataclass(frozen=True, eq=False, repr=False)
class NestedBatch:
    """A batch whose padded fields are stored without padding, as kept values and masks.

    `nest_batch` creates a NestedBatch, and `unnest_batch` restores the padded batch. The batch is immutable
    and picklable. `batch[a:b]` and `take` select rows. Tensors that are not nested are not copied,
    and pickle protocol 5 transfers them without a copy.

    Attributes:
        num_rows: the number of rows B.
    """

    num_rows: int
    _entries: Mapping[str, Any]
    """Each entry of the batch, in order: a `_Field`, a `_Tensor`, or the value itself."""
    _by_rows: frozenset[str]
    """The values in `_entries` that have one element per row."""

    def __len__(self) -> int:
        """Return the number of rows B."""
        return self.num_rows

    def __getitem__(self, rows: slice) -> NestedBatch:
        """Return the rows from a to b - 1 for `batch[a:b]`. The values of padded tensors are not copied."""
        return self.take(np.arange(self.num_rows)[rows])

    def take(self, rows: ArrayLike) -> NestedBatch:
        """Return the given rows, in the given order. A row may occur more than once.

        Raises:
            InvalidInputError: `rows` are not integers, or a row is out of range.
        """
        index = indices("rows", rows, self.num_rows)
        masks = {mask: mask.take(index) for mask in self._masks()}

        def part(name: str, entry: Any) -> Any:
            if isinstance(entry, _Field):
                values = cut(entry.values, entry.mask.offsets, index)
                return replace(entry, values=values, mask=masks[entry.mask])
            if isinstance(entry, _Tensor):
                return replace(entry, values=_take(entry.values, index))
            return _take(entry, index) if name in self._by_rows else entry

        entries = {name: part(name, entry) for name, entry in self._entries.items()}
        return replace(self, num_rows=len(index), _entries=entries)

    def _masks(self) -> set[_Mask]:
        return {entry.mask for entry in self._entries.values() if isinstance(entry, _Field)}


def nest_batch(
    batch: dict[str, Any], fields: Mapping[str, str], pads: Mapping[str, float] | None = None
) -> NestedBatch:
    """Remove the padding of a batch's fields. `unnest_batch` restores the batch bit for bit.

    Args:
        batch: maps names to values. A value has one element per row if it is a padded tensor [B, ...] on any
            device, a BatchCandidateSets, or a list, tuple, or array of B elements. Values of other types or
            lengths belong to the batch as a whole.
        fields: the padded CPU tensors `[B, W, *rest]` to nest, each with the name of its mask: the [B, W]
            field whose non-zero elements mark the columns to keep. Other entries are not changed.
        pads: the values of these fields in columns that are not kept, where they are not 0.

    Raises:
        InvalidInputError: `batch` is no dict, a field or its mask is missing, is not a padded CPU tensor, or
            has the wrong shape. Or a pad value is not valid in its field's dtype, a value cannot be cut by
            rows, such as a sparse tensor, or tensors differ in their number of rows.
    """
    if not isinstance(batch, dict):
        raise InvalidInputError(f"batch: got {type(batch).__name__}, expected a dict; see `dict(x.items())`")
    sizes = {name: size for name, value in batch.items() if (size := _num_rows(name, value)) is not None}
    if not sizes:
        raise InvalidInputError("batch: got no tensors with rows")
    first, num_rows = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != num_rows:
            raise InvalidInputError(f"{name}: got {size} rows, expected {num_rows}, as in {first}")
    masks: dict[str, tuple[NDArray[np.bool_], _Mask, NDArray[np.int64]]] = {}
    entries = {name: _Tensor(_bits(one), one.dtype) if _is_plain(one) else one for name, one in batch.items()}
    for name, mask_name in fields.items():
        if mask_name not in masks:
            marks = _bits(_padded(batch, mask_name)) != 0
            if marks.ndim != 2:
                raise InvalidInputError(
                    f"{mask_name}: got shape {list(marks.shape)}, expected [rows, columns]"
                )
            masks[mask_name] = (marks, *_Mask.of(marks))
        keep, mask, index = masks[mask_name]
        tensor = _padded(batch, name)
        if tensor.shape[1] != keep.shape[1]:
            raise InvalidInputError(
                f"{name}: got {tensor.shape[1]} columns, expected {keep.shape[1]}, as {mask_name} has"
            )
        pad = _pad_bits(name, tensor.dtype, (pads or {}).get(name, 0))
        bits = np.ascontiguousarray(_bits(tensor))
        flat = bits.reshape(keep.size, *bits.shape[2:])
        values = flat.take(index, axis=0)
        # A mask has only zeros where it marks nothing, so with pad 0, it is not read again.
        if (name != mask_name or pad) and _count_other(flat, pad) != _count_other(values, pad):
            mask, index = _Mask.of(keep | (bits != pad).reshape(*keep.shape, -1).any(axis=2))
            values = flat.take(index, axis=0)
        entries[name] = _Field(values, tensor.dtype, mask, pad)
    by_rows = frozenset(name for name, value in batch.items() if name in sizes or _has_rows(value, num_rows))
    return NestedBatch(num_rows, entries, by_rows)


def unnest_batch(nested: NestedBatch) -> dict[str, Any]:
    """Restore the padded batch of the rows that `nested` holds.

    Each field has its original dtype and shape, and the fields have their original order. Nested fields
    become new tensors. Other tensors share memory with `nested` if the memory is writable.
    """
    kept = {mask: mask.kept() for mask in nested._masks()}

    def restored(entry: Any) -> Any:
        if not isinstance(entry, _Tensor):
            return entry
        array = entry.values
        if isinstance(entry, _Field):
            # `np.zeros` gets memory that is already zero, so the padding need not be written.
            array = np.zeros((nested.num_rows * entry.mask.width, *array.shape[1:]), array.dtype)
            if entry.pad:
                array.fill(entry.pad)
            array[kept[entry.mask]] = entry.values
            array = array.reshape(nested.num_rows, entry.mask.width, *array.shape[1:])
        return torch.from_numpy(array if array.flags.writeable else array.copy()).view(entry.dtype)

    return {name: restored(entry) for name, entry in nested._entries.items()}


def _num_rows(name: str, value: Any) -> int | None:
    """Return the number of rows of candidate sets or of a tensor, or None for other values.

    Raises:
        InvalidInputError: `value` cannot be cut by rows, such as a sparse or nested tensor.
    """
    if isinstance(value, BatchCandidateSets):
        return len(value)
    if isinstance(value, np.ndarray) or not getattr(value, "shape", ()):
        return None
    if not isinstance(value, torch.Tensor) or value.is_nested or value.layout != torch.strided:
        raise InvalidInputError(
            f"{name}: got {getattr(value, 'layout', type(value).__name__)}, which cannot be cut by rows;"
            " expected a padded tensor, an array, or a list"
        )
    return len(value)


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a padded CPU tensor that NumPy can view."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return False
    return value.device.type == "cpu" and value.itemsize in _BITS


def _padded(batch: Mapping[str, Any], name: str) -> torch.Tensor:
    if name not in batch:
        raise InvalidInputError(f"{name}: is not in the batch; there are {', '.join(batch)}")
    tensor: torch.Tensor = batch[name]
    if not _is_plain(tensor) or tensor.ndim < 2:
        is_tensor = isinstance(tensor, torch.Tensor)
        got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" if is_tensor else describe(tensor)
        raise InvalidInputError(f"{name}: got {got}, expected a padded CPU tensor of two or more dimensions")
    return tensor


def _has_rows(value: Any, num_rows: int) -> bool:
    """Return whether a value other than those of `_num_rows` has one element per row."""
    # `type(value) is tuple` excludes named tuples, which hold fields instead of rows.
    is_sequence = isinstance(value, list | np.ndarray) or type(value) is tuple
    return is_sequence and getattr(value, "ndim", 1) > 0 and len(value) == num_rows


def _take(value: Any, rows: NDArray[np.int64]) -> Any:
    """Return the given rows of an entry, as a view if they are consecutive and the entry's type allows it."""
    if isinstance(value, BatchCandidateSets):
        return value.take(rows)
    if isinstance(value, list | tuple):
        return type(value)(value[i] for i in rows.tolist())
    if len(rows) and (np.diff(rows) == 1).all():
        return value[rows[0] : rows[-1] + 1]
    return value[rows]


def _bits(tensor: torch.Tensor) -> NDArray[Any]:
    """Return the bit patterns of a plain tensor."""
    # `view` would ignore a conjugation or negation that torch has not yet applied to the tensor's memory.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    bits: NDArray[Any] = tensor.view(_BITS[tensor.itemsize]).numpy()
    return bits


def _pad_bits(name: str, dtype: torch.dtype, pad: float) -> int:
    value = torch.tensor(pad, dtype=torch.float64).to(dtype)
    if value.item() != pad:
        raise InvalidInputError(f"{name}: pad {pad} is not a valid {dtype}; the nearest is {value.item()}")
    return int(value.view(_BITS[dtype.itemsize]).item())


def _count_other(bits: NDArray[Any], pad: int) -> int:
    """Return how many elements differ from the pad value."""
    return int(np.count_nonzero(bits if pad == 0 else bits != pad))
