"""Log-probs on a device -> exact candidate sets.

`top_p_candidates` makes them by the threshold rule, `support_candidates` from what a sampler could draw.
`reference` holds the definitions of both, written plainly. `select` and `support` run anywhere, and on the
CPU; `triton` and `support_triton` are a GPU's, and `staged` how they are used, also without a wait.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_topp.nucleus import select, support
from sglang_topp.nucleus._arguments import checked, checked_support

__all__ = ["support_candidates", "top_p_candidates"]


def top_p_candidates(
    logprobs: Tensor, p: float | Sequence[float] | Tensor, sampled_ids: Sequence[int] | Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The candidate set of every row, as flat arrays.

    With `q = exp(logprobs[b])` as it is given (no renormalisation), the candidates of row `b` are::

        { i : q[i] > 0  and  sum of q[j] over all j with q[j] > q[i]  <  p[b] }  ∪  { sampled_ids[b] }

    so ties at the cutoff are all kept, `p = 1` keeps every token of non-zero probability, and a row
    with `p = 0` is not looked at and gets no candidates (its sampled id is ignored as well). Zero
    probability means `-inf`, or the dtype's lowest value, which SGLang writes for it. Masses are
    accumulated in float64; where one lies within 1e-6 of `p`, either neighbour is a right answer.

    Args:
        logprobs: floats [B, V] on any device, natural log-probs; float16, bfloat16, float32, or
            float64, which is rounded to float32 first. Any strides; not modified.
        p: one float in [0, 1] for all rows, or B of them. On an accelerator, a tensor `p` that lives
            there costs a synchronisation; a float or a sequence costs none.
        sampled_ids: integers [B], forced into their rows' sets.

    Returns:
        `(token_ids int32 [n], logprobs float32 [n], offsets int64 [B + 1])` on the device of
        `logprobs`. Row `b` owns `offsets[b]:offsets[b + 1]`, highest log-prob first, then lowest id.

    Raises:
        InvalidInputError: wrong shape or dtype, `p` outside [0, 1] or NaN, a sampled id outside
            [0, V), or a row asked for that holds NaN or values that are no log-probs (above 0).
    """
    with torch.no_grad():
        arguments = checked(logprobs, p, sampled_ids)
        if not _has_kernels(logprobs):
            return select.top_p_candidates(*arguments)
        from sglang_topp.nucleus import staged

        return staged.top_p_candidates(*arguments)


def support_candidates(
    logprobs: Tensor,
    weights: Tensor,
    token_ids: Tensor | None = None,
    *,
    sampled_ids: Sequence[int] | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The candidate set of every row that a sampler drew from, as flat arrays.

    The candidates of row `r` are the tokens that the sampler left a weight, and the one that it drew::

        { token_ids[r, w] : weights[r, w] > 0 }  ∪  { sampled_ids[r] }

    Args:
        logprobs: floats [R, V], natural log-probs of the whole vocabulary; as for `top_p_candidates`.
        weights: numbers [R, W] on the same device, what the sampler draws with after its filters; 0 (or
            less, or NaN) is never drawn.
        token_ids: integers [R, W], whose weights they are, no token twice in a row; None where W is V
            and column `i` is token `i`.
        sampled_ids: integers [R].

    Returns:
        As `top_p_candidates`.

    Raises:
        InvalidInputError: wrong shape or dtype, an id outside [0, V), log-probs of candidates that are
            NaN or above 0, or a token of zero probability (`-inf`) that was not sampled but has a weight.
    """
    with torch.no_grad():
        arguments = checked_support(logprobs, weights, token_ids, sampled_ids)
        if not _has_kernels(logprobs):
            return support.support_candidates(*arguments)
        from sglang_topp.nucleus import staged

        return staged.support_candidates(*arguments)


def _has_kernels(logprobs: Tensor) -> bool:
    return logprobs.is_cuda and importlib.util.find_spec("triton") is not None
