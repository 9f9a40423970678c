"""Numbers as callers hold them, as NumPy arrays; shared by the two rooms that know torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

__all__ = ["to_numpy"]


def to_numpy(values: ArrayLike | torch.Tensor) -> NDArray[Any]:
    """`values` in host memory: a list, an array, or a tensor on any device, with or without grad.

    A bfloat16 tensor comes as float32, which holds every value of it; NumPy has no such dtype.
    """
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach()
    if values.dtype == torch.bfloat16:
        values = values.float()
    array: NDArray[Any] = values.cpu().numpy()
    return array
