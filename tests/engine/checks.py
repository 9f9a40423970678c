"""What must hold of every answer, whatever was asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_topp import CandidateSets
from sglang_topp_client import Rollout

# Where the mass above a cutoff lies this near to p, both neighbours are right answers.
ROUNDING = 1e-5


def checked_sets(answer: dict[str, Any], p: float) -> CandidateSets:
    """The answer's sets, after checking that they are one per token, complete, and SGLang's own."""
    meta_info, output_ids = answer["meta_info"], answer["output_ids"]
    reported = meta_info["output_token_logprobs"]
    assert [token_id for _, token_id, _ in reported] == output_ids
    assert meta_info["completion_tokens"] == len(output_ids)
    sets = CandidateSets.from_meta_info(meta_info, output_ids, vocab_size=512)
    np.testing.assert_array_equal(sets.sampled_logprobs, np.array([each[0] for each in reported], np.float32))
    for t in range(len(sets)):
        check_nucleus(*sets[t], output_ids[t], p, t)
    return sets


def check_rollout(rollout: Rollout, p: float) -> None:
    """The same of a rollout that a client has decoded."""
    assert rollout.candidates is not None
    assert len(rollout.candidates) == len(rollout.output_ids) == len(rollout.logprobs)
    np.testing.assert_array_equal(rollout.candidates.sampled_ids, rollout.output_ids)
    np.testing.assert_array_equal(rollout.candidates.sampled_logprobs, rollout.logprobs)
    for t, (token_ids, logprobs) in enumerate(rollout.candidates):
        check_nucleus(token_ids, logprobs, int(rollout.output_ids[t]), p, t)
    assert (rollout.masked_logprobs <= 1e-6).all()


def check_nucleus(
    token_ids: np.ndarray, logprobs: np.ndarray, sampled_id: int, p: float, position: int
) -> None:
    """As far as a set alone can show: nothing in it lies below the cutoff, and nothing above is missing.

    Only the sampled token may stand where the mass above it has already reached p.
    """
    assert (np.diff(logprobs) <= 0).all(), f"position {position}: not in order"
    mass = np.exp(logprobs.astype(np.float64))
    above = np.concatenate(([0.0], np.cumsum(mass)))[np.searchsorted(-logprobs, -logprobs)]
    forced = above >= p + ROUNDING
    assert set(token_ids[forced]) <= {sampled_id}, (
        f"position {position}: {token_ids[forced]} below the cutoff"
    )
    assert mass[~forced].sum() >= p - ROUNDING, (
        f"position {position}: kept mass {mass[~forced].sum()} for p {p}"
    )
