import pytest

from sglang_topp import errors
from sglang_topp_client import retry


@pytest.fixture(autouse=True)
def quick_retries():
    """The real delays."""


@pytest.mark.parametrize(
    "error", [errors.TransportError("x"), errors.OverloadedError("x"), errors.ServerError("x")]
)
def test_what_may_pass_is_retried(error):
    assert retry.is_retryable(error)


@pytest.mark.parametrize(
    "error",
    [
        errors.BadRequestError("x", status=400),
        errors.AuthenticationError("x", status=401),
        errors.RequestTimeoutError("x"),
        errors.RolloutError("x"),
        errors.ResponseError("x", status=302),
        errors.WireError("f", "x"),
        errors.MissingCandidateSetsError("f", "x"),
        errors.SampledTokenMissingError("f", "x"),
        errors.PatchError("x"),
        errors.InvalidInputError("x"),
    ],
)
def test_what_would_fail_again_is_not(error):
    assert not retry.is_retryable(error)


@pytest.mark.parametrize(
    ("number", "longest_s"), [(1, 0.5), (2, 1), (3, 2), (4, 4), (5, 8), (6, 8), (60, 8), (10**6, 8)]
)
def test_delays_grow_up_to_a_limit_and_vary(number, longest_s):
    delays = [retry.delay_s(number, errors.TransportError("x")) for _ in range(200)]
    assert longest_s / 2 <= min(delays) < max(delays) <= longest_s


@pytest.mark.parametrize(("asked_s", "shortest_s"), [(0, 0), (3, 3), (60, 60), (1e9, 60), (float("inf"), 60)])
def test_retry_after_is_honoured(asked_s, shortest_s):
    error = errors.OverloadedError("x", retry_after_s=asked_s)
    for _ in range(200):
        assert shortest_s <= retry.delay_s(1, error) <= 1.25 * shortest_s


def test_overload_without_retry_after_backs_off():
    assert 0.25 <= retry.delay_s(1, errors.OverloadedError("x")) <= 0.5
