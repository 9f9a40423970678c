"""Metrics are right for one pass, and equal however the tokens are split."""

from __future__ import annotations

import math
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest
import torch
from replay_oracle import random_sets

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import ReplayMetrics, replay_metrics, replayed_old_logprobs


def test_by_hand():
    half, eighth = math.log(0.5), math.log(0.125)
    sets = CandidateSets(
        [1, 2, 5, 7, 1, 4, 9, 3, 4],
        [half, eighth, half, 0.0, half, half, eighth, half, eighth],
        [0, 2, 3, 3, 4, 7, 9],
        [2, 5, 8, 7, 9, 3],
    )
    old = replayed_old_logprobs(sets)
    new = old + torch.tensor([math.log(2.0), 0.0, 5.0, 0.0, math.log(1.05), 9.0])
    metrics = replay_metrics(new, old, sets, loss_mask=[1, 1, 1, 1, 1, 0])
    summary = metrics.summary()
    assert metrics.tokens == 4  # without the empty span and the masked one
    assert summary["replay/ratio_mean"] == pytest.approx((2 + 1 + 1 + 1.05) / 4)
    assert summary["replay/ratio_max"] == pytest.approx(2)
    assert summary["replay/ratio_off_by_10_percent_share"] == 1 / 4
    assert summary["replay/log_ratio_mean"] == pytest.approx((math.log(2) + math.log(1.05)) / 4)
    assert summary["replay/kept_mass_mean"] == pytest.approx((0.625 + 0.5 + 1 + 1.125) / 4)
    assert summary["replay/set_size_mean"] == 7 / 4
    assert summary["replay/set_size_max"] == 3
    assert summary["replay/singleton_share"] == 2 / 4


def test_any_cut_adds_up_to_the_whole():
    rng = np.random.default_rng(0)
    sets = random_sets(rng.integers(0, 9, 60).tolist(), 50)
    old = replayed_old_logprobs(sets)
    new = old + torch.randn(60, generator=torch.Generator().manual_seed(0))
    mask = rng.random(60) < 0.7
    whole = replay_metrics(new, old, sets, loss_mask=mask)
    for cuts in ([0, 60], [0, 1, 1, 59, 60], [0, 7, 20, 33, 60]):
        parts = [slice(a, b) for a, b in pairwise(cuts)]
        total = ReplayMetrics()
        for part in parts:
            total += replay_metrics(new[part], old[part], sets[part], loss_mask=mask[part])
        assert astuple(total) == pytest.approx(astuple(whole), rel=1e-12)


def test_no_token_counts():
    summary = replay_metrics(torch.zeros(2), torch.zeros(2), CandidateSets.empty(2)).summary()
    assert summary["replay/tokens"] == 0
    assert math.isnan(summary["replay/ratio_mean"])


def test_a_token_that_the_rollout_gave_no_probability():
    sets = CandidateSets([1, 2], [0.0, -np.inf], [0, 2], [2])
    metrics = replay_metrics(torch.zeros(1), replayed_old_logprobs(sets), sets)
    assert metrics.ratios == math.inf
    # The policy does not have them either.
    assert math.isnan(replay_metrics(torch.tensor([-math.inf]), replayed_old_logprobs(sets), sets).ratios)


def test_errors_name_the_argument_and_the_problem():
    sets = random_sets([2, 3], 9)
    good = torch.zeros(2)
    with pytest.raises(InvalidInputError, match=r"^logprobs: got shape \(3,\), expected \[2\]"):
        replay_metrics(torch.zeros(3), good, sets)
    with pytest.raises(InvalidInputError, match=r"^old_logprobs: got shape \(2, 1\)"):
        replay_metrics(good, good[:, None], sets)
    with pytest.raises(InvalidInputError, match=r"^loss_mask: got shape \(1,\)"):
        replay_metrics(good, good, sets, loss_mask=[1])
    with pytest.raises(InvalidInputError, match=r"^loss_mask: got dtype float64 or a NaN"):
        replay_metrics(good, good, sets, loss_mask=[1, math.nan])
