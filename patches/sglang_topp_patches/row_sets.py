"""The candidate sets of some rows of a pass, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from sglang_topp_patches.payload import Span, span

__all__ = ["RowSets"]


@dataclass(frozen=True)
class RowSets:
    """The sets of some rows, on one device.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        offsets: int64 [rows + 1].
        problems: rows whose set could not be taken, and why.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    offsets: torch.Tensor
    problems: Mapping[int, str] = field(default_factory=dict)

    def map(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> RowSets:
        """The same sets with every tensor copied; on a GPU the copy may still be under way."""
        return RowSets(
            copy_tensor(self.token_ids), copy_tensor(self.logprobs), copy_tensor(self.offsets), self.problems
        )

    def with_problems(self, problems: Mapping[int, str]) -> RowSets:
        """The same sets, with more rows that are known to be wrong."""
        return replace(self, problems={**self.problems, **problems})

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.offsets) - 1

    def settled(self) -> RowSets:
        """The same: nothing is left to be done."""
        return self

    def on_host(self) -> RowSets:
        """The same; the tensors must be on the host by now."""
        return self

    def spans(self) -> list[Span]:
        """One span per row; the tensors must be on the host by now."""
        token_ids, logprobs = self.token_ids.numpy(), self.logprobs.numpy()
        bounds = self.offsets.tolist()
        return [span(token_ids[low:high], logprobs[low:high]) for low, high in pairwise(bounds)]
