"""Extract candidate sets in plain torch, on any device: top-p sets, and the tokens that a sampler could draw.

`top_p_candidates` does not sort the vocabulary. A nucleus usually has tens of tokens out of a hundred
thousand. The code therefore cuts each row of log-probs into blocks of neighboring token ids. One pass over
the row computes the maximum of each block. The code then searches only the blocks with the highest maxima,
usually a few thousand log-probs per row.

Let `bound` be the lowest maximum among the searched blocks. All log-probs in the other blocks are at most
`bound`, so the searched blocks contain every token whose log-prob is above `bound`. If these tokens have a
total probability of at least `p`, the searched blocks contain the whole nucleus. If the total is below `p`,
the code searches more blocks of the row, and finally the whole row. Every result is therefore exact. With
`p = 1`, the code searches the whole row at once.

`support_candidates` finds the tokens with a sampling weight above 0: a sampler draws the token of a row in
proportion to the row's weights.

Shape legend: B rows, R rows with a threshold above 0 (the requested rows) or with sampling weights, V ids in
the vocabulary, N blocks of exactly S tokens, K blocks searched per row, M log-probs searched per row, W
sampling weights per row, n candidates in all. Without the argument `token_ids_RW`, W is V, and every id has a
weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_topp.candidates.validation import MAX_LOGPROB
from sglang_topp.nucleus.argument_checks import (
    NOT_LOGPROBS,
    SAMPLED_OUT_OF_RANGE,
    ZERO_PROBABILITY,
    row_error,
)

_BLOCK = 64
# The first attempt to find a row's nucleus reads 128 blocks of the row, and the second attempt reads 1024
# blocks. At p = 0.95, 128 blocks contain the whole nucleus for nearly all rows of a language model. If the
# vocabulary is large, reading 1024 blocks takes far less time than sorting the whole row.
_ATTEMPTS = (128, 1024)
# The maximum number of log-probs in a call of `_cut` with whole rows. They fit in a CPU's cache. A longer row
# gets a call of its own.
_WHOLE_VALUES = 1 << 16

_Nuclei: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""Some rows' indices in the batch, int64 [R]; the sizes of their nuclei, int64 [R]; and the tokens of these,
row after row: ids, int32 [n], and log-probs, float32 [n]."""


def top_p_candidates(
    logprobs_BV: Tensor, p_B: NDArray[np.float64], sampled_B: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sglang_topp.nucleus.top_p_candidates` in plain torch; the caller has checked the arguments."""
    offsets = torch.zeros(len(p_B) + 1, dtype=torch.int64, device=logprobs_BV.device)
    rows_R = torch.from_numpy(np.flatnonzero(p_B)).to(offsets.device)
    if sampled_B is not None:
        _check_sampled(rows_R, sampled_B[rows_R], logprobs_BV.shape[1])
    if not len(rows_R):
        none = logprobs_BV.new_empty(0, dtype=torch.float32)
        return none.int(), none, offsets
    # With p = 1, the nucleus is the whole row. Use an infinite limit: a limit of 1 could cut the row, because
    # the rounded probabilities may sum to 1 before the end of the row.
    limits = np.where(p_B < 1, p_B, 0), np.where(p_B == 1, np.inf, 0)
    parts = [part for limit_B in limits if limit_B.any() for part in _nuclei(logprobs_BV, limit_B)]
    if sampled_B is not None:
        least_B = torch.full((len(p_B),), torch.inf, dtype=torch.float32, device=offsets.device)
        for part_R, sizes_R, _, logprobs_n in parts:
            if len(logprobs_n):
                least_B[part_R] = logprobs_n[sizes_R.cumsum(0) - 1].masked_fill(sizes_R == 0, torch.inf)
        # A sampled token is outside of the nucleus if it is less likely than all of its tokens.
        ids_R = sampled_B[rows_R]
        logprobs_R = logprobs_BV[rows_R, ids_R].float()
        outside = (logprobs_R < least_B[rows_R]).nonzero().squeeze(1)
        if len(outside):
            ones = torch.ones_like(outside)
            parts.append((rows_R[outside], ones, ids_R[outside].int(), logprobs_R[outside]))
    for part_R, sizes_R, _, _ in parts:
        offsets[part_R + 1] += sizes_R
    offsets.cumsum_(0)
    if len(parts) == 1:
        _, _, ids_n, logprobs_n = parts[0]
        return ids_n, logprobs_n.clone(), offsets  # not a view of all the sorted log-probs
    pieces: list[tuple[int, Tensor, Tensor]] = []
    for part_R, sizes_R, *tokens in parts:
        flat = (torch.split(each, sizes_R.tolist()) for each in tokens)
        pieces += zip(part_R.tolist(), *flat, strict=True)
    pieces.sort(key=lambda piece: piece[0])
    _, ids, logprobs = zip(*pieces, strict=True)
    return torch.cat(ids), torch.cat(logprobs), offsets


def _check_sampled(rows_R: Tensor, sampled_R: Tensor, vocab: int) -> None:
    outside_R = (sampled_R < 0) | (sampled_R >= vocab)
    if bool(outside_R.any()):
        worst = int(outside_R.nonzero()[0])
        raise row_error(int(rows_R[worst]), SAMPLED_OUT_OF_RANGE, int(sampled_R[worst]), vocab)


def _nuclei(logprobs_BV: Tensor, limit_B: NDArray[np.float64]) -> Iterator[_Nuclei]:
    """Yield the nuclei of the rows with a limit above 0, some rows at a time, as `_cut` returns them.

    A block is a group of neighboring token ids. To find a row's nucleus, an attempt reads either the row's
    blocks with the highest maximum log-probs, or the whole row. If the nucleus may have tokens outside these
    blocks, the next attempt reads more blocks of the row, or the whole row. Until then, the row's nucleus is
    empty.

    Args:
        limit_B: the total probability at which each row's nucleus ends, or 0 for a row without a nucleus. If
            a limit is infinite, all above 0 must be: only whole rows are then read.
    """
    row_numbers = np.flatnonzero(limit_B)
    rows_R = torch.from_numpy(row_numbers).to(logprobs_BV.device)
    limit_R = torch.from_numpy(limit_B[row_numbers]).to(logprobs_BV.device)
    num_blocks, tail = divmod(logprobs_BV.shape[1], _BLOCK)
    attempts = [num_chosen for num_chosen in _ATTEMPTS if num_chosen < num_blocks and limit_B.max() < 1]
    if attempts:
        blocks_BNS = logprobs_BV[:, : num_blocks * _BLOCK].view(-1, num_blocks, _BLOCK)
        # Call `amax` once per run of adjacent requested rows. These `amax` calls copy no row, and read only
        # requested rows.
        breaks = np.flatnonzero(np.diff(row_numbers) != 1) + 1
        runs = zip([0, *breaks], [*breaks, len(row_numbers)], strict=True)
        maxima_RN = torch.cat([blocks_BNS[row_numbers[a] : row_numbers[b - 1] + 1].amax(2) for a, b in runs])
    for num_chosen in attempts:
        highest_RK, chosen_RK = maxima_RN.topk(num_chosen, sorted=False)
        chosen_RK = chosen_RK.sort(1).values  # token ids must ascend along each row of `values_RM`
        values_RM = blocks_BNS[rows_R[:, None], chosen_RK].flatten(1)
        if tail:
            values_RM = torch.cat([values_RM, logprobs_BV[rows_R, -tail:]], 1)
            chosen_RK = torch.nn.functional.pad(chosen_RK, (0, 1), value=num_blocks)
        nuclei, short_R = _cut(values_RM, rows_R, limit_R, highest_RK.amin(1), chosen_RK)
        yield nuclei
        if not bool(short_R.any()):
            return
        rows_R, limit_R, maxima_RN = rows_R[short_R], limit_R[short_R], maxima_RN[short_R]

    rows_at_once = max(1, _WHOLE_VALUES // logprobs_BV.shape[1])
    for some in zip(torch.split(rows_R, rows_at_once), torch.split(limit_R, rows_at_once), strict=True):
        yield _cut(logprobs_BV[some[0]], *some)[0]


def _cut(
    values_RM: Tensor,
    rows_R: Tensor,
    limit_R: Tensor,
    bound_R: Tensor | None = None,
    blocks_RK: Tensor | None = None,
) -> tuple[_Nuclei, Tensor]:
    """Sort each row's log-probs above the row's bound, and cut the sorted log-probs where the nucleus ends.

    Args:
        values_RM: the log-probs of R whole rows, or of some blocks of each row, ordered along each row by
            ascending token id.
        rows_R: int64, the indices in the batch of the R rows that these log-probs come from.
        limit_R: float64, the total probability at which each row's nucleus ends.
        bound_R: for each row, an upper bound on the log-probs that `values_RM` leaves out, or None if
            `values_RM` holds whole rows.
        blocks_RK: the indices of the K blocks that each row's log-probs in `values_RM` come from, or None if
            `values_RM` holds whole rows.

    Returns:
        The nuclei, and bool [R], True for each row whose nucleus may contain tokens that are not in
        `values_RM`, so that it is left empty. In such a row, the tokens with log-probs above the row's bound
        have a total probability below `p`.
    """
    # This check also finds NaN. The maximum of a block with NaN is NaN, and `topk` in `_nuclei` ranks NaN
    # highest. If a row holds NaN, `values_RM` therefore holds NaN too. `amax` then returns NaN, and
    # `NaN <= x` is false.
    if not float(values_RM.amax()) <= MAX_LOGPROB:
        highest_R = values_RM.amax(1)
        worst = int((~(highest_R <= MAX_LOGPROB)).nonzero()[0])
        raise row_error(int(rows_R[worst]), NOT_LOGPROBS, float(highest_R[worst]))

    num_rows, width = values_RM.shape
    lowest = torch.finfo(values_RM.dtype).min
    above_RM = values_RM > (lowest if bound_R is None else bound_R.clamp(min=lowest)[:, None])
    entry_n = above_RM.flatten().nonzero().squeeze(1)
    edges = torch.arange(0, (num_rows + 1) * width, width, device=entry_n.device)
    edges = torch.searchsorted(entry_n, edges)
    start_R, end_R = edges[:-1], edges[1:]

    logprobs_n = values_RM.flatten()[entry_n].float()
    key_n = sort_key_descending(logprobs_n)
    if num_rows > 1:
        key_n = ((entry_n // width) << 32) + key_n
    key_n, order_n = key_n.sort(stable=True)
    entry_n, logprobs_n = entry_n[order_n], logprobs_n[order_n]

    # On an accelerator, rounding may make the cumulative sum `mass_before` decrease from one element to the
    # next. The decrease is far smaller than 1e-6, the rounding error of the total probability that
    # `sglang_topp.nucleus.top_p_candidates` allows.
    mass_before = logprobs_n.new_zeros(len(key_n) + 1, dtype=torch.float64)
    torch.cumsum(logprobs_n.double().exp(), 0, out=mass_before[1:])
    stop_R = torch.searchsorted(mass_before, mass_before[start_R] + limit_R)
    # Keep each row's most likely token, even if p is smaller than the rounding error of the sums.
    stop_R = torch.maximum(stop_R, start_R + 1)
    # No token outside of `values_RM` has a log-prob above its row's bound. If the bound is at most `lowest`,
    # all these tokens have probability 0.
    short_R = torch.zeros_like(rows_R, dtype=torch.bool)
    if bound_R is not None:
        short_R = (stop_R > end_R) & (bound_R > lowest)
        stop_R = torch.where(short_R, start_R, stop_R)
    stop_R = torch.minimum(stop_R, end_R)
    if len(key_n):
        # Extend each nucleus by the tokens that are as likely as the last token of the nucleus.
        tied_R = torch.searchsorted(key_n, key_n[stop_R - 1], right=True)
        stop_R = torch.where(stop_R > start_R, tied_R, stop_R)
    sizes_R = stop_R - start_R
    if num_rows == 1:
        ids_n, logprobs_n = entry_n[: int(sizes_R)], logprobs_n[: int(sizes_R)]
        row_n = torch.zeros_like(ids_n)
    else:
        row_n = torch.repeat_interleave(sizes_R)
        shift_R = start_R - sizes_R.cumsum(0) + sizes_R
        kept_n = torch.arange(len(row_n), device=row_n.device) + shift_R[row_n]
        ids_n, logprobs_n = entry_n[kept_n] - row_n * width, logprobs_n[kept_n]
    if blocks_RK is not None:
        ids_n = blocks_RK[row_n, ids_n // _BLOCK] * _BLOCK + ids_n % _BLOCK
    return (rows_R, sizes_R, ids_n.int(), logprobs_n), short_R


def sort_key_descending(logprobs: Tensor) -> Tensor:
    """Return int32 keys that ascend as float32 log-probs descend. -0.0 and 0.0 have equal keys."""
    bits = (0.0 - logprobs).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


# -- the tokens that a sampler could draw -------------------------------------------------------------------


def support_candidates(
    logprobs_RV: Tensor, is_drawn_RW: Tensor, token_ids_RW: Tensor | None, sampled_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sglang_topp.nucleus.support_candidates` in plain torch, for checked arguments."""
    num_rows, vocab = logprobs_RV.shape
    every_R = torch.arange(num_rows, device=sampled_R.device)
    _check_sampled(every_R, sampled_R, vocab)
    row_n, column_n = is_drawn_RW.nonzero(as_tuple=True)
    ids_n = column_n if token_ids_RW is None else token_ids_RW[row_n, column_n].long()
    lacks_sampled_R = torch.ones(num_rows, dtype=torch.bool, device=sampled_R.device)
    lacks_sampled_R[row_n[ids_n == sampled_R[row_n]]] = False
    row_n = torch.cat([row_n, every_R[lacks_sampled_R]])
    ids_n = torch.cat([ids_n, sampled_R[lacks_sampled_R]])

    logprobs_n = logprobs_RV[row_n, ids_n]
    possible_n = logprobs_n > torch.finfo(logprobs_n.dtype).min
    # `wrong_n` also marks a NaN log-prob, because `~(x <= limit)` is true for NaN. Only the sampled token may
    # have probability 0.
    wrong_n = ~(logprobs_n <= MAX_LOGPROB) | ~(possible_n | (ids_n == sampled_R[row_n]))
    if bool(wrong_n.any()):
        worst = int(wrong_n.nonzero()[0])
        row, value = int(row_n[worst]), float(logprobs_n[worst])
        if not value <= MAX_LOGPROB:
            raise row_error(row, NOT_LOGPROBS, value)
        raise row_error(row, ZERO_PROBABILITY, int(ids_n[worst]))

    offsets = torch.zeros(num_rows + 1, dtype=torch.int64, device=logprobs_RV.device)
    torch.cumsum(torch.bincount(row_n, minlength=num_rows), 0, out=offsets[1:])
    is_by_id = token_ids_RW is None and not bool(lacks_sampled_R.any())
    return *in_set_order(row_n, ids_n.int(), logprobs_n.float(), is_by_id), offsets


def in_set_order(row_n: Tensor, ids_n: Tensor, logprobs_n: Tensor, is_by_id: bool) -> tuple[Tensor, Tensor]:
    """Return `(ids_n, logprobs_n)`, row after row, each by log-prob, highest first, then by token id.

    If `is_by_id`, tokens of equal log-probs in a row must be in the order of their ids.
    """
    key_n = (row_n << 32) + sort_key_descending(logprobs_n)
    if is_by_id:
        order_n = key_n.argsort(stable=True)
    else:
        order_n = ids_n.argsort(stable=True)
        order_n = order_n[key_n[order_n].argsort(stable=True)]
    return ids_n[order_n], logprobs_n[order_n]
