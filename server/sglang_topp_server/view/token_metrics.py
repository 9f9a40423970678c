"""The numbers of one rollout's tokens: set size, kept mass, entropy, and importance ratios.

T is the number of the rollout's output tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from sglang_topp_client import ScoredRollout

__all__ = ["LEVELS", "TokenMetrics", "level_names", "token_metrics"]

Float64Array = NDArray[np.float64]

LEVELS: dict[str, tuple[float, ...]] = {
    "mass": (0.5, 0.8, 0.9, 0.95, 0.99, 0.999),
    "sizes": (1, 2, 4, 10, 50, 500),
    "entropy": (0.01, 0.1, 0.5, 1, 2, 4),
    "ratio": (0.5, 0.9, 0.99, 1.01, 1.1, 2),
    "replayed": (0.5, 0.9, 0.99, 1.01, 1.1, 2),
}
"""For each metric, the bounds between seven levels. Level k has the values above `bounds[k - 1]`, up to and
including `bounds[k]`. The page colors tokens by level, and counts the tokens of each level."""


def level_names(metric: str) -> list[str]:
    """Return the ranges of a metric's seven levels, for the page's legends."""
    bounds = LEVELS[metric]
    if metric == "sizes":
        pairs = [(int(low) + 1, int(high)) for low, high in zip((0, *bounds), bounds, strict=False)]
        ranges = [str(low) if low == high else f"{low}–{high}" for low, high in pairs]
    else:
        ranges = [f"≤ {bounds[0]:g}", *(f"{low:g}–{high:g}" for low, high in pairwise(bounds))]
    return [*ranges, f"> {bounds[-1]:g}"]


@dataclass(frozen=True, eq=False)
class TokenMetrics:
    """The metrics of one rollout's T output tokens. A float is NaN where it is unknown.

    Attributes:
        sizes: int64 [T], the number of candidates in each token's set, or 0 for a token without a set.
        is_appended: bool [T], whether a tool or an environment appended the token.
        is_missing: bool [T], whether the token was generated but has no set. A trainer must not train on
            tokens with missing sets.
        mass: float64 [T], the kept mass: the total probability of each token's set.
        entropy: float64 [T], the entropy of the distribution within each token's set, in nats.
        ratio: float64 [T], the importance ratio without replay: the trainer's probability over the whole
            vocabulary, divided by the rollout's probability within the set.
        replayed: float64 [T], the importance ratio with replay: both probabilities are within the set.
    """

    sizes: NDArray[np.int64]
    is_appended: NDArray[np.bool_]
    is_missing: NDArray[np.bool_]
    mass: Float64Array
    entropy: Float64Array
    ratio: Float64Array
    replayed: Float64Array

    @property
    def ratio_or_mass(self) -> Float64Array:
        """float64 [T]: `ratio`, and where it is unknown, the ratio of a trainer with the sampler's weights.

        That ratio equals the kept mass.
        """
        return np.where(np.isnan(self.ratio), self.mass, self.ratio)


def token_metrics(scored: ScoredRollout) -> TokenMetrics:
    """Compute the metrics of a rollout's tokens. Without a trainer's log-probs, both ratios are NaN."""
    rollout, scores = scored
    num_tokens = len(rollout.output_ids)
    is_appended = np.zeros(num_tokens, np.bool_)
    for start, end in rollout.appended_spans:
        is_appended[start:end] = True
    unknown = np.full(num_tokens, np.nan)
    sets = rollout.candidates
    sizes = np.zeros(num_tokens, np.int64) if sets is None else sets.sizes
    mass = entropy = masked = unknown
    if sets is not None and sets.has_logprobs:
        mass = np.where(sizes > 0, np.exp(sets.logprob_sum.astype(np.float64)), np.nan)
        entropy = np.where(sizes > 0, sets.entropy, np.nan)
        masked = np.where(sizes > 0, sets.masked_logprobs.astype(np.float64), np.nan)

    def ratio(logprobs: NDArray[np.float32] | None) -> Float64Array:
        # With a cap of 700, the ratio is finite in float64.
        return unknown if logprobs is None else np.exp(np.minimum(logprobs - masked, 700.0))

    return TokenMetrics(
        sizes=sizes,
        is_appended=is_appended,
        is_missing=(sizes == 0) & ~is_appended,
        mass=mass,
        entropy=entropy,
        ratio=ratio(scores.logprobs),
        replayed=ratio(scores.masked_logprobs),
    )
