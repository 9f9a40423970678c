"""Which server takes the next call."""

import pytest

from sglang_topp.errors import BadRequestError, OverloadedError, TransportError
from sglang_topp_client import retry
from sglang_topp_client.fleet import Fleet


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    for name, value in (("_FIRST_DELAY_S", 0.5), ("_MAX_DELAY_S", 8.0)):
        monkeypatch.setattr(retry, name, value)
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: 1.0)
    return Clock()


@pytest.fixture
def fleet(clock):
    return Fleet(["a", "b", "c"], clock)


def fail(fleet, server, error=None):
    """A call of that server's fails."""
    call = fleet.member(1, server)
    assert call.__enter__() == server
    error = error or TransportError("gone")
    assert not call.__exit__(type(error), error, None)


def take(fleet, count=1, samples=1):
    """The servers of some calls that are in flight together, and the calls."""
    calls = [fleet.member(samples) for _ in range(count)]
    return [call.__enter__() for call in calls], calls


def end(calls):
    for call in calls:
        call.__exit__(None, None, None)


def test_calls_are_spread_evenly(fleet):
    servers, calls = take(fleet, 9)
    assert sorted(servers) == list("aaabbbccc")
    end(calls)
    assert [member.in_flight for member in fleet.members] == [0, 0, 0]


def test_one_after_the_other_they_take_turns(fleet):
    servers = []
    for _ in range(6):
        with fleet.member(1) as server:
            servers.append(server)
    assert servers == list("abcabc")


def test_what_counts_is_samples_not_calls(fleet):
    large, calls = take(fleet, samples=100)
    small, more = take(fleet, 10)
    assert large == ["a"]
    assert "a" not in small
    end(calls + more)


def test_a_server_that_fails_is_left_alone_for_a_while(fleet, clock):
    fail(fleet, "b")
    assert {take(fleet)[0][0] for _ in range(20)} == {"a", "c"}
    clock.now += 0.6
    assert "b" in take(fleet, 3)[0]


def test_a_server_that_still_answers_others_is_tried_when_they_are_done(fleet, clock):
    _, calls = take(fleet, 6)
    calls[1].__exit__(TransportError, TransportError("gone"), None)
    clock.now += 9.0
    servers, more = take(fleet, 3)
    assert "b" not in servers
    end(calls[:1] + calls[2:] + more)
    assert "b" in take(fleet, 3)[0]


def test_a_server_on_trial_gets_one_call(fleet, clock):
    fail(fleet, "b")
    clock.now += 0.6
    _, load = take(fleet, 1, samples=50)
    servers, calls = take(fleet, 10)
    assert servers.count("b") <= 1
    end(load + calls)
    assert take(fleet, 9)[0].count("b") == 3


def test_who_fails_again_is_left_alone_for_longer(fleet, clock):
    for wait_s in (0.5, 1.0, 2.0, 4.0, 8.0, 8.0):
        fail(fleet, "a")
        clock.now += wait_s - 0.01
        assert "a" not in [take(fleet)[0][0] for _ in range(5)]
        clock.now += 0.02


def test_calls_that_fail_together_count_once(fleet, clock):
    calls = [fleet.member(1, "a") for _ in range(5)]
    assert [call.__enter__() for call in calls] == ["a"] * 5
    for call in calls:
        call.__exit__(TransportError, TransportError("gone"), None)
    clock.now += 0.51
    assert "a" in take(fleet, 3)[0]


def test_a_busy_server_says_when(fleet, clock):
    fail(fleet, "a", OverloadedError("full", retry_after_s=30.0))
    clock.now += 29.0
    assert "a" not in take(fleet, 8)[0]
    clock.now += 1.5
    assert fleet.has_another


def test_a_request_that_is_refused_says_nothing_about_the_server(fleet):
    with pytest.raises(BadRequestError), fleet.member(1, "a"):
        raise BadRequestError("no", status=400)
    assert "a" in take(fleet, 3)[0]


def test_a_call_that_is_cancelled_says_nothing_either(fleet):
    with pytest.raises(KeyboardInterrupt), fleet.member(1, "a"):
        raise KeyboardInterrupt
    assert "a" in take(fleet, 3)[0]
    assert fleet.members[0].in_flight == 0


def test_where_all_fail_the_next_to_be_asked_again_is(fleet, clock):
    fail(fleet, "b")
    for server in "ac":
        clock.now += 0.1
        fail(fleet, server)
    assert not fleet.has_another
    assert take(fleet)[0] == ["b"]


def test_who_knows_the_prompt_is_preferred(fleet):
    _, load = take(fleet, 6, samples=4)
    with fleet.member(1, "c") as chosen:
        assert chosen == "c"
    end(load)


def test_but_not_where_it_fails(fleet):
    fail(fleet, "c")
    with fleet.member(1, "c") as chosen:
        assert chosen != "c"


def test_a_stranger_is_not_preferred(fleet):
    with fleet.member(1, "z") as chosen:
        assert chosen in "abc"


def test_one_server_is_always_the_one(clock):
    fleet = Fleet(["a"], clock)
    assert not fleet.has_another
    fail(fleet, "a")
    with fleet.member(1) as chosen:
        assert chosen == "a"
