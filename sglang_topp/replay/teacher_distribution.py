"""A teacher's distribution over the candidates of each position, for distillation.

The distribution can have one more outcome, the tail, which stands for all ids outside of the candidate set.
The host computes the distribution in float64, because the tail's mass is the small difference between 1 and
the mass of the candidates.

Shape legend: T positions, n candidates in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import first_true, log_sum_exp, offsets_of, rows_of
from sglang_topp.candidates.validation import LOWEST, MASS_ERROR, NO_TOKEN
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError

__all__ = ["SMALLEST_TAIL", "TeacherDistribution"]

BoolArray: TypeAlias = NDArray[np.bool_]
Float64Array: TypeAlias = NDArray[np.float64]

# With float32 log-probs, a tail below this probability cannot be distinguished from rounding errors.
SMALLEST_TAIL = 1e-6


@dataclass(frozen=True)
class TeacherDistribution:
    """The teacher's log-probs of the candidates, and optionally of the tail: all ids outside the set.

    The probabilities of the candidates and the tail sum to 1 at each position.
    """

    sets: CandidateSets
    """The teacher's sets of T positions, without tokens of zero probability.

    A position that the loss ignores has an empty set.
    """
    logprobs: Float64Array
    """[n]: the normalized log-probs of the candidates."""
    tail: Float64Array | None
    """[T]: the normalized log-prob of the tail, or None without a tail."""

    @classmethod
    def of(
        cls, sets: CandidateSets, counts: BoolArray, *, num_ids: int | None, smallest_tail: float
    ) -> TeacherDistribution:
        """Build the teacher's distribution at the positions where `counts` is True.

        Args:
            sets: the teacher's sets, with log-probs over the whole vocabulary.
            counts: bool [T], True at the positions that enter the loss.
            num_ids: the size of the vocabulary, or None for a distribution without a tail.
            smallest_tail: the lower limit for a tail's probability. The method raises lower probabilities to
                `smallest_tail`. The limit does not apply to a set that is the whole vocabulary. The tail of
                such a set has probability 0.

        Raises:
            InvalidInputError: the sets have no log-probs.
            InvalidCandidateSetsError: the probabilities of a set sum to more than 1.002 (1 + `MASS_ERROR`).
        """
        if not sets.has_logprobs:
            raise InvalidInputError(
                "teacher_sets: these sets have no log-probs; a request for top_logprobs_p gives them"
            )
        sets = _only(sets, np.repeat(counts, sets.sizes) & (sets.logprobs > LOWEST))
        logprobs = sets.logprobs.astype(np.float64)
        log_mass = log_sum_exp(logprobs, sets.offsets)
        if (t := first_true(log_mass > np.log1p(MASS_ERROR))) is not None:
            raise InvalidCandidateSetsError(
                "teacher_sets",
                f"the probabilities at position {t} add up to {np.exp(log_mass[t]):.6g}, expected at most 1:"
                " log-probs over the whole vocabulary",
            )
        log_total, log_tail = log_mass, None
        if num_ids is not None:
            tail = np.where(sets.sizes == num_ids, 0.0, np.maximum(-np.expm1(log_mass), smallest_tail))
            with np.errstate(divide="ignore"):
                log_tail = np.log(tail)
            log_total = np.logaddexp(log_mass, log_tail)
            log_tail = log_tail - log_total
        return cls(sets, logprobs - np.repeat(log_total, sets.sizes), log_tail)


def _only(sets: CandidateSets, kept: BoolArray) -> CandidateSets:
    """Return the sets without the candidates where `kept` is False.

    A set must hold its sampled token, and this token may be among the removed candidates. The first remaining
    candidate of each set therefore becomes the set's sampled token.
    """
    if not kept.all():
        sizes = np.bincount(rows_of(sets.offsets)[kept], minlength=len(sets))
        token_ids, logprobs, offsets = sets.token_ids[kept], sets.logprobs[kept], offsets_of(sizes)
    else:
        token_ids, logprobs, offsets = sets.token_ids, sets.logprobs, sets.offsets
    sampled = np.full(len(sets), NO_TOKEN, np.int32)
    filled = np.flatnonzero(np.diff(offsets))
    sampled[filled] = token_ids[offsets[filled]]
    return CandidateSets.unchecked(token_ids, logprobs, offsets, sampled)
