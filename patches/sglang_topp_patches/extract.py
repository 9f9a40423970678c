"""Log-probs on the device -> candidate sets, and on to the host with SGLang's own copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from sglang_topp import nucleus
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.payload import Span, span

__all__ = ["RowSets", "extract"]


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

    def spans(self) -> list[Span]:
        """One span per row; the tensors must be on the host by now."""
        token_ids, logprobs = self.token_ids.numpy(), self.logprobs.numpy()
        bounds = self.offsets.tolist()
        return [span(token_ids[low:high], logprobs[low:high]) for low, high in pairwise(bounds)]


def extract(logprobs: torch.Tensor, thresholds: Sequence[float], sampled_ids: torch.Tensor) -> RowSets:
    """The sets of the rows whose threshold is not 0; a row that cannot be exact fails alone.

    Args:
        logprobs: float [B, V], natural log-probs, -inf for tokens of zero probability.
        thresholds: B thresholds; 0 gives an empty set.
        sampled_ids: integer [B], forced into the sets.
    """
    problems: dict[int, str] = {}
    thresholds = list(thresholds)
    try:
        return RowSets(*nucleus.top_p_candidates(logprobs, thresholds, sampled_ids))
    except InvalidInputError:
        pass
    for row in range(len(thresholds)):
        one = slice(row, row + 1)
        try:
            nucleus.top_p_candidates(logprobs[one], thresholds[one], sampled_ids[one])
        except InvalidInputError as error:
            problems[row] = str(error)
            thresholds[row] = 0.0
    return RowSets(*nucleus.top_p_candidates(logprobs, thresholds, sampled_ids), problems)
