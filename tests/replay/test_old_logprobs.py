"""The rollout's log-probs under the replayed distribution."""

from __future__ import annotations

import numpy as np
import pytest
from replay_oracle import EMPTY, SINGLE, random_sets

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import replayed_old_logprobs

SIZES = [3, SINGLE, EMPTY, 40, 2]


def test_is_the_log_softmax_over_each_set():
    sets = random_sets(SIZES, 50)
    got = replayed_old_logprobs(sets)
    assert str(got.dtype) == "torch.float32"
    for t, (ids, logprobs) in enumerate(sets):
        if len(ids) < 2:
            assert got[t] == 0
            continue
        mass = np.exp(logprobs.astype(np.float64))
        want = np.log(mass[list(ids).index(sets.sampled_ids[t])] / mass.sum())
        assert float(got[t]) == pytest.approx(want, abs=1e-5)
    assert replayed_old_logprobs(CandidateSets.empty(0)).shape == (0,)


def test_is_the_candidate_sets_own_value():
    """Enough random sets for every kind of rounding. The values are equal to the last bit."""
    for seed in range(20):
        sets = random_sets([SINGLE, EMPTY, 2, 7, 300] * 4, 500, seed=seed)
        got = replayed_old_logprobs(sets, output_ids=sets.sampled_ids).numpy()
        assert got.tobytes() == sets.masked_logprobs.tobytes()
        want = sets.sampled_logprobs - sets.log_kept_mass
        want[sets.sizes < 2] = 0.0
        assert got.tobytes() == want.tobytes()


def test_errors_name_the_argument_and_the_problem():
    sets = random_sets(SIZES, 50)
    with pytest.raises(InvalidInputError, match=r"output_ids: got shape \(6,\), expected \[5\]"):
        replayed_old_logprobs(sets, output_ids=[1] * 6)
    with pytest.raises(InvalidInputError, match=r"output_ids: got .* at position 0, and the sets say"):
        replayed_old_logprobs(sets, output_ids=np.roll(sets.sampled_ids, 1))
