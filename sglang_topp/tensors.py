"""Candidate sets as tensors. Needs torch (`pip install sglang-topp[torch]`).

Shape legend: T positions, n candidates in all.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_topp.candidates import CandidateSets

__all__ = ["CandidateTensors", "to_torch"]


class CandidateTensors(NamedTuple):
    """The arrays of `CandidateSets` on one device: parts of one block of memory, which may be written to."""

    token_ids: Tensor
    """int32 [n]: the candidates' ids, position after position."""
    logprobs: Tensor | None
    """float32 [n]: their natural log-probs; None where they are not known."""
    offsets: Tensor
    """int64 [T + 1]: where each position's candidates begin."""
    sampled_ids: Tensor
    """int32 [T]: the sampled tokens."""


def to_torch(sets: CandidateSets, device: torch.device | str | int | None = None) -> CandidateTensors:
    """A copy of the sets on `device`; see `CandidateSets.to_torch`."""
    where = torch.empty(0, device=device).device
    # The offsets first: each begins at a multiple of its own size.
    arrays: list[NDArray[Any]] = [sets.offsets, sets.token_ids, sets.sampled_ids]
    if sets.has_logprobs:
        arrays.append(sets.logprobs)
    bounds = np.cumsum([0, *(array.nbytes for array in arrays)]).tolist()
    block = torch.empty(bounds[-1], dtype=torch.uint8, device="cpu", pin_memory=where.type == "cuda")
    in_host = block.numpy()
    for array, (start, stop) in zip(arrays, pairwise(bounds), strict=True):
        in_host[start:stop] = np.ascontiguousarray(array).view(np.uint8)
    # The allocator of pinned memory keeps the block until the copy is over.
    block = block.to(where, non_blocking=True)
    offsets, *others = (block[start:stop] for start, stop in pairwise(bounds))
    token_ids, sampled_ids = (part.view(torch.int32) for part in others[:2])
    logprobs = others[2].view(torch.float32) if sets.has_logprobs else None
    return CandidateTensors(token_ids, logprobs, offsets.view(torch.int64), sampled_ids)
