"""Encode loss masks for transfers between processes, with one bit or one byte per token.

A pickled list of ints costs two bytes per token. In the receiving process, the unpickled list costs one
pointer per token. A mask of bits costs one bit per token. An int8 mask costs one byte per token, and the
receiver reads it without a copy.

Shape legend: L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.batch.tensors_to_numpy import to_host
from sglang_topp.errors import InvalidInputError

__all__ = ["PackedLossMask", "mask_rows", "pack_loss_mask", "unpack_loss_masks"]

# Bit k of byte b, counted from the lowest bit, holds the mask of token 8 * b + k.
_BIT_ORDER: Literal["little"] = "little"


@dataclass(frozen=True, eq=False)
class PackedLossMask:
    """The immutable loss mask of one sample, in compact form. `pack_loss_mask` creates it.

    Args:
        data: uint8 [ceil(L / 8)] with one bit per token, or int8 [L] with one byte per token. In a uint8
            array, token t is bit `t % 8` of byte `t // 8`, and the unused bits are 0.
        length: the number of tokens L.

    `len` and iteration behave as for a list of ints, so Python's built-in `sum` counts the ones correctly. In
    contrast, the built-in `sum` of a plain int8 array, such as the result of `to_numpy`, overflows above 127
    with NumPy 2.
    """

    data: NDArray[np.uint8] | NDArray[np.int8]
    length: int

    def __post_init__(self) -> None:
        bits = self.data.dtype == np.uint8
        size = -(-self.length // 8) if bits else self.length
        if self.data.shape != (size,) or not (bits or self.data.dtype == np.int8):
            raise InvalidInputError(
                f"data: got {self.data.dtype} of shape {self.data.shape} for {self.length} tokens,"
                f" expected uint8 [{-(-self.length // 8)}] or int8 [{self.length}]"
            )
        if not bits and self.data.view(np.uint8).max(initial=0) > 1:
            raise InvalidInputError("data: an int8 is neither 0 nor 1")
        if bits and self.length % 8 and self.data[-1] >> (self.length % 8):
            raise InvalidInputError(f"data: bits are set after the last of {self.length} tokens")

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self.to_numpy().tolist())

    def __eq__(self, other: object) -> bool:
        """Return whether two masks hold equal values, even if one stores bits and the other stores bytes."""
        if not isinstance(other, PackedLossMask):
            return NotImplemented
        return np.array_equal(self.to_numpy(), other.to_numpy())

    __hash__ = None  # type: ignore[assignment]  # hashing would have to read the whole array

    @property
    def nbytes(self) -> int:
        """The size of `data` in bytes."""
        return self.data.nbytes

    def sum(self) -> int:
        """Return the number of tokens whose mask is 1, as a Python int that cannot overflow."""
        if self.data.dtype == np.int8:
            return int(np.count_nonzero(self.data))
        return int.from_bytes(self.data.tobytes(), "little").bit_count()

    def to_numpy(self) -> NDArray[np.int8]:
        """Return the mask as int8 [L] of zeros and ones.

        If `data` is int8, the array is a view of `data`. To count the ones, call `self.sum`.
        """
        if self.data.dtype == np.int8:
            return self.data.view(np.int8)
        bits = self.data.view(np.uint8)
        return np.unpackbits(bits, count=self.length, bitorder=_BIT_ORDER).view(np.int8)

    def to_tensor(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return the mask as `dtype` [L] on `device`.

        The function sends only `data` to the device, and the device unpacks the bits.
        """
        return unpack_loss_masks([self], device, dtype)[0]


def pack_loss_mask(
    mask: Any, *, form: Literal["bits", "int8"] = "bits", length: int | None = None
) -> PackedLossMask:
    """Pack the loss mask of one sample. The input is copied and not modified.

    Args:
        mask: a list of L ints or bools, an array [L], or a tensor [L] on any device. Each value in `mask` is
            0 or 1.
        form: `bits` stores the mask in ceil(L / 8) bytes. `int8` stores the mask in L bytes, which the
            receiving process reads without a copy.
        length: the expected L, such as the response's length, or None to accept any length.

    Raises:
        InvalidInputError: `mask` has a value other than 0 and 1, has the wrong length, or is not 1-D; or
            `form` is neither `bits` nor `int8`.
    """
    (values,) = mask_rows("loss mask", [mask])
    if length is not None and len(values) != length:
        raise InvalidInputError(f"loss mask: got {len(values)} values, expected {length}")
    if form == "bits":
        return PackedLossMask(_frozen(np.packbits(values, bitorder=_BIT_ORDER)), len(values))
    if form == "int8":
        return PackedLossMask(_frozen(values.view(np.int8).copy()), len(values))
    raise InvalidInputError(f"form: got {form!r}, expected 'bits' or 'int8'")


def unpack_loss_masks(
    masks: Sequence[PackedLossMask], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """Unpack the masks of many samples on a device. Mask i is `dtype` [L_i], a view of one shared buffer.

    The function sends the packed bytes of all masks in one transfer, and the device unpacks the bits.
    """
    if not masks:
        return []
    if all(mask.data.dtype == np.int8 for mask in masks):
        flat = torch.from_numpy(np.concatenate([mask.data for mask in masks])).to(device)
        return list(torch.split(flat.to(dtype), [len(mask) for mask in masks]))
    parts = [
        mask.data if mask.data.dtype == np.uint8 else np.packbits(mask.data, bitorder=_BIT_ORDER)
        for mask in masks
    ]
    packed = torch.from_numpy(np.concatenate(parts)).to(device)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    flat = ((packed[:, None] >> shifts) & 1).to(dtype).view(-1)
    # Every sample starts at a byte boundary, so each sample's mask is a slice of the unpacked bits.
    ends = np.cumsum([8 * len(part) for part in parts]).tolist()
    return [
        flat[end - 8 * len(part) :][: len(mask)] for end, part, mask in zip(ends, parts, masks, strict=True)
    ]


def mask_rows(name: str, masks: Sequence[Any]) -> list[NDArray[np.uint8]]:
    """Return every sample's mask as uint8 [L_i] of zeros and ones, as a view if the dtype allows it.

    Raises:
        InvalidInputError: a value is not 0 or 1, or a mask is not 1-D. The message names the sample.
    """
    out, masks = [], to_host(masks)
    for i, mask in enumerate(masks):
        try:
            out.append(_bytes(mask))
        except InvalidInputError as error:
            raise InvalidInputError(f"{name}[{i}]: {error}") from None
    # Check all masks in one NumPy call. With one call per mask, the checks would take longer than converting
    # the masks with `_bytes`.
    if out and np.concatenate(out).max(initial=0) > 1:
        for i, values in enumerate(out):
            if (wrong := np.flatnonzero(values > 1)).size:
                got = np.asarray(masks[i])[wrong[0]]
                raise InvalidInputError(f"{name}[{i}]: got {got} at token {wrong[0]}, expected 0 or 1")
    return out


def _bytes(mask: Any) -> NDArray[np.uint8]:
    """Return the mask as uint8 [L].

    The result may contain numbers above 1. `mask_rows`, the caller of this function, rejects these numbers.
    The function raises InvalidInputError if the mask is not 1-D, or if a value such as 0.5 does not fit
    uint8.
    """
    if isinstance(mask, PackedLossMask):
        return mask.to_numpy().view(np.uint8)
    if isinstance(mask, list | tuple):
        try:
            return np.frombuffer(bytearray(mask), np.uint8)
        except (TypeError, ValueError):
            pass  # the mask holds a float, or an int outside 0 to 255: the code below checks every value
    try:
        array = np.asarray(mask)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(str(error)) from None
    if array.ndim != 1 or (array.dtype.kind not in "fiub" and array.size):
        raise InvalidInputError(f"got {array.dtype} of shape {array.shape}, expected one 0 or 1 per token")
    if array.dtype.itemsize == 1:
        return array.view(np.uint8)
    with np.errstate(invalid="ignore"):
        values = array.astype(np.uint8)
    if (wrong := np.flatnonzero(array != values)).size:
        raise InvalidInputError(f"got {array[wrong[0]]} at token {wrong[0]}, expected 0 or 1")
    return values


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array
