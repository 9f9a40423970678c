"""Per-token numbers of one rollout: set size, kept mass, entropy, and importance ratios.

T is the number of the rollout's output tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_topp_client import ScoredRollout

__all__ = ["TokenMetrics", "token_metrics"]

Float64Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TokenMetrics:
    """The metrics of one rollout's T output tokens.

    Attributes:
        sizes: int64 [T], the number of candidates in each token's set, or 0 for a token without a set.
        is_appended: bool [T], whether a tool or an environment appended the token.
        is_missing: bool [T], whether the token was generated but has no set. A trainer must not train on
            tokens with missing sets.
        mass: float64 [T], the kept mass: the total probability of each token's set, or NaN if unknown.
        entropy: float64 [T], the entropy of the distribution within each token's set, in nats, or NaN if
            unknown.
        log_ratio: float64 [T], the log of the importance ratio without replay: the trainer's log-prob over
            the whole vocabulary minus the rollout's log-prob within the set. The log-ratio is NaN if one of
            the two log-probs is unknown.
        log_replayed_ratio: float64 [T], the log of the importance ratio with replay: the trainer's log-prob
            minus the rollout's log-prob, both within the set. The log-ratio is NaN if one of the two
            log-probs is unknown.
    """

    sizes: NDArray[np.int64]
    is_appended: NDArray[np.bool_]
    is_missing: NDArray[np.bool_]
    mass: Float64Array
    entropy: Float64Array
    log_ratio: Float64Array
    log_replayed_ratio: Float64Array

    @property
    def log_ratio_or_mass(self) -> Float64Array:
        """float64 [T]: `log_ratio`, with an estimate for each token whose `log_ratio` is NaN.

        The estimate is the log of the kept mass. If the trainer has the sampler's weights, the true log-ratio
        equals this estimate.
        """
        with np.errstate(divide="ignore"):
            return np.where(np.isnan(self.log_ratio), np.log(self.mass), self.log_ratio)


def token_metrics(scored: ScoredRollout) -> TokenMetrics:
    """Compute the metrics of a rollout's tokens.

    Without a trainer's log-probs, both log-ratios of every token are NaN.
    """
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
    return TokenMetrics(
        sizes=sizes,
        is_appended=is_appended,
        is_missing=(sizes == 0) & ~is_appended,
        mass=mass,
        entropy=entropy,
        log_ratio=unknown if scores.logprobs is None else scores.logprobs - masked,
        log_replayed_ratio=unknown if scores.masked_logprobs is None else scores.masked_logprobs - masked,
    )
