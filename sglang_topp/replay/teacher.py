"""What candidate sets say of the teacher that they came from: a distribution that sums to 1.

In float64 and on the host: the log-probs are float32, and what they leave for the rest is a small difference.

Shape legend: T positions, n candidates in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_topp._checks import LOWEST, NO_TOKEN
from sglang_topp._csr import first_true, offsets_of, rows_of
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError

__all__ = ["SMALLEST_TAIL", "Teacher"]

BoolArray: TypeAlias = NDArray[np.bool_]
Float64Array: TypeAlias = NDArray[np.float64]

# What float32 log-probs that add up to nearly 1 leave open: whether a tail has this much or nothing.
SMALLEST_TAIL = 1e-6
# `logprob_bits=16` rounds each by 1e-3 at most.
_LARGEST_MASS = 1.002


@dataclass(frozen=True)
class Teacher:
    """The candidates, and where there is one the tail, with log-probs whose exponentials add up to 1."""

    sets: CandidateSets
    """Of the T positions, empty where one does not count; nothing of zero probability is in them."""
    logprobs: Float64Array
    """[n]: of their entries."""
    tail: Float64Array | None
    """[T]: the log-prob of the tail, where there is one."""

    @classmethod
    def of(
        cls, sets: CandidateSets, counts: BoolArray, *, num_ids: int | None, smallest_tail: float
    ) -> Teacher:
        """The teacher at the positions that count.

        Args:
            sets: with log-probs over the whole vocabulary.
            counts: [T].
            num_ids: the size of the vocabulary; None for no tail.
            smallest_tail: what a smaller tail is taken for, unless no id is outside.

        Raises:
            InvalidInputError: the sets have no log-probs.
            InvalidCandidateSetsError: the probabilities of a set add up to more than 1.
        """
        if not sets.has_logprobs:
            raise InvalidInputError(
                "teacher_sets: these sets have no log-probs; a request for top_logprobs_p gives them"
            )
        sets = _only(sets, np.repeat(counts, sets.sizes) & (sets.logprobs > LOWEST))
        logprobs = sets.logprobs.astype(np.float64)
        log_mass = _log_mass(logprobs, sets)
        if (t := first_true(log_mass > np.log(_LARGEST_MASS))) is not None:
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
    """The sets without the entries that are not `kept`; the sampled token need not be, nor is it known."""
    if not kept.all():
        sizes = np.bincount(rows_of(sets.offsets)[kept], minlength=len(sets))
        token_ids, logprobs, offsets = sets.token_ids[kept], sets.logprobs[kept], offsets_of(sizes)
    else:
        token_ids, logprobs, offsets = sets.token_ids, sets.logprobs, sets.offsets
    sampled = np.full(len(sets), NO_TOKEN, np.int32)
    filled = np.flatnonzero(np.diff(offsets))
    sampled[filled] = token_ids[offsets[filled]]
    return CandidateSets._trusted(token_ids, logprobs, offsets, sampled)


def _log_mass(logprobs: Float64Array, sets: CandidateSets) -> Float64Array:
    """[T]: the log of the sum over each set; 0 where it is empty."""
    out = np.zeros(len(sets), np.float64)
    filled = np.flatnonzero(sets.sizes)
    if len(filled):
        starts = sets.offsets[filled]
        peak = logprobs[starts]  # the first is the highest
        shifted = np.exp(logprobs - np.repeat(peak, sets.sizes[filled]))
        out[filled] = peak + np.log(np.add.reduceat(shifted, starts))
    return out
