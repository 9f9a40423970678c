"""Nested batches: padded fields become values and offsets for the trip to the workers, and come back exactly.

The values of a row are the elements that its mask keeps. An element under a mask of 0 travels too
unless it equals the field's pad value, so the trip loses nothing; a field that may lose what its mask
hides has to say so.

Shape legend: B rows, W columns, n values of a field in all, rest: any further dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sglang_topp.batch.entries import (
    as_bits,
    bits_of,
    count_rows,
    entries_of,
    has_rows,
    is_plain,
    is_tensordict,
    mask_of,
    pad_bits,
    take_rows,
    with_columns,
)
from sglang_topp.batch.layout import Layout
from sglang_topp.batch.narrow import narrowed, widened
from sglang_topp.batch.row_sets import RowSets, cut, row_index
from sglang_topp.errors import InvalidInputError

__all__ = ["Nest", "NestedBatch", "nest_batch", "unnest_batch"]


@dataclass(frozen=True)
class Nest:
    """How one field is compressed.

    Args:
        mask: the name of the [B, W] field whose non-zero elements say which columns to keep.
        pad: what the field holds where nothing is kept.
        droppable: the field may lose what it holds under a mask of 0: it comes back as `pad`.
    """

    mask: str
    pad: float = 0
    droppable: bool = False


@dataclass(frozen=True, eq=False)
class _Field:
    """One tensor as NumPy arrays: they cross a process boundary without a copy, and a cut one alone."""

    values: NDArray[Any]
    dtype: torch.dtype
    layout: int | None
    """Index into the batch's layouts; None for a tensor that stayed dense, with `values` [B, *rest]."""
    pad: int = 0
    """The pad value's bit pattern."""


@dataclass(frozen=True, eq=False)
class NestedBatch:
    """A batch whose padded fields are values and offsets; made by `nest_batch`, undone by `unnest_batch`.

    Immutable, picklable, cut by rows with `batch[a:b]`, `take` and `chunk`. Tensors that were left
    alone are kept as they are, without a copy, and travel without one through pickle protocol 5.

    Attributes:
        num_rows: B.
        dense: the tensors with columns that were not compressed: name to shape, dtype and bytes in words,
            in the whole batch. Those inside an inner TensorDict come as `name.inner`.
        outside: the fields that hold something else than their pad value under a mask of 0: name to the
            number of columns that travel for that reason, in the whole batch. Where that is many and
            nobody needs them, the field is a candidate for `droppable`.
    """

    num_rows: int
    dense: Mapping[str, str]
    outside: Mapping[str, int]
    _keys: tuple[str, ...]
    _fields: Mapping[str, _Field]
    _layouts: tuple[Layout, ...]
    _others: Mapping[str, Any]
    _by_rows: frozenset[str]
    _is_tensordict: bool

    def __len__(self) -> int:
        """Number of rows B."""
        return self.num_rows

    def __repr__(self) -> str:
        stayed = f", dense: {', '.join(self.dense)}" if self.dense else ""
        nested = sum(field.layout is not None for field in self._fields.values())
        return f"NestedBatch({self.num_rows} rows, {nested} nested fields, {self.nbytes} bytes{stayed})"

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, layouts and candidate sets: what a process boundary carries."""
        sets = (other.nbytes for other in self._others.values() if isinstance(other, RowSets))
        return (
            sum(field.values.nbytes for field in self._fields.values())
            + sum(layout.nbytes for layout in self._layouts)
            + sum(sets)
        )

    def __getitem__(self, rows: slice) -> NestedBatch:
        """`batch[a:b]`: a range of rows; the arrays are shared."""
        return self.take(np.arange(self.num_rows)[rows])

    def chunk(self, parts: int) -> list[NestedBatch]:
        """`parts` ranges of rows, in order, whose sizes differ by at most one."""
        if parts < 1:
            raise InvalidInputError(f"parts: got {parts}, expected 1 or more")
        return [self.take(rows) for rows in np.array_split(np.arange(self.num_rows), parts)]

    def take(self, rows: ArrayLike) -> NestedBatch:
        """The rows of these indices, in this order; an index may come more than once.

        Raises:
            InvalidInputError: not integers, or out of range.
        """
        index = row_index(rows, self.num_rows)
        fields = {}
        for name, field in self._fields.items():
            if field.layout is None:
                values = take_rows(field.values, index)
            else:
                values = cut(field.values, self._layouts[field.layout].offsets, index)
            fields[name] = _Field(values, field.dtype, field.layout, field.pad)
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
        """A nested field as a jagged `torch.nested` tensor [B, ragged, *rest].

        Row i holds the values that travel for it, which are all that its mask keeps and, unless the
        field is droppable, whatever else differs from its pad value.

        Raises:
            InvalidInputError: `name` is no nested field.
        """
        field = self._fields.get(name)
        if field is None or field.layout is None:
            nested = [name for name, field in self._fields.items() if field.layout is not None]
            raise InvalidInputError(f"{name}: is not a nested field; there are {', '.join(nested) or 'none'}")
        offsets = torch.from_numpy(self._layouts[field.layout].offsets.copy())
        values = torch.from_numpy(widened(field.values, field.dtype).copy()).view(field.dtype)
        return torch.nested.nested_tensor_from_jagged(values, offsets)


def nest_batch(
    batch: Mapping[str, Any], fields: Mapping[str, str | Nest], *, narrow: bool = True, strict: bool = False
) -> NestedBatch:
    """Compress the padded fields of a batch; `unnest_batch` gives back the same batch to the bit.

    Args:
        batch: names to values: tensors [B, ...] on any device, RowSets, lists, tuples and arrays of B
            entries, or anything else, which is then one value for all rows. A dict or a
            `tensordict.TensorDict`; of the latter's non-tensors, RowSets and those that it stacks have
            rows, and any other is one value for all.
        fields: which CPU tensors [B, W, *rest] to compress, and how: a `Nest`, or just the mask's name.
            All other entries are left as they are.
        narrow: send integers and floats in a narrower dtype where every value survives it.
        strict: raise where a tensor with columns stays dense.

    Raises:
        InvalidInputError: a field or its mask is missing, not a CPU tensor, or of another shape; the pad
            value is none of the field's dtype; tensors differ in B; or, with `strict`, a tensor with two
            or more dimensions is not in `fields` (the message gives its shape, dtype and bytes).
    """
    specs = {name: Nest(spec) if isinstance(spec, str) else spec for name, spec in fields.items()}
    entries = entries_of(batch)
    num_rows = count_rows(entries)
    masks = list(dict.fromkeys(spec.mask for spec in specs.values()))
    layouts = [Layout.of(mask_of(entries, mask)) for mask in masks]
    kept: dict[str, _Field] = {}
    outside: dict[str, int] = {}
    for name, spec in specs.items():
        index = masks.index(spec.mask)
        bits = bits_of(entries, name, layouts[index])
        dtype = entries[name].dtype
        pad = pad_bits(name, dtype, spec.pad)
        # What an integer mask hides in itself is 0 by definition: that look can be saved.
        hides_zeros = name == spec.mask and pad == 0 and not dtype.is_floating_point
        if spec.droppable or hides_zeros:
            values = layouts[index].gather(bits)
        else:
            seen = _NonPads(pad)
            values = layouts[index].gather(bits, seen.add)
            if seen.count != _NonPads(pad).add(values):
                differs = (bits != pad).reshape(*bits.shape[:2], -1).any(axis=2)
                layouts.append(Layout.of(layouts[index].keep() | differs))
                outside[name] = int(layouts[-1].offsets[-1] - layouts[index].offsets[-1])
                index, values = len(layouts) - 1, layouts[-1].gather(bits)
        kept[name] = _Field(narrowed(values, dtype) if narrow else values, dtype, index, pad)

    dense: dict[str, str] = {}
    others: dict[str, Any] = {}
    for name, value in entries.items():
        if name in kept:
            continue
        for path, tensor in with_columns(name, value):
            dense[path] = f"{list(tensor.shape)} {tensor.dtype} {tensor.nbytes} bytes"
        if is_plain(value):
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
    """The batch that was nested, or the rows of it that `nested` still holds.

    Fields come back in their own dtype, shape and order. Padded fields are fresh memory; tensors that
    stayed dense share theirs with `nested` where it is writable.

    Returns:
        dict, or `tensordict.TensorDict` with batch size [B] where that is what was nested.
    """
    out: dict[str, Any] = {}
    for name in nested._keys:
        if name in nested._fields:
            field = nested._fields[name]
            layout = None if field.layout is None else nested._layouts[field.layout]
            out[name] = torch.from_numpy(_padded(field, layout)).view(field.dtype)
        else:
            out[name] = nested._others[name]
    if not nested._is_tensordict:
        return out
    from tensordict import NonTensorData, TensorDict

    batch = TensorDict(batch_size=[len(nested)])
    for name, value in out.items():
        batch[name] = NonTensorData(value, batch_size=[len(nested)]) if isinstance(value, RowSets) else value
    return batch


def _padded(field: _Field, layout: Layout | None) -> NDArray[Any]:
    if layout is None:
        return field.values if field.values.flags.writeable else field.values.copy()
    values = widened(field.values, field.dtype)
    shape = (len(layout), layout.width, *values.shape[1:])
    # Fresh memory is zero already: most of a batch is padding, and this way none of it is written.
    out = np.full(shape, field.pad, values.dtype) if field.pad else np.zeros(shape, values.dtype)
    layout.scatter(values, out)
    return out


class _NonPads:
    """Counts the elements that are not `pad`, a bit pattern."""

    def __init__(self, pad: int) -> None:
        self.pad = pad
        self.count = 0

    def add(self, bits: NDArray[Any]) -> int:
        self.count += int(np.count_nonzero(bits if self.pad == 0 else bits != self.pad))
        return self.count
