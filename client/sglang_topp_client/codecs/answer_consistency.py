"""Check an answer's candidate sets against the answer's tokens and log-probs, and the requested top-p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import MissingCandidateSetsError, WireError
from sglang_topp.formats.field_parsing import renaming_errors

__all__ = ["check_kept_mass", "check_sets"]


def check_sets(
    candidates: CandidateSets,
    output_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    *,
    field: str,
    may_be_extended: bool = False,
) -> None:
    """Raise WireError unless each set holds its sampled token, with exactly the reported log-prob.

    The engine computes the sets and the tokens' log-probs from the same float32 numbers, so the check
    compares the log-probs for equality. The check therefore also rejects sets of another position or request,
    and log-probs that were computed at another temperature.

    Args:
        candidates: the candidate sets of T positions.
        output_ids: int32 [T].
        logprobs: float32 [T], the log-probs of the sampled tokens as the engine reports them.
        field: the name of the sets in error messages.
        may_be_extended: whether empty sets are accepted. Tokens that `Rollout.extend` appended have empty
            sets, and the log-prob 0.
    """
    if len(candidates) != len(output_ids):
        raise WireError(field, f"got {len(candidates)} positions for {len(output_ids)} output_ids")
    if len(wrong := np.flatnonzero(candidates.sampled_ids != output_ids)):
        t = int(wrong[0])
        raise WireError(
            field,
            f"got sampled token {candidates.sampled_ids[t]} at position {t}, expected {output_ids[t]}",
        )
    if not may_be_extended and len(empty := np.flatnonzero(candidates.sizes == 0)):
        raise MissingCandidateSetsError(field, f"no candidate set at position {int(empty[0])}")
    if not candidates.has_logprobs:
        raise WireError(field, "got sets without log-probs")
    if len(wrong := np.flatnonzero(candidates.sampled_logprobs != logprobs)):
        t = int(wrong[0])
        raise WireError(
            field,
            f"got log-prob {candidates.sampled_logprobs[t]} of the sampled token at position {t}, expected"
            f" {logprobs[t]}, as the engine reports ({len(wrong)} of {len(logprobs)} positions differ)",
        )


def check_kept_mass(candidates: CandidateSets, p: float, *, field: str) -> None:
    """Raise WireError if a set's total probability is too low or too high for the threshold `p`.

    `CandidateSets.check_kept_mass` defines the limits.

    Args:
        candidates: the candidate sets of T positions.
        p: the requested threshold, in (0, 1].
        field: the name of the sets in error messages.
    """
    with renaming_errors({"logprobs": field}):
        candidates.check_kept_mass(p)
