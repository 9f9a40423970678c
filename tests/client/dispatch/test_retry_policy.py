"""The retry policy: which errors are retried, the delays, and the number of attempts."""

import pytest

from sglang_topp import errors
from sglang_topp_client.dispatch import retry_policy


@pytest.fixture(autouse=True)
def quick_retries():
    """Use the real delays."""


@pytest.mark.parametrize(
    "error", [errors.TransportError("x"), errors.OverloadedError("x"), errors.ServerError("x")]
)
def test_transient_errors_are_retried(error):
    assert retry_policy.is_retryable(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.BadRequestError("x", status=400),
        errors.AuthenticationError("x", status=401),
        errors.RequestTimeoutError("x"),
        errors.RolloutError("x"),
        errors.AbortedError("x"),
        errors.ResponseError("x", status=302),
        errors.WireError("f", "x"),
        errors.MissingCandidateSetsError("f", "x"),
        errors.SampledTokenMissingError("f", "x"),
        errors.PatchError("x"),
        errors.InvalidInputError("x"),
    ],
)
def test_permanent_errors_are_not_retried(error):
    assert not retry_policy.is_retryable(error)


@pytest.mark.parametrize(
    ("number", "longest_s"), [(1, 0.5), (2, 1), (3, 2), (4, 4), (5, 8), (6, 8), (60, 8), (10**6, 8)]
)
def test_delays_grow_up_to_a_limit_and_vary(number, longest_s):
    delays = [retry_policy.delay_s(number, errors.TransportError("x")) for _ in range(200)]
    assert longest_s / 2 <= min(delays) < max(delays) <= longest_s


@pytest.mark.parametrize(("asked_s", "shortest_s"), [(0, 0), (3, 3), (60, 60), (1e9, 60), (float("inf"), 60)])
def test_retry_after_is_honoured(asked_s, shortest_s):
    error = errors.OverloadedError("x", retry_after_s=asked_s)
    for _ in range(200):
        assert shortest_s <= retry_policy.delay_s(1, error) <= 1.25 * shortest_s


def test_overload_without_retry_after_backs_off():
    assert 0.25 <= retry_policy.delay_s(1, errors.OverloadedError("x")) <= 0.5


REFUSALS = [errors.OverloadedError("x"), errors.ServerError("x", status=503)]


def test_a_budget_is_spent_by_failures():
    budget = retry_policy.RetryBudget(2)
    for error in (errors.TransportError("x"), *REFUSALS):
        delay_s = budget.next_delay_s(error)
        assert (delay_s is None) == (error is REFUSALS[1])
    assert retry_policy.RetryBudget(2).next_delay_s(errors.WireError("f", "x")) is None


def test_waiting_out_refusals_costs_no_retry():
    budget = retry_policy.RetryBudget(1, waits_out_refusals=True)
    for error in REFUSALS * 10:
        assert budget.next_delay_s(error) is not None
    assert budget.next_delay_s(errors.TransportError("x")) is not None
    assert budget.next_delay_s(REFUSALS[0]) is not None
    assert budget.next_delay_s(errors.TransportError("x")) is None


def test_a_call_repeated_after_an_abort_waits_for_its_engine():
    aborted = errors.AbortedError("x")
    assert retry_policy.RetryBudget(9).next_delay_s(aborted) is None
    budget = retry_policy.RetryBudget(0, repeats_aborted=True)
    assert budget.next_delay_s(REFUSALS[0]) is None
    for error in [aborted, *REFUSALS] * 5:
        assert budget.next_delay_s(error) is not None
    assert budget.next_delay_s(errors.TransportError("x")) is None
