"""Extract exact candidate sets from log-probs, on a CPU or an accelerator.

`top_p_candidates` computes each row's nucleus for a threshold `p`. `support_candidates` returns the tokens
that a sampler could draw in each row, after all of the sampler's filters. `tests/nucleus/reference.py`
defines both with plain loops. The module `extraction_torch` runs on any device. The module `gpu_extraction`
launches the Triton kernels of `top_p_triton` and `sampler_support_triton`, with or without waiting for the
GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_topp.nucleus import extraction_torch
from sglang_topp.nucleus.argument_checks import check_support_arguments, check_top_p_arguments

__all__ = ["support_candidates", "top_p_candidates"]


def top_p_candidates(
    logprobs: Tensor, p: float | Sequence[float] | Tensor, sampled_ids: Sequence[int] | Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the candidate set of every row for the threshold `p`, as flat arrays.

    Let `q = exp(logprobs[b])`, without renormalization. The candidate set of row `b` is::

        { i : q[i] > 0  and  sum of q[j] over all j with q[j] > q[i]  <  p[b] }  ∪  { sampled_ids[b] }

    The set keeps all tokens tied at the cutoff. With `p = 1`, the set keeps every token of non-zero
    probability. A row with `p = 0` has no candidates, and the function reads neither the row's log-probs nor
    the row's sampled id. A token has zero probability if its log-prob is `-inf` or the dtype's lowest value,
    which SGLang writes in place of `-inf`. Sums of probabilities are accurate to 1e-6: if the total
    probability of all tokens more likely than token `i` is that close to `p`, rounding may decide whether
    token `i` is kept. Both results are correct.

    Args:
        logprobs: floats [B, V] on any device, natural log-probs in float16, bfloat16, float32, or float64.
            float64 log-probs are rounded to float32 first. The function accepts any strides, and does not
            modify `logprobs`.
        p: one float in [0, 1] for all rows, or B floats. Reading `p` makes the host wait for the device if
            `p` is a tensor on an accelerator.
        sampled_ids: integers [B], the sampled token of each row, or None. The function adds each sampled
            token to the set of its row.

    Returns:
        `(token_ids int32 [n], logprobs float32 [n], offsets int64 [B + 1])` on the device of `logprobs`. The
        candidates of row `b` are at `offsets[b]:offsets[b + 1]`, ordered by log-prob, highest first, then by
        id.

    Raises:
        InvalidInputError: a shape or dtype is wrong, `p` is outside [0, 1] or NaN, a sampled id is outside
            [0, V), V is above 2^24, or a row with `p > 0` holds NaN or a value above 2^-10.

    Example:
        Two tokens tie at the cutoff, and both are kept.

        >>> q = torch.tensor([[0.4, 0.25, 0.25, 0.1]])
        >>> token_ids, logprobs, offsets = top_p_candidates(q.log(), 0.5)
        >>> token_ids.tolist(), offsets.tolist()
        ([0, 1, 2], [0, 3])
    """
    with torch.no_grad():
        arguments = check_top_p_arguments(logprobs, p, sampled_ids)
        if not _has_kernels(logprobs):
            return extraction_torch.top_p_candidates(*arguments)
        from sglang_topp.nucleus import gpu_extraction

        return gpu_extraction.find_top_p(*arguments).complete()


def support_candidates(
    logprobs: Tensor,
    weights: Tensor,
    token_ids: Tensor | None = None,
    *,
    sampled_ids: Sequence[int] | Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens that a sampler could draw in each row, as flat arrays.

    The candidates of row `r` are the tokens with a positive weight, and the sampled token::

        { token_ids[r, w] : weights[r, w] > 0 }  ∪  { sampled_ids[r] }

    Args:
        logprobs: floats [R, V], natural log-probs of the whole vocabulary, as for `top_p_candidates`.
        weights: numbers [R, W] on the device of `logprobs`, the sampling weights after all of the sampler's
            filters. The sampler never draws a token whose weight is 0, negative, or NaN.
        token_ids: integers [R, W], the token id of each weight, without duplicates in a row. None means that
            W is V, and that column `i` of `weights` belongs to token id `i`.
        sampled_ids: integers [R], the sampled token of each row.

    Returns:
        `(token_ids, logprobs, offsets)`, in the format that `top_p_candidates` returns.

    Raises:
        InvalidInputError: a shape or dtype is wrong, an id is outside [0, V), a candidate's log-prob is NaN
            or above 2^-10, or a token of zero probability (`-inf`) has a positive weight and was not sampled.
    """
    with torch.no_grad():
        arguments = check_support_arguments(logprobs, weights, token_ids, sampled_ids)
        if not _has_kernels(logprobs):
            return extraction_torch.support_candidates(*arguments)
        from sglang_topp.nucleus import gpu_extraction

        return gpu_extraction.find_support(*arguments).complete()


def _has_kernels(logprobs: Tensor) -> bool:
    return logprobs.is_cuda and importlib.util.find_spec("triton") is not None
