"""Copy many tensors to NumPy arrays in host memory, with one transfer per device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_topp.to_numpy import to_numpy

__all__ = ["to_host"]


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
