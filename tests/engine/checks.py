"""What must hold of every answer, whatever was asked."""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_topp import CandidateSets

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


def check_nucleus(
    token_ids: np.ndarray, logprobs: np.ndarray, sampled_id: int, p: float, position: int
) -> None:
    """As far as a set alone can show: nothing in it lies below the cutoff, and nothing above is missing.

    Only the sampled token may stand where the mass above it has already reached p.
    """
    mass = np.exp(logprobs.astype(np.float64))
    above = np.array([mass[logprobs > each].sum() for each in logprobs])
    forced = above >= p + ROUNDING
    assert set(token_ids[forced]) <= {sampled_id}, (
        f"position {position}: {token_ids[forced]} below the cutoff"
    )
    assert mass[~forced].sum() >= p - ROUNDING, (
        f"position {position}: kept mass {mass[~forced].sum()} for p {p}"
    )
