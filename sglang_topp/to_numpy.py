"""Convert lists, arrays, and tensors to NumPy arrays, for `sglang_topp.batch` and `sglang_topp.replay`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

__all__ = ["to_numpy"]


def to_numpy(values: ArrayLike | torch.Tensor) -> NDArray[Any]:
    """Return `values` as a NumPy array in host memory.

    `values` is a list, an array, or a tensor on any device. A tensor may require gradients. NumPy has no
    bfloat16, so a bfloat16 tensor becomes a float32 array. This conversion from bfloat16 to float32 is exact.
    """
    if not isinstance(values, torch.Tensor):
        return np.asarray(values)
    values = values.detach()
    if values.dtype == torch.bfloat16:
        values = values.float()
    array: NDArray[Any] = values.cpu().numpy()
    return array
