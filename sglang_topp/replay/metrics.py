"""What to watch while replaying: importance ratios, kept mass, set sizes, forced tokens.

Kept as sums, counts and maxima over tokens, so that samples of any length, micro-batches and ranks
add up to what one pass over all tokens would give. A mean of means would not.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

from sglang_topp._tensors import to_numpy
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.layout import counted
from sglang_topp.replay.parallel import reduce_max, reduce_sum

__all__ = ["ReplayMetrics", "replay_metrics"]

_MAXIMA = ("max_ratio", "max_set_size")


@dataclass(frozen=True)
class ReplayMetrics:
    """Sums over the tokens that count: those with a candidate set whose loss mask is not 0.

    `a + b` is the metrics of both; `summary()` the means. The default is the metrics of no token.
    """

    tokens: float = 0.0
    ratios: float = 0.0
    """Sum of `exp(logprob - old_logprob)`."""
    far_ratios: float = 0.0
    """Tokens whose ratio is off by more than 10 %."""
    log_ratios: float = 0.0
    kept_mass: float = 0.0
    """Sum of `exp(logprob_sum)`; NaN as soon as one set has no log-probs."""
    candidates: float = 0.0
    singletons: float = 0.0
    """Tokens that were the only candidate: no choice, no gradient."""
    judged_tokens: float = 0.0
    """Tokens for which `p` was given, so that it is known whether they were forced in."""
    forced_tokens: float = 0.0
    """Of these, the sampled tokens that lie outside their own nucleus."""
    max_ratio: float = 0.0
    max_set_size: float = 0.0

    def __add__(self, other: ReplayMetrics) -> ReplayMetrics:
        """The metrics of the tokens of both."""
        return ReplayMetrics(
            *(
                max(mine, theirs) if field.name in _MAXIMA else mine + theirs
                for field, mine, theirs in zip(fields(self), astuple(self), astuple(other), strict=True)
            )
        )

    def all_reduce(
        self, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
    ) -> ReplayMetrics:
        """The metrics of the tokens of all ranks of the group, on each of them.

        Only over ranks that hold different tokens (data and context parallel): ranks of a
        tensor-parallel group all hold the same. `device` is one that the group's backend takes.
        """
        sums = torch.tensor(astuple(self), dtype=torch.float64, device=device)
        maxima = reduce_max(sums.clone(), group).tolist()
        reduce_sum(sums, group)
        return ReplayMetrics(
            *(
                high if field.name in _MAXIMA else total
                for field, total, high in zip(fields(self), sums.tolist(), maxima, strict=True)
            )
        )

    def summary(self) -> dict[str, float]:
        """Names for a logger, to floats; NaN where no token counts, or it is not known."""

        def mean(total: float, count: float) -> float:
            return total / count if count else float("nan")

        return {
            "replay/tokens": self.tokens,
            "replay/ratio_mean": mean(self.ratios, self.tokens),
            "replay/ratio_max": self.max_ratio,
            "replay/ratio_off_by_10_percent_share": mean(self.far_ratios, self.tokens),
            "replay/log_ratio_mean": mean(self.log_ratios, self.tokens),
            "replay/kept_mass_mean": mean(self.kept_mass, self.tokens),
            "replay/set_size_mean": mean(self.candidates, self.tokens),
            "replay/set_size_max": self.max_set_size,
            "replay/singleton_share": mean(self.singletons, self.tokens),
            "replay/forced_share": mean(self.forced_tokens, self.judged_tokens),
        }


def replay_metrics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    candidates: CandidateSets,
    *,
    loss_mask: ArrayLike | None = None,
    p: float | ArrayLike | None = None,
) -> ReplayMetrics:
    """The metrics of T positions, in float64.

    Args:
        logprobs: [T], the policy's log-probs over the support (`Scores.logprobs`).
        old_logprobs: [T], the rollout's (`replayed_old_logprobs`).
        candidates: the sets of the T positions.
        loss_mask: [T]; positions where it is 0 do not count. Positions with an empty set never do.
        p: the top-p threshold, one number or [T], to tell which sampled tokens were forced in: those
            with a mass of at least `p` strictly above them; at 1, those of zero probability.

    Raises:
        InvalidInputError: a length is not T, `p` is not above 0 and at most 1, or is given for sets
            without log-probs.
    """
    length = len(candidates)
    for name, values in (("logprobs", logprobs), ("old_logprobs", old_logprobs)):
        if values.shape != (length,):
            raise InvalidInputError(f"{name}: got shape {tuple(values.shape)}, expected [{length}]")
    counts = candidates.sizes > 0
    if loss_mask is not None:
        counts &= counted(loss_mask, length)

    def numbers(values: Tensor) -> np.ndarray:
        return values.detach().to("cpu", torch.float64).numpy()[counts]

    # A sampled token that the rollout gave no probability: inf, or NaN where the policy gives none either.
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratios = numbers(logprobs) - numbers(old_logprobs)
        ratios = np.exp(log_ratios)
    sizes = candidates.sizes[counts]
    judged = forced = 0.0
    if p is not None:
        thresholds = to_numpy(p).astype(np.float64)
        if thresholds.shape not in ((), (length,)):
            raise InvalidInputError(f"p: got shape {thresholds.shape}, expected one number or [{length}]")
        if (wrong := ~((thresholds > 0) & (thresholds <= 1))).any():
            raise InvalidInputError(f"p: got {thresholds[wrong][0]}, expected above 0 and at most 1")
        judged = float(len(sizes))
        outside = _mass_above_sampled(candidates) >= thresholds
        # p = 1 keeps all that is possible, whatever float32 log-probs add up to.
        possible = candidates.sampled_logprobs > np.finfo(np.float32).min
        forced = float(np.count_nonzero((outside & ~((thresholds >= 1) & possible))[counts]))
    return ReplayMetrics(
        tokens=float(len(sizes)),
        ratios=float(ratios.sum()),
        far_ratios=float(np.count_nonzero(np.abs(ratios - 1) > 0.1)),
        log_ratios=float(log_ratios.sum()),
        kept_mass=_kept_mass(candidates, counts),
        candidates=float(sizes.sum()),
        singletons=float(np.count_nonzero(sizes == 1)),
        judged_tokens=judged,
        forced_tokens=forced,
        max_ratio=float(ratios.max(initial=0.0)),
        max_set_size=float(sizes.max(initial=0)),
    )


def _kept_mass(candidates: CandidateSets, counts: np.ndarray) -> float:
    if not candidates.has_logprobs:
        return float("nan") if counts.any() else 0.0
    return float(np.exp(candidates.logprob_sum[counts].astype(np.float64)).sum())


def _mass_above_sampled(candidates: CandidateSets) -> np.ndarray:
    """float64 [T]: the mass of the candidates that are strictly likelier than the sampled token."""
    sampled = np.repeat(candidates.sampled_logprobs, candidates.sizes)
    mass = np.where(candidates.logprobs > sampled, np.exp(candidates.logprobs, dtype=np.float64), 0.0)
    running = np.concatenate([[0.0], np.cumsum(mass)])
    return np.diff(running[candidates.offsets])
