"""Extract candidate sets from a forward pass's log-probs; the work runs on the log-probs' device.

`extract` returns each row's nucleus at a threshold p, plus the sampled token. `extract_support` returns, for
each row, the tokens that the sampler could draw after its top_k, top_p, and min_p filters. On a GPU, the
kernels of `extract` and `extract_support` write the sets to a buffer of fixed size, the staging area
(`scheduler.gpu_staging`). The two functions return without waiting for the GPU. On a CPU, the sets are
complete when `extract` or `extract_support` returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from sglang_topp import nucleus
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.scheduler import gpu_staging
from sglang_topp_patches.scheduler.extracted_sets import ExtractedSets
from sglang_topp_patches.scheduler.process_state import SchedulerProcess

__all__ = ["Sets", "extract", "extract_support"]

Sets: TypeAlias = ExtractedSets | gpu_staging.StagedSets
"""The sets of some rows: complete (`ExtractedSets`), or still in a staging area (`StagedSets`)."""


def extract(
    process: SchedulerProcess,
    logprobs: torch.Tensor,
    thresholds: Sequence[float],
    sampled_ids: torch.Tensor,
    *,
    lowest: float | None = None,
    is_taken: torch.Tensor | None = None,
) -> Sets:
    """Extract the nucleus of each row whose threshold is not 0, plus the row's sampled token.

    If a row has no exact set, `problems` of the returned object gives the reason. All other rows still get
    their sets.

    Args:
        process: the state of this scheduler process. `process.staging` counts the rows whose sets go to a
            staging area.
        logprobs: float [B, V], the natural log-probs of B rows over a vocabulary of V tokens. On a GPU, the
            returned object may read `logprobs` again until the scheduler processes the results of the forward
            pass. Until then, the caller must not change `logprobs`, except to replace -inf with the dtype's
            lowest value.
        thresholds: each row's threshold p; a row with a threshold of 0 gets an empty set.
        sampled_ids: integer [B], each row's sampled token, or the next prompt token if the row scores a
            prompt. A set that is not empty contains this token.
        lowest: log-probs at or below this value stand for probability 0. None means the lowest value of the
            dtype of `logprobs`.
        is_taken: bool [B], on the same device as `logprobs`: whether each row gets a set. If `is_taken` is
            None, every row gets a set.
    """
    if gpu_staging.is_staged(logprobs):
        return gpu_staging.by_threshold(process, logprobs, thresholds, sampled_ids, lowest, is_taken)
    logprobs = _with_zeros(logprobs, lowest)
    problems: dict[int, str] = {}
    thresholds = list(thresholds)
    if is_taken is not None:
        thresholds = [p if taken else 0.0 for p, taken in zip(thresholds, is_taken.tolist(), strict=True)]
    try:
        return ExtractedSets(*nucleus.top_p_candidates(logprobs, thresholds, sampled_ids))
    except InvalidInputError:
        pass
    for row in range(len(thresholds)):
        one = slice(row, row + 1)
        try:
            nucleus.top_p_candidates(logprobs[one], thresholds[one], sampled_ids[one])
        except InvalidInputError as error:
            problems[row] = str(error)
            thresholds[row] = 0.0
    return ExtractedSets(*nucleus.top_p_candidates(logprobs, thresholds, sampled_ids), problems)


def extract_support(
    process: SchedulerProcess,
    logprobs: torch.Tensor,
    rows: torch.Tensor,
    is_drawn: torch.Tensor,
    token_ids: torch.Tensor | None,
    sampled_ids: torch.Tensor,
    *,
    lowest: float | None = None,
) -> Sets:
    """Extract the set of tokens that the sampler could draw, for each of the R rows that `rows` lists.

    `nucleus.support_candidates` gives the exact definition of these sets. If one of the R rows has no exact
    set, `problems` of the returned object gives the reason, and the other R - 1 rows still get their sets.

    Args:
        process: the state of this scheduler process, the same as in `extract`.
        logprobs: float [B, V], the same as in `extract`.
        rows: int64 [R], ascending indices into the B rows of `logprobs`: the rows whose filtered
            probabilities the sampler returned.
        is_drawn: bool [R, W], whether each of a row's W filtered probabilities is above 0.
        token_ids: int32 [R, W], the token in each column of `is_drawn`, most likely token first. None means
            that W equals V, and that column `i` belongs to token `i`.
        sampled_ids: integer [B], the sampled tokens.
        lowest: the same as in `extract`.
    """
    if gpu_staging.is_staged(logprobs):
        return gpu_staging.by_weights(process, logprobs, rows, is_drawn, token_ids, sampled_ids[rows], lowest)
    logprobs, sampled_ids = _with_zeros(logprobs[rows], lowest), sampled_ids[rows]
    if token_ids is not None:
        # Each row begins with its most likely tokens. The columns from `width` on hold no token that the
        # sampler could draw, so drop these columns.
        width = max(1, int(is_drawn.sum(1).amax()))
        is_drawn, token_ids = is_drawn[:, :width], token_ids[:, :width]
    problems: dict[int, str] = {}

    def of(rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = None if token_ids is None else token_ids[rows]
        return nucleus.support_candidates(logprobs[rows], is_drawn[rows], ids, sampled_ids=sampled_ids[rows])

    try:
        return ExtractedSets(*of(slice(None)))
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
    return ExtractedSets(
        torch.cat(ids), torch.cat(values), torch.nn.functional.pad(sizes.cumsum(0), (1, 0)), problems
    )


def _with_zeros(logprobs: torch.Tensor, lowest: float | None) -> torch.Tensor:
    return logprobs if lowest is None else logprobs.masked_fill(logprobs <= lowest, -torch.inf)
