"""Old log-probs for importance ratios, and metrics: ratios, kept mass, and set sizes.

Instead of means, `ReplayMetrics` stores sums, counts, and maxima over the tokens. The metrics of several
micro-batches or ranks can therefore be combined into the exact metrics of all their tokens.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import first_true
from sglang_topp.candidates.torch_tensors import to_numpy
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import reduce_max, reduce_sum
from sglang_topp.replay.row_selection import as_bool_mask


@dataclass(frozen=True)
class ReplayMetrics:
    """Sums and maxima over the tokens that have a candidate set and a loss mask other than 0.

    `a + b` combines the metrics of two groups of tokens. `summary()` returns means and maxima.
    `ReplayMetrics()` holds the metrics of zero tokens.
    """

    tokens: float = 0.0
    ratios: float = 0.0
    """Sum of `exp(logprob - old_logprob)`."""
    far_ratios: float = 0.0
    """The number of tokens whose ratio differs from 1 by more than 10 %."""
    log_ratios: float = 0.0
    kept_mass: float = 0.0
    """Sum of the tokens' kept mass, or NaN if any set has no log-probs."""
    candidates: float = 0.0
    singletons: float = 0.0
    """The number of tokens whose set has only one candidate, and which therefore have no gradient."""
    max_ratio: float = 0.0
    max_set_size: float = 0.0

    def __add__(self, other: ReplayMetrics) -> ReplayMetrics:
        """Combine the metrics of two groups of tokens."""
        both = np.array([astuple(self), astuple(other)])
        return _metrics_of(both.sum(axis=0), both.max(axis=0))

    def all_reduce(
        self, group: dist.ProcessGroup | None, device: torch.device | str = "cpu"
    ) -> ReplayMetrics:
        """Combine the metrics of all ranks in `group`, and return the combined metrics on every rank.

        The ranks must hold different tokens, as in a data-parallel or context-parallel group. Do not pass a
        tensor-parallel group, because its ranks hold the same tokens. The group's backend must support
        `device`.
        """
        sums = torch.tensor(astuple(self), dtype=torch.float64, device=device)
        maxima = reduce_max(sums.clone(), group)
        return _metrics_of(reduce_sum(sums, group), maxima)

    def summary(self) -> dict[str, float]:
        """Return means and maxima by name, for a logger.

        A mean over zero tokens is NaN. A mean is also NaN if the sum of its values is NaN.
        """

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
        }


def _metrics_of(sums: np.ndarray | Tensor, maxima: np.ndarray | Tensor) -> ReplayMetrics:
    """Return metrics from the sums and the maxima of all fields. The last two fields are maxima."""
    return ReplayMetrics(*sums[:-2].tolist(), *maxima[-2:].tolist())


def replay_metrics(
    logprobs: Tensor,
    old_logprobs: Tensor,
    candidates: CandidateSets,
    *,
    loss_mask: ArrayLike | None = None,
) -> ReplayMetrics:
    """Compute the metrics of T positions in float64.

    Args:
        logprobs: [T], the policy's log-probs over the candidate sets (`Scores.logprobs`).
        old_logprobs: [T], the rollout's log-probs over the candidate sets (`replayed_old_logprobs`).
        candidates: the candidate sets of the T positions.
        loss_mask: [T]. The metrics ignore positions with a mask of 0 or with an empty set.

    Raises:
        InvalidInputError: the length of an argument is not T.
    """
    length = len(candidates)
    for name, values in (("logprobs", logprobs), ("old_logprobs", old_logprobs)):
        if values.shape != (length,):
            raise InvalidInputError(f"{name}: got shape {tuple(values.shape)}, expected [{length}]")
    counts = candidates.sizes > 0
    if loss_mask is not None:
        counts &= as_bool_mask(loss_mask, length)

    def numbers(values: Tensor) -> np.ndarray:
        return values.detach().to("cpu", torch.float64).numpy()[counts]

    # If a token has probability 0 in the rollout but not in the policy, the token's importance ratio is inf.
    # If the token has probability 0 in the rollout and in the policy, the ratio is NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        log_ratios = numbers(logprobs) - numbers(old_logprobs)
        ratios = np.exp(log_ratios)
    sizes, kept_mass = candidates.sizes[counts], float("nan") if counts.any() else 0.0
    if candidates.has_logprobs:
        kept_mass = float(np.exp(candidates.log_kept_mass[counts], dtype=np.float64).sum())
    return ReplayMetrics(
        tokens=float(len(sizes)),
        ratios=float(ratios.sum()),
        far_ratios=float(np.count_nonzero(np.abs(ratios - 1) > 0.1)),
        log_ratios=float(log_ratios.sum()),
        kept_mass=kept_mass,
        candidates=float(sizes.sum()),
        singletons=float(np.count_nonzero(sizes == 1)),
        max_ratio=float(ratios.max(initial=0.0)),
        max_set_size=float(sizes.max(initial=0)),
    )


def replayed_old_logprobs(candidates: CandidateSets, *, output_ids: ArrayLike | None = None) -> Tensor:
    """Return the old log-probs, `candidates.masked_logprobs`, as a float32 tensor [T] on the CPU.

    The old log-prob is exactly 0 at a position whose set is empty or has one candidate. The policy's log-prob
    over the candidate set is 0 at such a position too, so the importance ratio of the position is 1.

    Args:
        candidates: the sets of the T response tokens.
        output_ids: integers [T], the response's token ids. If given, `output_ids` must equal the sampled
            tokens.

    Raises:
        InvalidInputError: the sets have no log-probs, or `output_ids` differ from the sampled tokens. Sets
            from a sampling mask of unpatched SGLang may have no log-probs. For such sets, use SGLang's
            `output_token_sampling_logprobs` as old log-probs.
    """
    if output_ids is not None:
        ids = to_numpy(output_ids)
        if ids.shape != (len(candidates),):
            raise InvalidInputError(
                f"output_ids: got shape {ids.shape}, expected [{len(candidates)}], one per position"
            )
        if (t := first_true((candidates.sizes > 0) & (ids != candidates.sampled_ids))) is not None:
            raise InvalidInputError(
                f"output_ids: got {ids[t]} at position {t}, and the sets say that"
                f" {candidates.sampled_ids[t]} was sampled; they are of another response, or shifted"
            )
    return torch.tensor(candidates.masked_logprobs)
