"""Convert arrays to the narrowest dtype that holds every value exactly, and back.

With `narrow=True`, `nest_batch` narrows the fields of a batch, and `unnest_batch` widens them again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["narrowed", "widened"]

_INTEGERS = (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32)
_FLOATS: dict[torch.dtype, tuple[type[np.floating[Any]], tuple[type[np.floating[Any]], ...]]] = {
    torch.float32: (np.float32, (np.float16,)),
    torch.float64: (np.float64, (np.float16, np.float32)),
}
# `narrowed` tests this many values before it tests all values, because most float arrays cannot be narrowed.
_SAMPLE = 4096


def narrowed(bits: NDArray[Any], dtype: torch.dtype) -> NDArray[Any]:
    """Convert an array to a narrower dtype that holds every value exactly, or return `bits` if none does.

    Args:
        bits: the bit patterns of the array's elements, as signed integers.
        dtype: the array's dtype. Only arrays of float32, float64, and integer dtypes are converted. An array
            of unsigned integers is converted like the signed integers in `bits`.
    """
    if not bits.size:
        return bits
    if dtype in _FLOATS:
        wide, candidates = _FLOATS[dtype]
        values = bits.view(wide)
        for candidate in candidates:
            if _survives(values.reshape(-1)[:_SAMPLE], candidate) and _survives(values, candidate):
                return values.astype(candidate)
        return bits
    if _is_integer(dtype):
        low, high = bits.min(), bits.max()
        for integer in _INTEGERS:
            limits = np.iinfo(integer)
            if limits.bits < 8 * bits.itemsize and limits.min <= low and high <= limits.max:
                return bits.astype(integer)
    return bits


def widened(values: NDArray[Any], dtype: torch.dtype) -> NDArray[Any]:
    """Undo `narrowed`, and return the bit patterns that `narrowed` received.

    Args:
        values: the result of `narrowed`.
        dtype: the same dtype as in the call of `narrowed`.
    """
    if dtype in _FLOATS and values.dtype.kind == "f":
        return values.astype(_FLOATS[dtype][0]).view(f"i{dtype.itemsize}")
    if _is_integer(dtype):
        return values.astype(f"i{dtype.itemsize}", copy=False)
    return values


def _survives(values: NDArray[Any], candidate: type[np.floating[Any]]) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        back = values.astype(candidate).astype(values.dtype)
    integers = f"i{values.itemsize}"
    return np.array_equal(back.view(integers), values.view(integers))


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
