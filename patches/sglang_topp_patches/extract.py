"""Log-probs on the device -> candidate sets, and on to the host with SGLang's own copy.

By the threshold rule (`extract`), or from the weights that the sampler drew with (`extract_support`). On a
GPU nothing is waited for (`staging`); on a CPU the sets are there at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from sglang_topp import nucleus
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches import staging
from sglang_topp_patches.row_sets import RowSets

__all__ = ["Sets", "extract", "extract_support"]

Sets: TypeAlias = RowSets | staging.StagedSets
"""Sets of some rows: there, or on their way."""


def extract(
    logprobs: torch.Tensor,
    thresholds: Sequence[float],
    sampled_ids: torch.Tensor,
    *,
    lowest: float | None = None,
) -> Sets:
    """The sets of the rows whose threshold is not 0; a row that cannot be exact fails alone.

    Args:
        logprobs: float [B, V], natural log-probs. On a GPU they are read again later where staging is too
            small: nothing else may be written to them but their dtype's lowest value for -inf.
        thresholds: B thresholds; 0 gives an empty set.
        sampled_ids: integer [B], forced into the sets.
        lowest: log-probs at or below it stand for probability 0; the dtype's lowest value by default.
    """
    if staging.is_staged(logprobs):
        return staging.by_threshold(logprobs, thresholds, sampled_ids, lowest)
    logprobs = _with_zeros(logprobs, lowest)
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
    rows: torch.Tensor,
    is_drawn: torch.Tensor,
    token_ids: torch.Tensor | None,
    sampled_ids: torch.Tensor,
    *,
    lowest: float | None = None,
) -> Sets:
    """The sets that `nucleus.support_candidates` makes; a row that cannot be exact fails alone.

    Args:
        logprobs: float [B, V], as for `extract`.
        rows: int64 [R], whose weights they are.
        is_drawn: bool [R, W], which of them are above 0.
        token_ids: int32 [R, W], whose weights they are, highest weight first; None where W is V.
        sampled_ids: integer [B].
        lowest: as for `extract`.
    """
    if staging.is_staged(logprobs):
        return staging.by_weights(logprobs, rows, is_drawn, token_ids, sampled_ids[rows], lowest)
    logprobs, sampled_ids = _with_zeros(logprobs[rows], lowest), sampled_ids[rows]
    if token_ids is not None:
        # What is drawn stands first: the rest of a vocabulary need not be looked at again.
        width = max(1, int(is_drawn.sum(1).amax()))
        is_drawn, token_ids = is_drawn[:, :width], token_ids[:, :width]
    problems: dict[int, str] = {}

    def of(rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = None if token_ids is None else token_ids[rows]
        return nucleus.support_candidates(logprobs[rows], is_drawn[rows], ids, sampled_ids=sampled_ids[rows])

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


def _with_zeros(logprobs: torch.Tensor, lowest: float | None) -> torch.Tensor:
    return logprobs if lowest is None else logprobs.masked_fill(logprobs <= lowest, -torch.inf)
