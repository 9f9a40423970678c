"""Log-probs on a device -> exact candidate sets.

`top_p_candidates` is the op; `reference` holds its definition, written plainly; every other file is
one implementation of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_topp.nucleus import select
from sglang_topp.nucleus._arguments import checked

__all__ = ["top_p_candidates"]


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
        return select.top_p_candidates(*checked(logprobs, p, sampled_ids))
