"""`NestedBatch`: a batch whose padded fields are stored without padding, for transfers between processes.

Each field has a mask and a pad value. Elements where the mask is not 0 are always sent. Elements where the
mask is 0 are sent only if they differ from the pad value, so that `unnest_batch` restores the padded field
exactly. In a field that is declared `droppable`, elements where the mask is 0 are never sent.

Shape legend: B rows, W columns, n values of one field over all rows, and `rest` for any further dimensions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets, cut
from sglang_topp.candidates.csr_operations import indices, offsets_of
from sglang_topp.errors import InvalidInputError

# Elements are compared and copied as bit patterns: -0.0 differs from 0.0, and a NaN equals itself.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class NestedFieldSpec:
    """The options for storing one field without its padding.

    Args:
        mask: the name of the [B, W] field whose non-zero elements mark the columns to keep.
        pad: the field's value in columns that are not kept.
        droppable: whether elements other than `pad` are dropped where the mask is 0. If true, `unnest_batch`
            replaces these elements with `pad`. If false, `unnest_batch` restores these elements exactly.
        columns: the index of the dimension that matches the mask's columns. For example, pass 2 for
            `position_ids` [B, 3, W], which hold three position ids per token. Rows are always dimension 0:
            nest `position_ids.transpose(0, 1)` if they are [3, B, W].
    """

    mask: str
    pad: float = 0
    droppable: bool = False
    columns: int = 1


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
    columns: int


@dataclass(frozen=True, eq=False, repr=False)
class NestedBatch:
    """A batch whose padded fields are stored without padding, as kept values and masks.

    `nest_batch` creates a NestedBatch, and `unnest_batch` restores the padded batch. The batch is immutable
    and picklable. `batch[a:b]`, `take`, and `chunk` select rows. Tensors that are not nested are not copied,
    and pickle protocol 5 transfers them without a copy.

    Attributes:
        num_rows: the number of rows B.
    """

    num_rows: int
    _entries: Mapping[str, Any]
    """Each entry of the batch, in order: a `_Field`, a `_Tensor`, or the value itself."""
    _by_rows: frozenset[str]
    """The values in `_entries` that have one element per row."""
    _is_tensordict: bool

    def __len__(self) -> int:
        """Return the number of rows B."""
        return self.num_rows

    @property
    def nbytes(self) -> int:
        """The total size in bytes of the tensors, masks, and candidate sets that a transfer sends."""
        masks = sum(mask.bits.nbytes + mask.offsets.nbytes for mask in self._masks())
        return masks + sum(map(_nbytes, self._entries.values()))

    def __getitem__(self, rows: slice) -> NestedBatch:
        """Return the rows from a to b - 1 for `batch[a:b]`. The values of padded tensors are not copied."""
        return self.take(np.arange(self.num_rows)[rows])

    def chunk(self, parts: int) -> list[NestedBatch]:
        """Split the rows into `parts` consecutive groups. The groups' sizes differ by at most one row."""
        if parts < 1:
            raise InvalidInputError(f"parts: got {parts}, expected 1 or more")
        return [self.take(rows) for rows in np.array_split(np.arange(self.num_rows), parts)]

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

    def jagged(self, name: str) -> torch.Tensor:
        """Return a field without its padding, as a jagged `torch.nested` tensor `[B, ragged, *rest]`.

        Row i of the result holds the field's values in the columns where the mask is not 0. If the field is
        not `droppable`, row i also keeps each column that holds a value other than the pad value. To turn
        jagged values into a padded tensor again, call `padded`.

        Raises:
            InvalidInputError: `name` is not a field that is stored without padding.
        """
        field = self._field(name)
        return _jagged(torch.from_numpy(field.values.copy()).view(field.dtype), field.mask.offsets)

    def padded(self, values: torch.Tensor, like: str) -> torch.Tensor:
        """Return `values` as a padded tensor, with 0 wherever `jagged(like)` has no value.

        Args:
            values: one new value for each value of `jagged(like)`, on any device: a jagged tensor
                `[B, ragged, *rest]`, or a flat tensor `[n, *rest]`.
            like: the name of a field that is stored without padding. `padded` writes the i-th new value to
                the row and column of the i-th value of `jagged(like)`.

        Returns:
            `[B, W, *rest]` on the device of `values`, and differentiable in `values`. W is the width of the
            whole batch, even if this NestedBatch holds only some of the batch's rows.

        Raises:
            InvalidInputError: `like` is not a field that is stored without padding, or `values` has more or
                fewer values than `jagged(like)`. If one row of a jagged tensor has the wrong length, the
                error message names this row.
        """
        mask, flat = self._field(like).mask, values
        lengths = np.diff(mask.offsets)
        if _is_jagged(values):
            if len(values) != len(lengths) or not isinstance(values.shape[1], torch.SymInt):
                raise InvalidInputError(
                    f"values: got a jagged tensor of shape {list(values.shape)}, expected [{len(lengths)},"
                    " ragged, ...]"
                )
            rows = values.unbind()
            got = np.array([len(row) for row in rows], np.int64)
            if (wrong := np.flatnonzero(got != lengths)).size:
                i = int(wrong[0])
                raise InvalidInputError(
                    f"values[{i}]: got {got[i]} values, expected {lengths[i]}, as in {like}[{i}]"
                )
            flat = torch.cat(rows) if rows else values.values()
        elif values.ndim < 1 or len(values) != mask.offsets[-1]:
            raise InvalidInputError(
                f"values: got shape {list(values.shape)}, expected {mask.offsets[-1]} values, as {like} has"
            )
        kept = torch.from_numpy(mask.kept()).to(flat.device)
        out = flat.new_zeros(len(lengths) * mask.width, *flat.shape[1:])
        return out.index_copy(0, kept, flat).view(len(lengths), mask.width, *flat.shape[1:])

    def _fields(self) -> dict[str, _Field]:
        return {name: entry for name, entry in self._entries.items() if isinstance(entry, _Field)}

    def _masks(self) -> set[_Mask]:
        return {field.mask for field in self._fields().values()}

    def _field(self, name: str) -> _Field:
        if name not in (fields := self._fields()):
            raise InvalidInputError(f"{name}: is not a nested field; there are {', '.join(fields) or 'none'}")
        return fields[name]


def nest_batch(
    batch: Mapping[str, Any], fields: Mapping[str, str | NestedFieldSpec], *, strict: bool = False
) -> NestedBatch:
    """Remove the padding of a batch's fields. `unnest_batch` restores the batch bit for bit.

    Args:
        batch: a dict or a `tensordict.TensorDict` that maps names to values. A value has one element per row
            if it is a tensor [B, ...] on any device (padded or jagged), a BatchCandidateSets, or a list,
            tuple, or array of B elements. Values of other types or lengths belong to the batch as a whole. In
            a TensorDict, a `NonTensorStack` has one element per row. The value of a `NonTensorData` belongs
            to the batch as a whole, unless the value is a BatchCandidateSets.
        fields: the padded CPU tensors `[B, W, *rest]` to nest. Each name maps to a `NestedFieldSpec`, or
            to the name of the field's mask. Entries that are not in `fields` are not changed.
        strict: raise an error if a padded tensor with two or more dimensions is not in `fields`.

    Raises:
        InvalidInputError: a field or its mask is missing, is not a padded CPU tensor, or has the wrong shape.
            `nest_batch` also raises InvalidInputError if a pad value is not valid in its field's dtype, or if
            tensors differ in their number of rows. With `strict`, a padded tensor with two or more dimensions
            that is not in `fields` is an error. The message gives the shape, dtype, and size of each of these
            tensors.
    """
    entries = _entries_of(batch)
    sizes = {name: size for name, value in entries.items() if (size := _num_rows(name, value)) is not None}
    if not sizes:
        raise InvalidInputError("batch: got no tensors with rows")
    first, num_rows = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != num_rows:
            raise InvalidInputError(f"{name}: got {size} rows, expected {num_rows}, as in {first}")
    masks: dict[str, tuple[NDArray[np.bool_], _Mask, NDArray[np.int64]]] = {}
    whole = dict(entries)
    for name, given in fields.items():
        spec = NestedFieldSpec(given) if isinstance(given, str) else given
        if spec.mask not in masks:
            masks[spec.mask] = (keep := _mask_of(entries, spec.mask), *_Mask.of(keep))
        keep, mask, index = masks[spec.mask]
        tensor = _padded_field(entries, name)
        bits, pad = _bits_by_column(name, tensor, mask.width, spec.columns), _pad_bits(name, tensor, spec.pad)
        flat = bits.reshape(keep.size, *bits.shape[2:])
        values = flat[index]
        # An integer mask is 0 wherever it keeps nothing.
        is_own_mask = name == spec.mask and pad == 0 and not tensor.dtype.is_floating_point
        if not (spec.droppable or is_own_mask) and _count_other(bits, pad) != _count_other(values, pad):
            keep = keep | (bits != pad).reshape(*bits.shape[:2], -1).any(axis=2)
            mask, index = _Mask.of(keep)
            values = flat[index]
        whole[name] = _Field(values, tensor.dtype, mask, pad, spec.columns)
    others = {name: value for name, value in entries.items() if name not in fields}
    if strict and (
        dense := [words for name, value in others.items() for words in _with_columns(name, value)]
    ):
        raise InvalidInputError(
            f"fields: these tensors stayed dense, name them or drop them: {'; '.join(dense)}"
        )
    whole |= {name: _Tensor(_as_bits(one), one.dtype) for name, one in others.items() if _is_plain(one)}
    by_rows = frozenset(
        name for name, value in entries.items() if name in sizes or _has_rows(value, num_rows)
    )
    return NestedBatch(num_rows, whole, by_rows, _is_tensordict(batch))


def unnest_batch(nested: NestedBatch) -> Any:
    """Restore the padded batch of the rows that `nested` holds.

    Each field has its original dtype and shape, and the fields have their original order. Nested fields
    become new tensors. Other tensors share memory with `nested` if the memory is writable.

    Returns:
        A `tensordict.TensorDict` with batch size [B] if `nest_batch` received a TensorDict, else a dict.
    """
    kept = {mask: mask.kept() for mask in nested._masks()}

    def restored(entry: Any) -> Any:
        if not isinstance(entry, _Tensor):
            return entry
        if not isinstance(entry, _Field):
            array = entry.values if entry.values.flags.writeable else entry.values.copy()
            return torch.from_numpy(array).view(entry.dtype)
        mask = entry.mask
        rest = entry.values.shape[1:]
        # `np.zeros` gets memory that is already zero, so the padding need not be written.
        flat = np.zeros((nested.num_rows * mask.width, *rest), entry.values.dtype)
        if entry.pad:
            flat.fill(entry.pad)
        flat[kept[mask]] = entry.values
        array = flat.reshape(nested.num_rows, mask.width, *rest)
        return torch.from_numpy(array).view(entry.dtype).movedim(1, entry.columns).contiguous()

    out = {name: restored(entry) for name, entry in nested._entries.items()}
    if not nested._is_tensordict:
        return out
    from tensordict import TensorDict

    batch = TensorDict(batch_size=[len(nested)])
    for name, value in out.items():
        if isinstance(value, BatchCandidateSets):
            batch.set_non_tensor(name, value)
        else:
            batch[name] = value
    return batch


# -- the entries of a batch ---------------------------------------------------------------------------------


def _entries_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `batch` as a dict, with a BatchCandidateSets in place of its `NonTensorData`."""
    entries = {name: batch.get(name) for name in batch.keys()}  # noqa: SIM118  a TensorDict iterates over rows
    for name, value in entries.items():
        if isinstance(sets := getattr(value, "data", None), BatchCandidateSets):
            entries[name] = sets
    return entries


def _is_tensordict(value: Any) -> bool:
    # A caller that has a TensorDict has already imported tensordict, so this function need not import it.
    module = sys.modules.get("tensordict")
    return module is not None and bool(module.is_tensor_collection(value))


def _num_rows(name: str, value: Any) -> int | None:
    """Return the number of rows of candidate sets or of a tensor, or None for other values.

    Raises:
        InvalidInputError: `value` is a tensor that cannot be cut by rows, such as a sparse tensor.
    """
    if isinstance(value, BatchCandidateSets) or _is_jagged(value):
        return len(value)
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return None
    if value.is_nested or value.layout != torch.strided:
        kind = "nested tensor" if value.is_nested else "tensor"
        raise InvalidInputError(
            f"{name}: got a {kind} of layout {value.layout}, which cannot be cut by rows; expected a padded"
            " tensor, or a nested one with layout=torch.jagged"
        )
    return len(value)


def _is_jagged(value: Any) -> bool:
    """Return whether `value` is a `torch.nested` tensor with `layout=torch.jagged`, on any device."""
    return isinstance(value, torch.Tensor) and value.layout == torch.jagged


def _is_plain(value: Any) -> bool:
    """Return whether `value` is a padded CPU tensor that NumPy can view."""
    if not isinstance(value, torch.Tensor) or _is_jagged(value):
        return False
    return value.ndim > 0 and value.device.type == "cpu" and value.itemsize in _BITS


def _with_columns(name: str, value: Any) -> Iterator[str]:
    """Describe each padded tensor [B, W, ...] in the batch entry `value`."""
    if isinstance(value, torch.Tensor):
        if value.ndim > 1 and not _is_jagged(value):
            yield f"{name} {list(value.shape)} {value.dtype} {value.nbytes} bytes"
    elif _is_tensordict(value):
        for inner, part in value.items():
            yield from _with_columns(f"{name}.{inner}", part)


def _has_rows(value: Any, num_rows: int) -> bool:
    """Return whether a value other than those of `_num_rows` has one element per row."""
    # `type(value) is tuple` excludes named tuples, which hold fields instead of rows.
    is_sequence = isinstance(value, list | np.ndarray) or type(value) is tuple or _is_tensordict(value)
    return is_sequence and getattr(value, "ndim", 1) > 0 and len(value) == num_rows


def _take(value: Any, rows: NDArray[np.int64]) -> Any:
    """Return the given rows of an entry, as a view if they are consecutive and the entry's type allows it."""
    if isinstance(value, BatchCandidateSets):
        return value.take(rows)
    if isinstance(value, list | tuple):
        return type(value)(value[i] for i in rows.tolist())
    if _is_jagged(value):
        ragged = next(dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt))
        held = value.unbind()
        parts = [held[i] for i in rows.tolist()]
        values = torch.cat(parts, ragged - 1) if parts else value.values().narrow(ragged - 1, 0, 0)
        return _jagged(values, offsets_of([part.shape[ragged - 1] for part in parts]), ragged)
    if len(rows) and (np.diff(rows) == 1).all():
        return value[rows[0] : rows[-1] + 1]
    return value[rows]


def _jagged(values: torch.Tensor, offsets: NDArray[np.int64], ragged: int = 1) -> torch.Tensor:
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


def _nbytes(entry: Any) -> int:
    if isinstance(entry, _Tensor):
        return entry.values.nbytes
    if isinstance(entry, BatchCandidateSets):
        return entry.nbytes
    return int(entry.values().nbytes + entry.offsets().nbytes) if _is_jagged(entry) else 0


# -- bit patterns -------------------------------------------------------------------------------------------


def _padded_field(entries: Mapping[str, Any], name: str) -> torch.Tensor:
    if name not in entries:
        raise InvalidInputError(f"{name}: is not in the batch; there are {', '.join(entries)}")
    value = entries[name]
    if not _is_plain(value) or value.ndim < 2:
        is_tensor = isinstance(value, torch.Tensor)
        got = f"{value.dtype} {list(value.shape)} on {value.device}" if is_tensor else type(value)
        raise InvalidInputError(f"{name}: got {got}, expected a padded CPU tensor of two or more dimensions")
    tensor: torch.Tensor = value
    return tensor


def _mask_of(entries: Mapping[str, Any], name: str) -> NDArray[np.bool_]:
    """Return the mask `name` as bool [B, W]."""
    mask = _padded_field(entries, name)
    if mask.ndim != 2:
        raise InvalidInputError(f"{name}: got shape {list(mask.shape)}, expected a mask [rows, columns]")
    keep: NDArray[np.bool_] = (mask != 0).numpy()
    return keep


def _bits_by_column(name: str, tensor: torch.Tensor, mask_width: int, columns: int) -> NDArray[Any]:
    """Return the bit patterns of a field as [B, W, *rest], with dimension `columns` moved to index 1."""
    if not 1 <= columns < tensor.ndim:
        raise InvalidInputError(
            f"{name}: got columns={columns}, expected a dimension from 1 to {tensor.ndim - 1}"
        )
    if (width := tensor.shape[columns]) != mask_width:
        raise InvalidInputError(
            f"{name}: got {width} columns, expected {mask_width}, as its mask has; see its spec's `columns`"
        )
    return np.ascontiguousarray(np.moveaxis(_as_bits(tensor), columns, 1))


def _as_bits(tensor: torch.Tensor) -> NDArray[Any]:
    # `view` would ignore a conjugation or negation that torch has not yet applied to the tensor's memory.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    bits: NDArray[Any] = tensor.view(_BITS[tensor.itemsize]).numpy()
    return bits


def _pad_bits(name: str, tensor: torch.Tensor, pad: float) -> int:
    dtype = tensor.dtype
    try:
        value = torch.tensor(pad, dtype=dtype)
    except (RuntimeError, OverflowError, TypeError, ValueError) as error:
        raise InvalidInputError(f"{name}: pad {pad} is not a valid {dtype}: {error}") from None
    overflows = dtype.is_floating_point and math.isinf(value.item()) and not math.isinf(pad)
    if overflows or (not dtype.is_floating_point and value.item() != pad):
        raise InvalidInputError(f"{name}: pad {pad} is not a valid {dtype}; the nearest is {value.item()}")
    return int(value.view(_BITS[dtype.itemsize]).item())


def _count_other(bits: NDArray[Any], pad: int) -> int:
    """Return how many elements differ from the pad value."""
    return int(np.count_nonzero(bits if pad == 0 else bits != pad))
