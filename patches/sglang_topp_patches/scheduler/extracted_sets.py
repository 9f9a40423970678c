"""ExtractedSets: the complete candidate sets of a pass's rows, as flat tensors on the device or the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from sglang_topp_patches.scheduler_messages import Span, span

__all__ = ["ExtractedSets"]


@dataclass(frozen=True)
class ExtractedSets:
    """The complete sets of some rows, on one device; n is the number of candidates in all sets.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n].
        offsets: int64 [rows + 1], the start of each row's set. The last element is n.
        problems: maps the index of each row without an exact set to a sentence that gives the reason.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    offsets: torch.Tensor
    problems: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """The number of rows, with or without a set."""
        return len(self.offsets) - 1

    def map(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> ExtractedSets:
        """Return the sets with `copy_tensor` applied to every tensor.

        If `copy_tensor` is asynchronous, its copies may still run when this method returns.
        """
        return ExtractedSets(
            copy_tensor(self.token_ids), copy_tensor(self.logprobs), copy_tensor(self.offsets), self.problems
        )

    def with_problems(self, problems: Mapping[int, str]) -> ExtractedSets:
        """Return the same sets, with more rows marked as having no exact set."""
        return replace(self, problems={**self.problems, **problems})

    def settled(self) -> ExtractedSets:
        """Return this object, because its sets are always complete."""
        return self

    def on_host(self) -> ExtractedSets:
        """Return this object. The object's tensors must already be on the host."""
        return self

    def spans(self) -> list[Span]:
        """Return each row's set as a `Span`. The tensors must already be on the host."""
        token_ids, logprobs = self.token_ids.numpy(), self.logprobs.numpy()
        bounds = self.offsets.tolist()
        return [span(token_ids[low:high], logprobs[low:high]) for low, high in pairwise(bounds)]
