"""The synchronous client's own code; test_client.py tests the shared one."""

import asyncio
import contextlib
import errno
import gc
import inspect
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient
from tests.client import conftest as fakes
from tests.client.conftest import wait_for


@pytest.fixture
def client(engine):
    with RolloutClient(engine.url, kind="sglang") as client:
        yield client


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "sglang-topp-client"]


@contextlib.contextmanager
def collecting_on(runner):
    """Collect what the block leaves, on a client's background thread alone. It must not wait for itself."""

    async def collect():
        gc.collect()

    def run():
        with contextlib.suppress(errors.RequestError):  # the loop may end before the call that collected
            runner.run(collect())

    gc.disable()
    try:
        yield
        caller = threading.Thread(target=run, daemon=True)
        caller.start()
        caller.join(60)
        assert not caller.is_alive()
    finally:
        gc.enable()


def test_the_same_arguments_as_the_asynchronous_one():
    methods = inspect.getmembers(AsyncRolloutClient, inspect.isfunction)
    for name in ["__init__", *(name for name, _ in methods if not name.startswith("_"))]:
        mine = inspect.signature(getattr(RolloutClient, name))
        other = inspect.signature(getattr(AsyncRolloutClient, name))
        assert list(mine.parameters.values()) == list(other.parameters.values()), name


def test_generate_and_stream(client):
    rollouts = client.generate([[5], [6]], {"n": 2}, top_logprobs_p=0.9)
    made = [fakes.sample(prompt, k) for prompt in ([5], [6]) for k in (0, 1)]
    assert [one.candidates for one in rollouts] == [one.candidates for one in made]
    streamed = list(client.stream([[5], [6]], {"n": 2}, top_logprobs_p=0.9))
    assert sorted((r.prompt_index, r.sample_index) for r in streamed) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert client.server_info() == {"version": "0.5.23"}


def test_an_aborted_call_returns_its_partial_samples(engine, client):
    def end(chunk):
        if (reason := chunk["meta_info"]["finish_reason"]) is not None:
            reason["type"] = "abort"
        chunk["meta_info"]["resumed_tokens"] = 0

    engine.script.append(fakes.held_until(lambda: engine.aborted, fakes.altered(fakes.answer_generate, end)))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.generate, [5], on_abort="return", request_id="mine")
        wait_for(lambda: engine.calls)
        assert client.abort("mine") == 1
    (rollout,) = asked.result()
    assert (rollout.finish_reason, len(rollout.output_ids)) == ("abort", fakes.NUM_TOKENS)


def test_several_threads_share_one_client(engine, client):
    engine.script += [fakes.held_until(lambda: engine.peak >= 80)] * 80
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: client.generate([[i + 1]] * 10, timeout_s=60), range(8)))
    for i in range(8):
        expected = fakes.sample([i + 1], 0).output_ids.tolist()
        assert [r.output_ids.tolist() for r in results[i]] == [expected] * 10
    assert engine.peak == 80
    assert len(threads()) == 1


async def test_inside_a_running_loop(client):
    assert len(client.generate([5])) == 1


def test_leaving_the_stream_aborts_the_rest(engine, client, hang):
    engine.script += [fakes.answer_generate, hang]
    for _ in client.stream([[5], [6]]):
        wait_for(lambda: len(engine.calls) == 2)
        break
    wait_for(lambda: engine.hang_ups == 1 and engine.aborted)
    assert engine.aborted == [engine.calls[1]["rid"]]


def test_the_thread_ends_with_its_client_and_begins_again(engine):
    before = len(weakref.finalize._registry)
    client = RolloutClient(engine.url, kind="sglang")
    for _ in range(3):
        assert threads() == []
        assert len(client.generate([5])) == 1
        assert len(threads()) == 1
        client.close()
    client.close()
    assert len(weakref.finalize._registry) == before
    assert len(client.generate([5])) == 1
    del client
    gc.collect()
    assert threads() == []


def test_a_loop_that_cannot_start_is_an_error(client, monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.events, "new_event_loop", fail)
        with pytest.raises(errors.TransportError, match=r"no event loop could be started.*ulimit -n"):
            client.generate([5])
    assert len(client.generate([5])) == 1


def test_close_ends_waiting_calls(engine, client, hang):
    engine.script.append(hang)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.generate, [5])
        wait_for(lambda: engine.in_flight == 1)
        client.close()
        with pytest.raises(errors.RequestError):
            waiting.result(30)
    wait_for(lambda: engine.hang_ups == 1)


def test_a_stream_that_the_collector_ends_on_the_loop_itself(engine, client, hang):
    engine.script += [fakes.answer_generate, hang]
    rollouts = client.stream([[5], [6]])
    next(rollouts)
    wait_for(lambda: len(engine.calls) == 2)
    cycle = [rollouts]
    cycle.append(cycle)
    with collecting_on(client._thread):
        del rollouts, cycle
    wait_for(lambda: engine.hang_ups == 1 and engine.aborted)
    assert engine.aborted == [engine.calls[1]["rid"]]


SCRIPT = """
import sys
from sglang_topp_client import RolloutClient
client = RolloutClient(sys.argv[1], kind="sglang")
"""


@pytest.mark.parametrize(
    "use", ["print(len(client.generate([5])))", "left = client.stream([[5], [5]])\nprint(len([next(left)]))"]
)
def test_an_interpreter_that_ends_without_close_exits(engine, use):
    done = fakes.run_python(f"{SCRIPT}{use}", engine.url)
    assert (done.stdout, done.stderr) == ("1\n", "")


@pytest.mark.parametrize("which", ["own", "another's"])
def test_a_client_that_a_finalizer_closes_on_a_background_thread(engine, which):
    class Owner:
        def __init__(self):
            self.client = RolloutClient(engine.url, kind="sglang")

        def __del__(self):
            self.client.close()

    owner = Owner()
    assert len(owner.client.generate([5])) == 1
    thread, ended = owner.client._thread, owner.client._thread._running
    runner = thread if which == "own" else RolloutClient(engine.url, kind="sglang")._thread
    cycle = [owner]
    cycle.append(cycle)
    with collecting_on(runner):
        del owner, cycle
    ended.join(60)
    assert not ended.is_alive()


def test_a_background_thread_does_not_wait_for_itself(client):
    async def ask():
        client.generate([5])

    with pytest.raises(errors.RequestError, match="its own background thread"):
        client._thread.run(ask())
