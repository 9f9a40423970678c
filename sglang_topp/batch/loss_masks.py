"""Check loss masks, and store them as int8 arrays for transfers between processes.

A pickled list of ints takes two bytes per token, and one pointer per token once unpickled. An int8 array
takes one byte, and the receiver reads it without a copy.

Shape legend: L tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.candidates.csr_operations import offsets_of
from sglang_topp.errors import InvalidInputError
from sglang_topp.to_numpy import to_host

__all__ = ["mask_rows", "pack_loss_mask", "unpack_loss_masks"]


def pack_loss_mask(mask: Any, *, length: int | None = None) -> NDArray[np.int8]:
    """Return a sample's loss mask as a read-only int8 [L] of zeros and ones.

    Count the ones with `mask.sum()`. Python's built-in `sum` overflows above 127.

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
    arrays = []
    for i, mask in enumerate(to_host(masks)):
        try:
            array = _as_array(mask)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(f"{name}[{i}]: {error}") from None
        if array.ndim != 1 or (array.dtype.kind not in "fiub" and array.size):
            raise InvalidInputError(
                f"{name}[{i}]: got {array.dtype} of shape {array.shape}, expected one 0 or 1 per token"
            )
        arrays.append(array if array.size else np.empty(0, np.int8))
    # Check all masks at once: a check of each would take longer than the conversion.
    flat, offsets = np.concatenate([np.empty(0, np.int8), *arrays]), offsets_of([len(one) for one in arrays])
    if (wrong := np.flatnonzero((flat != 0) & (flat != 1))).size:
        i = int(np.searchsorted(offsets, wrong[0], side="right")) - 1
        at = int(wrong[0] - offsets[i])
        raise InvalidInputError(f"{name}[{i}]: got {arrays[i][at]} at token {at}, expected 0 or 1")
    values = flat.astype(np.int8)
    return [values[start:stop] for start, stop in pairwise(offsets.tolist())]


def _as_array(mask: Any) -> NDArray[Any]:
    if isinstance(mask, list | tuple):
        try:
            return np.frombuffer(bytearray(mask), np.uint8)  # several times as fast as `np.asarray`
        except (TypeError, ValueError):
            pass  # a value is a float, or does not fit a byte
    return np.asarray(mask)
