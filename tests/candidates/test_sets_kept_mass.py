"""`CandidateSets.check_kept_mass`, just above and just below its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidCandidateSetsError


def set_of_mass(mass: float) -> CandidateSets:
    """Return one position whose set keeps about `mass`. Its log-probs are not bfloat16 numbers."""
    logprobs = np.log(np.array([0.4, 0.35, 0.25]) * mass).astype(np.float32)
    assert (logprobs.view(np.uint32) & 0xFFFF).any()
    return CandidateSets([0, 1, 2], logprobs, [0, 3], [0])


@pytest.mark.parametrize("about", [1e-9, 1e-4, 0.01, 0.033, 0.5, 0.9, 0.95, 0.99, 0.9979])
def test_p_is_checked_to_a_millionth(about):
    sets = set_of_mass(about)
    mass = float(np.exp(sets.logprobs.astype(np.float64)).sum())
    for p in (mass, mass * (1 + 9e-7), about / 2):
        sets.check_kept_mass(p)
    for p in (mass * (1 + 1.1e-6), mass * 1.001 if about < 0.99 else 1.0):
        with pytest.raises(
            InvalidCandidateSetsError, match=f"add up to a mass of {mass:.9g} at .* least {p:.9g}, the p"
        ):
            sets.check_kept_mass(p)


@pytest.mark.parametrize(("mass", "p"), [(0.87, 0.90), (0.01, 0.033), (0.899, 0.9)])
def test_what_a_thirtieth_would_let_pass(mass, p):
    with pytest.raises(InvalidCandidateSetsError, match=f"expected at least {p}, the p"):
        set_of_mass(mass).check_kept_mass(p)


@pytest.mark.parametrize("p", [0.9981, 0.9999, 1.0])
def test_near_one_a_whole_row_may_weigh_less(p):
    """The float32 log-probs of a whole row may sum to less than p."""
    set_of_mass(0.99801).check_kept_mass(p)
    with pytest.raises(InvalidCandidateSetsError, match="expected at least"):
        set_of_mass(0.99799).check_kept_mass(p)


def test_more_than_all_mass():
    set_of_mass(1.00199).check_kept_mass(0.9)
    with pytest.raises(
        InvalidCandidateSetsError, match=r"add up to a mass of 1\.0020\d*.*expected at most 1"
    ):
        set_of_mass(1.00202).check_kept_mass(0.9)
    with pytest.raises(InvalidCandidateSetsError, match=r"add up to a mass of 2\.7"):
        CandidateSets([0, 1, 2], np.log([0.9] * 3), [0, 3], [0]).check_kept_mass(1.0)


@pytest.mark.parametrize(("size", "in_bfloat16"), [(130_700, -11.75), (130_800, -11.8125)])
def test_flat_rows_in_bfloat16(size, in_bfloat16):
    """The largest rounding error: every log-prob of a row is off by 0.031, in the same direction."""
    assert abs(np.log(size) + in_bfloat16) > 0.03
    sets = CandidateSets(np.arange(size), np.full(size, in_bfloat16, np.float32), [0, size], [0])
    sets.check_kept_mass(1.0)
    sets[:1].check_kept_mass(0.99)
    half = size // 2
    part = CandidateSets(np.arange(half), np.full(half, in_bfloat16, np.float32), [0, half], [0])
    part.check_kept_mass(0.48)
    with pytest.raises(InvalidCandidateSetsError, match=r"expected at least 0\.52"):
        part.check_kept_mass(0.52)


def test_the_position_is_named_and_empty_spans_pass():
    good, bad = set_of_mass(0.91), set_of_mass(0.89)
    CandidateSets.concat([CandidateSets.empty(2), good, CandidateSets.empty(1)]).check_kept_mass(0.9)
    sets = CandidateSets.concat([CandidateSets.empty(2), good, bad, good, bad])
    with pytest.raises(InvalidCandidateSetsError, match=r"0\.89\d* at position 3, expected at least 0\.9"):
        sets.check_kept_mass(0.9)
