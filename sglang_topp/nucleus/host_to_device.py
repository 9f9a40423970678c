"""Copy arrays from the host to a GPU without waiting for the copy."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["to_device"]


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a NumPy array to `device`.

    If `device` is a GPU, the copy is asynchronous and uses pinned memory.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
