"""ExtractedSets: the complete candidate sets of a batch's rows, as flat tensors on the device or the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp_patches.set_buffer import PackedSet, pack_set

__all__ = ["ExtractedSets"]


@dataclass(frozen=True)
class ExtractedSets:
    """The complete sets of some rows of a batch, on one device; n is the number of candidates in all sets.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        offsets: int64 [rows + 1], the index in `token_ids` at which each row's set starts, and n at the end.
        problems: maps the index of a row to the reason why the row has no exact set.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    offsets: torch.Tensor
    problems: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """The number of rows, including the rows that have no set."""
        return len(self.offsets) - 1

    def map(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> ExtractedSets:
        """Return a copy of this object with `copy_tensor` applied to every tensor.

        If `copy_tensor` is asynchronous, its copies may still run when this method returns.
        """
        return ExtractedSets(
            copy_tensor(self.token_ids), copy_tensor(self.logprobs), copy_tensor(self.offsets), self.problems
        )

    def with_problems(self, problems: Mapping[int, str]) -> ExtractedSets:
        """Return a copy of this object with the given problems added to its `problems`."""
        return replace(self, problems={**self.problems, **problems})

    def settled(self) -> ExtractedSets:
        """Return this object, because the sets of an `ExtractedSets` are always complete."""
        return self

    def on_host(self) -> ExtractedSets:
        """Return this object, whose tensors must already be on the host."""
        return self

    def contains(self, tokens: Sequence[int]) -> NDArray[np.bool_]:
        """Return whether each row's set contains the row's token. The tensors must already be on the host."""
        ids, offsets = self.token_ids.numpy(), self.offsets.numpy()
        wanted = np.full(self.num_rows, -1, np.int64)
        wanted[: len(tokens)] = tokens[: self.num_rows]
        hits = np.flatnonzero(ids == wanted.repeat(np.diff(offsets)))
        found = np.zeros(self.num_rows, np.bool_)
        found[np.searchsorted(offsets, hits, "right") - 1] = True
        return found

    def packed_sets(self) -> list[PackedSet]:
        """Return each row's set as a `PackedSet`. The tensors of this object must already be on the host."""
        token_ids, logprobs = self.token_ids.numpy(), self.logprobs.numpy()
        bounds = self.offsets.tolist()
        return [pack_set(token_ids[low:high], logprobs[low:high]) for low, high in pairwise(bounds)]
