"""Convert lists, arrays, and tensors to NumPy arrays, for `sglang_topp.batch` and `sglang_topp.replay`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

__all__ = ["to_host", "to_numpy"]


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


def to_host(rows: Sequence[Any]) -> Sequence[Any]:
    """Convert each tensor in `rows` to a NumPy array. Tensors of one device and dtype share a transfer."""
    if not any(isinstance(row, torch.Tensor) for row in rows):
        return rows
    out = list(rows)
    away: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, row in enumerate(out):
        if isinstance(row, torch.Tensor):
            if row.device.type == "cpu":
                out[i] = to_numpy(row)
            else:
                away.setdefault((row.device, row.dtype), []).append(i)
    for indices in away.values():
        # Copy all tensors of one device and dtype in one transfer, because every transfer makes the host
        # wait for the device.
        flat = to_numpy(torch.cat([out[i].detach().reshape(-1) for i in indices]))
        ends = np.cumsum([out[i].numel() for i in indices])
        for i, part in zip(indices, np.split(flat, ends[:-1]), strict=True):
            out[i] = part.reshape(out[i].shape)
    return out
