"""The reference implementation equals the formula in exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import inf, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.nucleus import reference

weights = st.lists(st.integers(0, 50) | st.sampled_from([0, 1, 1, 1]), min_size=1, max_size=25).filter(any)


@given(weights, st.integers(1, 1000))
@settings(max_examples=500)
def test_nucleus_equals_the_formula(row, thousandths):
    # p has the denominator 10^6 in lowest terms, so every mass is at least 1 / (10^6 sum(row)) away from it.
    q = [Fraction(weight, sum(row)) for weight in row]
    p = Fraction(thousandths, 1000) - Fraction(1, 10**6)
    expected = {i for i in range(len(q)) if q[i] > 0 and sum(other for other in q if other > q[i]) < p}
    logprobs = [log(share) if share else -inf for share in q]
    got = reference.nucleus(logprobs, float(p))
    assert set(got) == expected
    assert len(got) == len(expected)


@given(weights)
def test_p_of_one_keeps_every_possible_token(row):
    # The row need not be normalized: its sum is far below 1, 1, or far above 1.
    for shift in (-2.0, 0.0, 2.0):
        logprobs = [log(weight / sum(row)) + shift if weight else -inf for weight in row]
        assert set(reference.nucleus(logprobs, 1.0)) == {i for i, weight in enumerate(row) if weight}


@given(weights, st.floats(0.01, 0.99))
def test_nucleus_without_ties_is_the_shortest_prefix_that_reaches_p(row, p):
    distinct = sorted({weight for weight in row if weight}, reverse=True)
    logprobs = [log(weight / sum(distinct)) for weight in distinct]
    kept = reference.nucleus(logprobs, p)
    assert kept == list(range(len(kept)))
    masses = [sum(distinct[:count]) / sum(distinct) for count in range(len(distinct) + 1)]
    if all(abs(mass - p) > 1e-6 for mass in masses):
        assert masses[len(kept) - 1] < p <= masses[len(kept)]


@pytest.mark.parametrize(
    ("p", "sampled", "expected"),
    [
        (0.3, None, [[3], [0, 1, 2, 3]]),
        (0.5 + 1e-6, None, [[3, 0, 2], [0, 1, 2, 3]]),
        (1.0, None, [[3, 0, 2], [0, 1, 2, 3]]),
        (0.3, [1, 2], [[3, 1], [0, 1, 2, 3]]),
        ([0.0, 0.3], [1, 2], [[], [0, 1, 2, 3]]),
        ([0.3, 0.0], [3, 2], [[3], []]),
    ],
)
def test_sets_computed_by_hand(p, sampled, expected):
    logprobs = torch.tensor([[0.25, 0.0, 0.25, 0.5], [0.25] * 4]).log()
    ids, values, offsets = reference.top_p_candidates(logprobs, p, sampled)
    rows = [ids[offsets[b] : offsets[b + 1]].tolist() for b in range(2)]
    assert rows == expected
    flat = [(b, token) for b, row in enumerate(rows) for token in row]
    assert values.tolist() == [logprobs[at].item() for at in flat]
