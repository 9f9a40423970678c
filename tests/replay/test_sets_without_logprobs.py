"""Sets without log-probs, as from a native sampling mask: the policy's scores do not need them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from replay_oracle import EMPTY, SINGLE, head_logits, random_sets, scores, targets_of

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import (
    Layout,
    replay_metrics,
    replayed_old_logprobs,
    score,
    score_logits,
)

SIZES = [3, SINGLE, EMPTY, 40, 2, 7]
VOCAB = 50


def test_scores_and_gradients_are_those_of_the_definition() -> None:
    sets = random_sets(SIZES, VOCAB).without_logprobs()
    assert not sets.has_logprobs
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 8, generator=generator).double() for rows in (len(sets), VOCAB))
    hidden.requires_grad_()
    targets = targets_of(sets)
    logits = head_logits(hidden, weight)
    expected = scores(logits, targets, sets)
    (gradient,) = torch.autograd.grad(expected["logprobs"].sum(), hidden, retain_graph=True)
    for got in (
        score(hidden, weight, targets, sets, entropy=True),
        score_logits(logits, targets, sets, entropy=True),
    ):
        torch.testing.assert_close(got.logprobs, expected["logprobs"])
        torch.testing.assert_close(got.entropy, expected["entropy"])
        torch.testing.assert_close(
            torch.autograd.grad(got.logprobs.sum(), hidden, retain_graph=True)[0], gradient
        )


def test_a_layout_selects_them() -> None:
    sets = random_sets(SIZES, VOCAB).without_logprobs()
    rows = Layout().select_rows([2, 1], [4, 2])
    assert rows.take_sets([sets[:4], sets[4:]]) == sets.take(rows.positions) == sets


def test_old_logprobs_are_refused() -> None:
    sets = random_sets(SIZES, VOCAB).without_logprobs()
    with pytest.raises(InvalidInputError, match="logprobs: these candidate sets have none"):
        replayed_old_logprobs(sets)


def test_metrics_do_without_the_kept_mass() -> None:
    sets = random_sets(SIZES, VOCAB)
    new, old = torch.full((6,), -1.0), torch.full((6,), -1.5)
    known, got = (replay_metrics(new, old, each) for each in (sets, sets.without_logprobs()))
    assert math.isnan(got.kept_mass)
    assert math.isnan((known + got).summary()["replay/kept_mass_mean"])
    same, expected = got.summary(), known.summary()
    del same["replay/kept_mass_mean"], expected["replay/kept_mass_mean"]
    np.testing.assert_equal(same, expected)
    nothing = replay_metrics(new, old, sets.without_logprobs(), loss_mask=[0] * 6)
    assert nothing.kept_mass == 0
