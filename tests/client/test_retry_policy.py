"""The delays of retries; `test_client.py` has which errors are retried, and how often."""

import asyncio

import pytest

from sglang_topp import errors
from sglang_topp_client import retry_policy


@pytest.fixture(autouse=True)
def quick_retries():
    """Use the real delays."""


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


async def test_no_retry_begins_after_the_deadline():
    calls = []

    async def fail():
        calls.append(1)
        raise errors.TransportError("x")

    with pytest.raises(errors.TransportError):
        await retry_policy.retrying(fail, 1, deadline=asyncio.get_running_loop().time() + 0.2)
    assert calls == [1]
