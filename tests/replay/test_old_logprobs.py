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


def test_reported_logprobs_take_the_place_of_those_in_the_sets():
    sets = random_sets(SIZES, 50)
    reported = sets.sampled_logprobs - 0.25
    reported[2] = np.nan  # a tool's token: nothing was reported
    got = replayed_old_logprobs(sets, output_ids=sets.sampled_ids, logprobs=reported)
    want = replayed_old_logprobs(sets) - 0.25
    want[[1, 2]] = 0
    assert got.tolist() == want.tolist()


def test_errors_say_what_and_where():
    sets = random_sets(SIZES, 50)
    with pytest.raises(InvalidInputError, match=r"logprobs: got shape \(4,\), expected \[5\]"):
        replayed_old_logprobs(sets, logprobs=[-1.0] * 4)
    with pytest.raises(InvalidInputError, match=r"output_ids: got shape \(6,\), expected \[5\]"):
        replayed_old_logprobs(sets, output_ids=[1] * 6)
    with pytest.raises(InvalidInputError, match=r"output_ids: got .* at position 0, and the sets say"):
        replayed_old_logprobs(sets, output_ids=np.roll(sets.sampled_ids, 1))
    with pytest.raises(InvalidInputError, match="logprobs: got nan at position 3"):
        replayed_old_logprobs(sets, logprobs=[-1.0, -1.0, -1.0, np.nan, -1.0])
    with pytest.raises(InvalidInputError, match=r"logprobs: got 1\.0 at position 0"):
        replayed_old_logprobs(sets, logprobs=[1.0] * 5)
