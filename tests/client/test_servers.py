"""The choice of the server for the next call: load, back-off, and affinity."""

import pytest

from sglang_topp.errors import BadRequestError, OverloadedError, TransportError
from sglang_topp_client import retry_policy
from sglang_topp_client.servers import Servers
from sglang_topp_client.transport.http import FileLimitError
from sglang_topp_client.transport.server_config import ServerConfig


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    for name, value in (("_FIRST_DELAY_S", 0.5), ("_MAX_DELAY_S", 8.0)):
        monkeypatch.setattr(retry_policy, name, value)
    monkeypatch.setattr(retry_policy.random, "uniform", lambda low, high: 1.0)
    return Clock()


class Balancer:
    """Servers with the names a, b, and c."""

    def __init__(self, names, clock):
        configs = [ServerConfig(f"http://{name}") for name in names]
        self.servers = Servers(configs, {}, {}, max_retries=0)
        self.by_name = dict(zip(names, self.servers.all, strict=True))
        for server in self.servers.all:
            server._clock = clock

    def pick(self, num_samples, preferred=None, *, without=()):
        key = self.by_name[preferred].routing_key("") if preferred in self.by_name else preferred or ""
        return self.servers.pick(num_samples, key, without=[self.by_name[name] for name in without])

    def has_ready(self, *without):
        return self.servers.has_ready(without=[self.by_name[name] for name in without])

    @property
    def num_in_flight(self):
        return self.servers.num_in_flight

    @property
    def failures(self):
        return {name: str(server.error) for name, server in self.by_name.items() if server.error}


def name_of(server):
    return server.base_url.removeprefix("http://")


@pytest.fixture
async def balancer(clock):
    return Balancer("abc", clock)


def fail(balancer, server, error=None):
    """Let a call of a server fail."""
    call = balancer.pick(1, server)
    assert name_of(call.__enter__()) == server
    error = error or TransportError("gone")
    assert not call.__exit__(type(error), error, None)


def take(balancer, count=1, samples=1):
    """Return the servers of some calls that are in flight together, and the calls."""
    calls = [balancer.pick(samples) for _ in range(count)]
    return [name_of(call.__enter__()) for call in calls], calls


def end(calls):
    for call in calls:
        call.__exit__(None, None, None)


async def test_idle_endpoints_take_turns(balancer):
    servers = []
    for _ in range(6):
        with balancer.pick(1) as server:
            servers.append(name_of(server))
    assert servers == list("abcabc")


async def test_load_is_counted_in_samples_not_calls(balancer):
    large, calls = take(balancer, samples=100)
    small, more = take(balancer, 10)
    assert large == ["a"]
    assert "a" not in small
    end(calls + more)


async def test_a_server_that_fails_is_left_alone_for_a_while(balancer, clock):
    fail(balancer, "b")
    assert {take(balancer)[0][0] for _ in range(20)} == {"a", "c"}
    clock.now += 0.6
    assert "b" in take(balancer, 3)[0]


async def test_a_server_that_still_answers_others_is_tried_when_they_are_done(balancer, clock):
    _, calls = take(balancer, 6)
    calls[1].__exit__(TransportError, TransportError("gone"), None)
    clock.now += 9.0
    servers, more = take(balancer, 3)
    assert "b" not in servers
    end(calls[:1] + calls[2:] + more)
    assert "b" in take(balancer, 3)[0]


async def test_a_server_on_trial_gets_one_call(balancer, clock):
    fail(balancer, "b")
    clock.now += 0.6
    _, load = take(balancer, 1, samples=50)
    servers, calls = take(balancer, 10)
    assert servers.count("b") <= 1
    end(load + calls)
    assert take(balancer, 9)[0].count("b") == 3


async def test_a_second_failure_doubles_the_backoff(balancer, clock):
    for wait_s in (0.5, 1.0, 2.0, 4.0, 8.0, 8.0):
        fail(balancer, "a")
        clock.now += wait_s - 0.01
        assert "a" not in [take(balancer)[0][0] for _ in range(5)]
        clock.now += 0.02


async def test_calls_that_fail_together_count_once(balancer, clock):
    calls = [balancer.pick(1, "a") for _ in range(5)]
    assert [name_of(call.__enter__()) for call in calls] == ["a"] * 5
    for call in calls:
        call.__exit__(TransportError, TransportError("gone"), None)
    clock.now += 0.51
    assert "a" in take(balancer, 3)[0]


async def test_retry_after_sets_the_backoff(balancer, clock):
    fail(balancer, "a", OverloadedError("full", retry_after_s=30.0))
    clock.now += 29.0
    assert "a" not in take(balancer, 8)[0]
    clock.now += 1.5
    assert balancer.has_ready()


@pytest.mark.parametrize(
    "error", [BadRequestError("no", status=400), KeyboardInterrupt(), FileLimitError("none left")], ids=repr
)
async def test_errors_that_say_nothing_about_the_server(balancer, error):
    with pytest.raises(type(error)), balancer.pick(1, "a"):
        raise error
    assert balancer.failures == {}
    assert balancer.num_in_flight == 0
    assert "a" in take(balancer, 3)[0]


async def test_if_all_fail_the_earliest_retry_is_chosen(balancer, clock):
    fail(balancer, "b")
    for server in "ac":
        clock.now += 0.1
        fail(balancer, server)
    assert not balancer.has_ready()
    assert take(balancer)[0] == ["b"]


async def test_the_preferred_endpoint_is_chosen_while_it_is_not_busier(balancer):
    _, load = take(balancer, 6, samples=4)
    calls = [balancer.pick(1, "c") for _ in range(60)]
    servers = [name_of(call.__enter__()) for call in calls]
    assert servers[:8] == ["c"] * 8
    counts = [servers.count(server) for server in "abc"]
    assert max(counts) - min(counts) <= 10
    end(load + calls)


async def test_a_preferred_endpoint_that_fails_or_is_unknown_is_not_chosen(balancer):
    fail(balancer, "c")
    for preferred in "cz":
        with balancer.pick(1, preferred) as chosen:
            assert name_of(chosen) in "ab"


async def test_a_single_endpoint_is_always_chosen(clock):
    balancer = Balancer("a", clock)
    assert not balancer.has_ready("a")
    fail(balancer, "a")
    with balancer.pick(1) as chosen:
        assert name_of(chosen) == "a"


async def test_an_endpoint_that_failed_this_call_is_taken_last(balancer):
    with balancer.pick(1, "a", without={"a", "b"}) as chosen:
        assert name_of(chosen) == "c"
    with balancer.pick(1, without={"a", "b", "c"}) as chosen:
        assert name_of(chosen) in "abc"
    fail(balancer, "c")
    # It is not ready, but the others have failed this call.
    with balancer.pick(1, without={"a", "b"}) as chosen:
        assert name_of(chosen) == "c"


async def test_the_last_errors_are_known_until_a_call_succeeds(balancer, clock):
    for endpoint in "ab":
        fail(balancer, endpoint, TransportError(endpoint))
    assert balancer.failures == {"a": "a", "b": "b"}
    clock.now += 10.0
    with balancer.pick(1, "a"):
        pass
    assert list(balancer.failures) == ["b"]
