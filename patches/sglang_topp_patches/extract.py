"""Log-probs on the device -> candidate sets, and on to the host with SGLang's own copy.

By the threshold rule (`extract`), or from the weights that the sampler drew with (`extract_support`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from sglang_topp import nucleus
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.payload import Span, span

__all__ = ["RowSets", "extract", "extract_support"]


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


def extract_support(
    logprobs: torch.Tensor,
    weights: torch.Tensor,
    token_ids: torch.Tensor | None,
    sampled_ids: torch.Tensor,
) -> RowSets:
    """The sets that `nucleus.support_candidates` makes; a row that cannot be exact fails alone.

    Args:
        logprobs: float [R, V], as for `extract`.
        weights: float [R, W], what the sampler drew with.
        token_ids: integer [R, W], whose weights they are, highest weight first; None where W is V.
        sampled_ids: integer [R].
    """
    if token_ids is not None:
        # What is drawn stands first: the rest of a vocabulary need not be looked at again.
        width = max(1, int((weights > 0).sum(1).amax()))
        weights, token_ids = weights[:, :width], token_ids[:, :width]
    problems: dict[int, str] = {}

    def of(rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = None if token_ids is None else token_ids[rows]
        return nucleus.support_candidates(logprobs[rows], weights[rows], ids, sampled_ids=sampled_ids[rows])

    try:
        return RowSets(*of(slice(None)))
    except InvalidInputError:
        pass
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for row in range(len(logprobs)):
        try:
            parts.append(of(slice(row, row + 1)))
        except InvalidInputError as error:
            problems[row] = str(error)
            none = logprobs.new_empty(0, dtype=torch.float32)
            parts.append((none.int(), none, torch.zeros(2, dtype=torch.int64, device=logprobs.device)))
    ids, values, offsets = zip(*parts, strict=True)
    sizes = torch.cat([each.diff() for each in offsets])
    return RowSets(
        torch.cat(ids), torch.cat(values), torch.nn.functional.pad(sizes.cumsum(0), (1, 0)), problems
    )
