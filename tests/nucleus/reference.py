"""Reference implementations that define candidate sets: plain loops with a full sort, in float64.

The functions in this module are slow. The tests compare the torch and Triton implementations with these
functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_topp.candidates.validation import MAX_LOGPROB
from sglang_topp.errors import InvalidInputError
from sglang_topp.nucleus.argument_checks import (
    NOT_LOGPROBS,
    SAMPLED_OUT_OF_RANGE,
    check_support_arguments,
    check_top_p_arguments,
    row_error,
)

__all__ = ["nucleus", "settled", "support_candidates", "top_p_candidates"]


def nucleus(logprobs: list[float], p: float, lowest: float = -math.inf) -> list[int]:
    """Return the token ids in the nucleus of one row, in no guaranteed order.

    Token `i` is in the nucleus if `q[i] > 0`, and if the probabilities `q[j]` of all tokens `j` with
    `q[j] > q[i]` sum to less than `p`.

    Args:
        logprobs: the natural log-probs of one row. The probabilities are `q = exp(logprobs)`.
        p: the top-p threshold. A threshold of 1 keeps every token of non-zero probability, even if the
            probabilities do not sum to 1.
        lowest: log-probs at or below this value stand for probability 0.
    """
    possible = sorted(
        (i for i in range(len(logprobs)) if logprobs[i] > lowest), key=lambda i: logprobs[i], reverse=True
    )
    kept: list[int] = []
    mass_above, mass_so_far = 0.0, 0.0
    for rank, i in enumerate(possible):
        if rank == 0 or logprobs[i] < logprobs[possible[rank - 1]]:
            mass_above = mass_so_far  # equally likely tokens have the same `mass_above`
        if p < 1 and mass_above >= p:
            break
        kept.append(i)
        mass_so_far += math.exp(logprobs[i])
    return kept


def top_p_candidates(
    logprobs: Tensor, p: float | Sequence[float] | Tensor, sampled_ids: Sequence[int] | Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the result of `sglang_topp.nucleus.top_p_candidates` directly from the definition."""
    logprobs_BV, p_B, sampled_B = check_top_p_arguments(logprobs, p, sampled_ids)
    vocab = logprobs_BV.shape[1]
    lowest = torch.finfo(logprobs_BV.dtype).min
    token_ids: list[int] = []
    values: list[float] = []
    offsets = [0]
    for b, row in enumerate(logprobs_BV.tolist()):
        if p_B[b] > 0:
            for value in row:
                if not value <= MAX_LOGPROB:
                    raise row_error(b, NOT_LOGPROBS, value)
            candidates = set(nucleus(row, float(p_B[b]), lowest))
            if sampled_B is not None:
                sampled = int(sampled_B[b])
                if not 0 <= sampled < vocab:
                    raise row_error(b, SAMPLED_OUT_OF_RANGE, sampled, vocab)
                candidates.add(sampled)
            ordered = sorted(candidates, key=lambda i: (-row[i], i))
            token_ids += ordered
            values += [row[i] for i in ordered]
        offsets.append(len(token_ids))
    return _flat(token_ids, values, offsets, logprobs_BV.device)


def settled(
    logprobs: Tensor,
    p: float | Sequence[float] | Tensor,
    sampled_ids: Sequence[int] | Tensor | None,
    sizes: Sequence[int],
    tolerance: float,
) -> NDArray[np.float64]:
    """Return thresholds around `p` at which the sets of `top_p_candidates` have the given sizes.

    If a cumulative mass is within the tolerance of `p`, rounding may decide whether the next token is kept. A
    row that has the given size at no threshold within the tolerance keeps its `p`.
    """
    logprobs_BV, p_B, sampled_B = check_top_p_arguments(logprobs, p, sampled_ids)
    p_B = p_B.copy()
    for b in np.flatnonzero((p_B > 0) & (p_B < 1)):
        row = logprobs_BV[b].double().cpu().numpy()
        levels, counts = np.unique(row[row > torch.finfo(logprobs_BV.dtype).min], return_counts=True)
        levels, counts = levels[::-1], counts[::-1]
        above = np.cumsum([0.0, *(np.exp(levels) * counts)])
        few, many = np.searchsorted(above[:-1], (p_B[b] - tolerance, p_B[b] + tolerance)).clip(1)
        for kept in range(few, min(many, len(levels)) + 1):
            sampled = levels[0] if sampled_B is None else row[int(sampled_B[b])]
            if counts[:kept].sum() + (sampled < levels[kept - 1]) == sizes[b]:
                p_B[b] = min(above[kept - 1 : kept + 1].mean(), np.nextafter(1, 0))  # rounded masses exceed 1
    return p_B


def support_candidates(
    logprobs: Tensor,
    weights: Tensor,
    token_ids: Tensor | None = None,
    *,
    sampled_ids: Sequence[int] | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the result of `sglang_topp.nucleus.support_candidates` directly from the definition."""
    logprobs_RV, is_drawn_RW, ids_RW, sampled_R = check_support_arguments(
        logprobs, weights, token_ids, sampled_ids
    )
    vocab = logprobs_RV.shape[1]
    lowest = torch.finfo(logprobs_RV.dtype).min
    ids: list[int] = []
    values: list[float] = []
    offsets = [0]
    for r, row in enumerate(logprobs_RV.tolist()):
        sampled = int(sampled_R[r])
        if not 0 <= sampled < vocab:
            raise row_error(r, SAMPLED_OUT_OF_RANGE, sampled, vocab)
        names = range(vocab) if ids_RW is None else ids_RW[r].tolist()
        candidates = {i for i, is_drawn in zip(names, is_drawn_RW[r].tolist(), strict=True) if is_drawn}
        for i in candidates | {sampled}:
            if not row[i] <= MAX_LOGPROB:
                raise row_error(r, NOT_LOGPROBS, row[i])
            if row[i] <= lowest and i != sampled:
                raise InvalidInputError(f"weights: row {r} can draw token {i} of zero probability")
        ordered = sorted(candidates | {sampled}, key=lambda i: (-row[i], i))
        ids += ordered
        values += [row[i] for i in ordered]
        offsets.append(len(ids))
    return _flat(ids, values, offsets, logprobs_RV.device)


def _flat(
    token_ids: list[int], values: list[float], offsets: list[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.tensor(token_ids, dtype=torch.int32, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
        torch.tensor(offsets, dtype=torch.int64, device=device),
    )
