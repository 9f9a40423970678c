"""`NestedBatch`: a batch whose padded fields are stored without padding, for transfers between processes.

Each field has a mask and a pad value. Elements where the mask is not 0 are always sent. Elements where the
mask is 0 are sent only if they differ from the pad value, so that `unnest_batch` restores the padded field
exactly. In a field that is declared `droppable`, elements where the mask is 0 are never sent.

Shape legend: B rows, W columns, n values of one field over all rows, and `rest` for any further dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets, cut, row_index
from sglang_topp.batch.batch_dict_rows import (
    as_bits,
    bits_of,
    count_rows,
    entries_of,
    has_rows,
    is_jagged,
    is_plain,
    is_tensordict,
    jagged_tensor,
    mask_of,
    nbytes_of,
    pad_bits,
    take_rows,
    with_columns,
)
from sglang_topp.batch.compressed_padding_mask import CompressedMask
from sglang_topp.batch.lossless_dtype_narrowing import narrowed, widened
from sglang_topp.errors import InvalidInputError

__all__ = ["NestedBatch", "NestedFieldSpec", "nest_batch", "unnest_batch"]


@dataclass(frozen=True)
class NestedFieldSpec:
    """The options for compressing one field.

    Args:
        mask: the name of the [B, W] field whose non-zero elements mark the columns to keep.
        pad: the field's value in columns that are not kept.
        droppable: whether elements other than `pad` are dropped where the mask is 0. If true, `unnest_batch`
            replaces these elements with `pad`. If false, `unnest_batch` restores these elements exactly.
        columns: the index of the dimension that matches the mask's columns. For example, pass 2 for
            `position_ids` [B, 3, W], which hold three position ids per token.
    """

    mask: str
    pad: float = 0
    droppable: bool = False
    columns: int = 1


@dataclass(frozen=True, eq=False)
class _Field:
    """The values of one tensor as a NumPy array, which pickle protocol 5 transfers without a copy."""

    values: NDArray[Any]
    dtype: torch.dtype
    layout: int | None
    """The index of the field's CompressedMask in `NestedBatch._layouts`. None if the tensor is not
    compressed. The `values` of an uncompressed tensor have the shape [B, *rest]."""
    pad: int = 0
    """The pad value's bit pattern."""
    columns: int = 1
    """The index of the dimension of size W in the padded tensor. `values` [n, *rest] has no dimension of
    size W."""


@dataclass(frozen=True, eq=False)
class NestedBatch:
    """A batch whose padded fields are stored without padding, as kept values and masks.

    `nest_batch` creates a NestedBatch, and `unnest_batch` restores the padded batch. The batch is immutable
    and picklable. `batch[a:b]`, `take`, and `chunk` select rows. `nest_batch` does not copy tensors that it
    does not compress. Pickle protocol 5 transfers these tensors without a copy.

    `dense` and `outside` always describe the whole batch that `nest_batch` received, even after `take`.

    Attributes:
        num_rows: the number of rows B.
        dense: the uncompressed padded tensors with two or more dimensions. Each tensor's name maps to a text
            with the tensor's shape, dtype, and size in bytes. The tensor `b` in an inner TensorDict `a` has
            the name `a.b`.
        outside: the fields that have stray values: values other than `pad` where the mask is 0. Each field's
            name maps to the number of stray values in the field. If a field has more than two dimensions, all
            stray values in the same row and column count as one. To drop the stray values, set `droppable` in
            the field's `NestedFieldSpec`.
    """

    num_rows: int
    dense: Mapping[str, str]
    outside: Mapping[str, int]
    _keys: tuple[str, ...]
    _fields: Mapping[str, _Field]
    _layouts: tuple[CompressedMask, ...]
    _others: Mapping[str, Any]
    _by_rows: frozenset[str]
    _is_tensordict: bool

    def __len__(self) -> int:
        """Return the number of rows B."""
        return self.num_rows

    def __repr__(self) -> str:
        stayed = f", dense: {', '.join(self.dense)}" if self.dense else ""
        nested = sum(field.layout is not None for field in self._fields.values())
        return f"NestedBatch({self.num_rows} rows, {nested} nested fields, {self.nbytes} bytes{stayed})"

    @property
    def nbytes(self) -> int:
        """The total size in bytes of the tensors, masks, and candidate sets that a transfer sends."""
        return (
            sum(field.values.nbytes for field in self._fields.values())
            + sum(layout.nbytes for layout in self._layouts)
            + sum(map(nbytes_of, self._others.values()))
        )

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
        index = row_index(rows, self.num_rows)
        fields = {}
        for name, field in self._fields.items():
            if field.layout is None:
                values = take_rows(field.values, index)
            else:
                values = cut(field.values, self._layouts[field.layout].offsets, index)
            fields[name] = replace(field, values=values)
        others = {
            name: take_rows(other, index) if name in self._by_rows else other
            for name, other in self._others.items()
        }
        layouts = tuple(layout.take(index) for layout in self._layouts)
        return NestedBatch(
            len(index),
            self.dense,
            self.outside,
            self._keys,
            fields,
            layouts,
            others,
            self._by_rows,
            self._is_tensordict,
        )

    def jagged(self, name: str) -> torch.Tensor:
        """Return a field without its padding, as a jagged `torch.nested` tensor `[B, ragged, *rest]`.

        Row i of the result holds the field's values in the columns where the mask is not 0. If the field is
        not `droppable`, row i also keeps each column that holds a value other than the pad value. To turn
        jagged values into a padded tensor again, call `padded`.

        Raises:
            InvalidInputError: `name` is not a field that is stored without padding.
        """
        field, layout = self._nested_field(name)
        values = torch.from_numpy(widened(field.values, field.dtype).copy()).view(field.dtype)
        return jagged_tensor(values, layout.offsets)

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
        _, layout = self._nested_field(like)
        lengths = np.diff(layout.offsets)
        flat = values
        if is_jagged(values):
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
        elif values.ndim < 1 or len(values) != layout.offsets[-1]:
            raise InvalidInputError(
                f"values: got shape {list(values.shape)}, expected {layout.offsets[-1]} values, as {like} has"
            )
        kept = torch.from_numpy(np.flatnonzero(layout.keep())).to(flat.device)
        out = flat.new_zeros(len(layout) * layout.width, *flat.shape[1:])
        return out.index_copy(0, kept, flat).view(len(layout), layout.width, *flat.shape[1:])

    def _nested_field(self, name: str) -> tuple[_Field, CompressedMask]:
        field = self._fields.get(name)
        if field is None or field.layout is None:
            nested = [name for name, field in self._fields.items() if field.layout is not None]
            raise InvalidInputError(f"{name}: is not a nested field; there are {', '.join(nested) or 'none'}")
        return field, self._layouts[field.layout]


def nest_batch(
    batch: Mapping[str, Any],
    fields: Mapping[str, str | NestedFieldSpec],
    *,
    narrow: bool = True,
    strict: bool = False,
) -> NestedBatch:
    """Compress the padded fields of a batch. `unnest_batch` restores the batch bit for bit.

    Args:
        batch: a dict or a `tensordict.TensorDict` that maps names to values. A value has one element per row
            if it is a tensor [B, ...] on any device (padded or jagged), a BatchCandidateSets, or a list,
            tuple, or array of B elements. Values of other types or lengths belong to the batch as a whole. In
            a TensorDict, a `NonTensorStack` has one element per row. The value of a `NonTensorData` belongs
            to the batch as a whole, unless the value is a BatchCandidateSets.
        fields: the padded CPU tensors `[B, W, *rest]` to compress. Each name maps to a `NestedFieldSpec`, or
            to the name of the field's mask. Entries that are not in `fields` are not changed.
        narrow: store integers and floats in a narrower dtype, but only if that dtype holds every value
            exactly. `unnest_batch` restores the field's own dtype.
        strict: raise an error if a padded tensor with two or more dimensions is not in `fields`.

    Raises:
        InvalidInputError: a field or its mask is missing, is not a padded CPU tensor, or has the wrong shape.
            `nest_batch` also raises InvalidInputError if a pad value is not valid in its field's dtype, or if
            tensors differ in their number of rows. With `strict`, a padded tensor with two or more dimensions
            that is not in `fields` is an error. The message gives the shape, dtype, and size of each of these
            tensors.
    """
    specs = {name: NestedFieldSpec(spec) if isinstance(spec, str) else spec for name, spec in fields.items()}
    entries = entries_of(batch)
    num_rows = count_rows(entries)
    masks = list(dict.fromkeys(spec.mask for spec in specs.values()))
    layouts = [CompressedMask.of(mask_of(entries, mask)) for mask in masks]
    kept: dict[str, _Field] = {}
    outside: dict[str, int] = {}
    for name, spec in specs.items():
        index = masks.index(spec.mask)
        bits = bits_of(entries, name, layouts[index], spec.columns)
        dtype = entries[name].dtype
        pad = pad_bits(name, dtype, spec.pad)
        # A field may be its own mask. If such a field holds integers and has the pad value 0, every value
        # outside the mask is equal to the pad value.
        hides_zeros = name == spec.mask and pad == 0 and not dtype.is_floating_point
        if spec.droppable or hides_zeros:
            values = layouts[index].gather(bits)
        else:
            seen = _NonPads(pad)
            values = layouts[index].gather(bits, seen.add)
            if seen.count != _NonPads(pad).add(values):
                differs = (bits != pad).reshape(*bits.shape[:2], -1).any(axis=2)
                layouts.append(CompressedMask.of(layouts[index].keep() | differs))
                outside[name] = int(layouts[-1].offsets[-1] - layouts[index].offsets[-1])
                index, values = len(layouts) - 1, layouts[-1].gather(bits)
        kept[name] = _Field(narrowed(values, dtype) if narrow else values, dtype, index, pad, spec.columns)

    dense: dict[str, str] = {}
    others: dict[str, Any] = {}
    for name, value in entries.items():
        if name in kept:
            continue
        for path, tensor in with_columns(name, value):
            dense[path] = f"{list(tensor.shape)} {tensor.dtype} {tensor.nbytes} bytes"
        if is_plain(name, value):
            kept[name] = _Field(as_bits(value), value.dtype, None)
        else:
            others[name] = value
    if strict and dense:
        listed = "; ".join(f"{name} {words}" for name, words in dense.items())
        raise InvalidInputError(f"fields: these tensors stayed dense, name them or drop them: {listed}")
    return NestedBatch(
        num_rows,
        dense,
        outside,
        tuple(entries),
        kept,
        tuple(layouts),
        others,
        frozenset(name for name, other in others.items() if has_rows(other, num_rows)),
        is_tensordict(batch),
    )


def unnest_batch(nested: NestedBatch) -> Any:
    """Restore the padded batch of the rows that `nested` holds.

    Each field has its original dtype and shape, and the fields have their original order. Compressed fields
    become new tensors. Uncompressed tensors share memory with `nested` if the memory is writable.

    Returns:
        A `tensordict.TensorDict` with batch size [B] if `nest_batch` received a TensorDict, else a dict.
    """
    out: dict[str, Any] = {}
    for name in nested._keys:
        if name in nested._fields:
            field = nested._fields[name]
            layout = None if field.layout is None else nested._layouts[field.layout]
            tensor = torch.from_numpy(_padded(field, layout)).view(field.dtype)
            out[name] = tensor.movedim(1, field.columns).contiguous() if field.columns > 1 else tensor
        else:
            out[name] = nested._others[name]
    if not nested._is_tensordict:
        return out
    from tensordict import NonTensorData, TensorDict

    batch = TensorDict(batch_size=[len(nested)])
    for name, value in out.items():
        batch[name] = (
            NonTensorData(value, batch_size=[len(nested)]) if isinstance(value, BatchCandidateSets) else value
        )
    return batch


def _padded(field: _Field, layout: CompressedMask | None) -> NDArray[Any]:
    if layout is None:
        return field.values if field.values.flags.writeable else field.values.copy()
    values = widened(field.values, field.dtype)
    shape = (len(layout), layout.width, *values.shape[1:])
    # `np.zeros` gets memory that is already zero, so the padding need not be written.
    out = np.full(shape, field.pad, values.dtype) if field.pad else np.zeros(shape, values.dtype)
    layout.scatter(values, out)
    return out


class _NonPads:
    """A counter of the elements whose bits differ from `pad`, the bit pattern of the pad value."""

    def __init__(self, pad: int) -> None:
        self.pad = pad
        self.count = 0

    def add(self, bits: NDArray[Any]) -> int:
        self.count += int(np.count_nonzero(bits if self.pad == 0 else bits != self.pad))
        return self.count
