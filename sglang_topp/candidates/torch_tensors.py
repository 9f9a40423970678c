"""Convert between NumPy arrays and torch tensors. Needs torch (`pip install sglang-topp[torch]`).

Shape legend: T positions, n candidates in all.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


@dataclass(frozen=True, eq=False)
class CandidateTensors:
    """The arrays of `CandidateSets` as tensors on one device. `CandidateSets.to_torch` creates them.

    `sglang_topp.replay` scores over these tensors without copying them again. The first scoring call also
    stores index tensors in this object, about 60 bytes per candidate. After the first scoring call, do not
    change the other tensors in place, because the index tensors depend on them.
    """

    token_ids: Tensor
    """int32 [n]: the candidates' ids, position after position."""
    logprobs: Tensor | None
    """float32 [n]: the candidates' natural log-probs, or None if the sets have none."""
    offsets: Tensor
    """int64 [T + 1]: the candidates of position `t` are at `offsets[t]:offsets[t + 1]`."""
    sampled_ids: Tensor
    """int32 [T]: the sampled tokens."""
    _index_cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        """Return the number of positions T."""
        return len(self.sampled_ids)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.token_ids.device

    def __reduce__(self) -> tuple[object, ...]:
        # Do not pickle `_index_cache`, because the process that unpickles the tensors can compute the index
        # tensors again.
        return CandidateTensors, (self.token_ids, self.logprobs, self.offsets, self.sampled_ids)


def to_torch(
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32] | None,
    offsets: NDArray[np.int64],
    sampled_ids: NDArray[np.int32],
    *,
    device: torch.device | str | int | None = None,
) -> CandidateTensors:
    """Copy the arrays of candidate sets to `device`; see `CandidateSets.to_torch`."""
    # The int64 offsets come first, so that each array begins at a multiple of its own item size.
    arrays: list[NDArray[Any]] = [offsets, token_ids, sampled_ids]
    if logprobs is not None:
        arrays.append(logprobs)
    block = np.concatenate([np.ascontiguousarray(array).view(np.uint8) for array in arrays])
    parts = torch.split(
        to_device(block, torch.empty(0, device=device).device), [array.nbytes for array in arrays]
    )
    return CandidateTensors(
        parts[1].view(torch.int32),
        None if logprobs is None else parts[3].view(torch.float32),
        parts[0].view(torch.int64),
        parts[2].view(torch.int32),
    )


def share(array: NDArray[Any]) -> Tensor:
    """Return an array as a CPU tensor, in the same memory if torch can use it: it must not be written to."""
    suppress_warnings()
    return torch.from_numpy(np.require(array, requirements=["C", "A"]))


@functools.cache
def suppress_warnings() -> None:
    """Trigger and suppress torch's warnings about read-only arrays and about sparse CSR tensors.

    Torch gives each warning once per process. `catch_warnings` is not thread-safe, so this function is cached
    and runs only once.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(np.frombuffer(bytes(1), np.uint8))
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1), dtype=torch.float32, check_invariants=False)


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to `device`. If it is a GPU, the copy is asynchronous, from pinned memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def to_numpy(values: ArrayLike | Tensor) -> NDArray[Any]:
    """Return a list, an array, or a tensor on any device, with or without grad, as an array in host memory.

    NumPy has no bfloat16, so a bfloat16 tensor becomes a float32 array, exactly.
    """
    if not isinstance(values, Tensor):
        return np.asarray(values)
    values = values.detach()
    if values.dtype == torch.bfloat16:
        values = values.float()
    array: NDArray[Any] = values.cpu().numpy()
    return array
