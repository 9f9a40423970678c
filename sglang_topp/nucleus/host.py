"""From the host to the device without a wait."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["to_device"]


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device; to a GPU without a wait, from memory that it may read by itself."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
