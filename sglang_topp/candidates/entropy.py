"""The entropy of each position's distribution within its candidate set."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp.candidates.sets import CandidateSets

__all__ = ["set_entropy"]

# Log-probs are clamped to this minimum. A sampled token may have probability 0 and log-prob -inf. Without the
# minimum, the token's term in the sum would be `0 * -inf`, which is NaN.
_LEAST_LOGPROB = -1e4


def set_entropy(sets: CandidateSets) -> NDArray[np.float64]:
    """Return float64 [T]: the entropy of each of the T sets in nats, or 0 for an empty set.

    The entropy is `-Σ r log r` over the set, with `r = q / kept mass`. Here, `q` is a candidate's probability
    under the full vocabulary, and the kept mass is the sum of `q` over the set.

    Raises:
        InvalidInputError: the sets have no log-probs.
    """
    out = np.zeros(len(sets))
    filled = np.flatnonzero(sets.sizes)
    if not len(filled):
        return out
    logprobs: NDArray[Any] = np.maximum(sets.logprobs.astype(np.float64), _LEAST_LOGPROB)
    # -Σ r log r = log mass - Σ q log q / mass
    sums = np.add.reduceat(np.exp(logprobs) * logprobs, sets.offsets[filled])
    log_mass = sets.logprob_sum[filled].astype(np.float64)
    out[filled] = np.maximum(log_mass - sums / np.exp(log_mass), 0)
    return out
