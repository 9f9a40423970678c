"""The synchronous client's own code; test_client.py tests the shared one."""

import asyncio
import contextlib
import gc
import inspect
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient


@pytest.fixture
def client(engine):
    with RolloutClient(engine.url, kind="sglang") as client:
        yield client


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_same_arguments_as_the_asynchronous_one():
    for name in (
        "__init__",
        "generate",
        "stream",
        "resume",
        "score",
        "stream_scores",
        "abort",
        "abort_all",
        "server_info",
        "close",
    ):
        mine = inspect.signature(getattr(RolloutClient, name))
        other = inspect.signature(getattr(AsyncRolloutClient, name))
        assert list(mine.parameters.values()) == list(other.parameters.values()), name


def test_generate_and_stream(client, fakes):
    rollouts = client.generate([[5], [6]], {"n": 2}, top_logprobs_p=0.9)
    assert [r.candidates for r in rollouts] == [
        fakes.sample(p, k).candidates for p in ([5], [6]) for k in (0, 1)
    ]
    streamed = list(client.stream([[5], [6]], {"n": 2}, top_logprobs_p=0.9))
    assert sorted((r.prompt_index, r.sample_index) for r in streamed) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert client.server_info() == {"version": "0.5.23"}


def test_wrong_arguments_fail_at_once(engine, client):
    with pytest.raises(errors.InvalidInputError):
        client.stream([1], {"n": 0})
    assert engine.asked == []


def test_several_threads_share_one_client(engine, client, fakes):
    async def together(asked, reply):
        while engine.peak < 80:
            await asyncio.sleep(0.01)
        await fakes.answer_generate(asked, reply)

    engine.script += [together] * 80
    results = {}
    callers = [
        threading.Thread(
            target=lambda i=i: results.update({i: client.generate([[i + 1]] * 10, timeout_s=60)})
        )
        for i in range(8)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for i in range(8):
        expected = fakes.sample([i + 1], 0).output_ids.tolist()
        assert [r.output_ids.tolist() for r in results[i]] == [expected] * 10
    assert engine.peak == 80


async def test_inside_a_running_loop(client):
    assert len(client.generate([5])) == 1


def test_leaving_the_stream_aborts_the_rest(engine, client, hang, fakes):
    engine.script += [fakes.answer_generate, hang]
    for _ in client.stream([[5], [6]]):
        until(lambda: len(engine.calls) == 2)
        break
    until(lambda: engine.hang_ups == 1 and engine.aborted)
    assert engine.aborted == [engine.calls[1]["rid"]]


def test_abort_from_another_thread(engine, client, hang):
    engine.script.append(hang)
    caught = []

    def wait():
        try:
            client.generate([5], request_id="mine")
        except errors.RolloutError as error:
            caught.append(error)

    caller = threading.Thread(target=wait)
    caller.start()
    until(lambda: engine.in_flight == 1)
    client.abort("mine")
    caller.join()
    assert caught
    assert set(engine.aborted) == {engine.calls[0]["rid"]}


def test_pickles_as_its_configuration(engine, client):
    client.generate([5])
    with pickle.loads(pickle.dumps(client)) as again:
        assert repr(again) == f"RolloutClient({engine.url!r}, kind='sglang')"
        assert len(again.generate([5])) == 1


def test_usable_after_close(client):
    client.generate([5])
    client.close()
    assert len(client.generate([5])) == 1


def test_a_stream_that_the_collector_ends_on_the_loop_itself(engine, client, hang, fakes):
    engine.script += [fakes.answer_generate, hang]
    rollouts = client.stream([[5], [6]])
    next(rollouts)
    until(lambda: len(engine.calls) == 2)
    cycle = [rollouts]
    cycle.append(cycle)

    async def collect():
        gc.collect()

    gc.disable()
    try:
        del rollouts, cycle
        caller = threading.Thread(target=lambda: client._thread.run(collect()), daemon=True)
        caller.start()
        caller.join(10)
        assert not caller.is_alive()
    finally:
        gc.enable()
    until(lambda: engine.hang_ups == 1 and engine.aborted)
    assert engine.aborted == [engine.calls[1]["rid"]]


# A shell makes background processes ignore SIGINT, and their children inherit that.
SCRIPT = """
import os, signal, sys
from sglang_topp_client import RolloutClient
signal.signal(signal.SIGINT, signal.default_int_handler)
client = RolloutClient(sys.argv[1], kind="sglang")
"""


def test_an_interrupt_aborts(engine, hang):
    engine.script.append(hang)
    code = f"{SCRIPT}client.generate([5])"
    process = subprocess.Popen([sys.executable, "-c", code, engine.url], stderr=subprocess.PIPE)
    until(lambda: engine.in_flight == 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in err
    assert set(engine.aborted) == {engine.calls[0]["rid"]}


def test_the_client_works_after_a_fork(engine):
    code = (
        f"{SCRIPT}client.generate([5])\n"
        "pid = os.fork()\n"
        "assert len(client.generate([6])) == 1\n"
        "if pid:\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, engine.url], timeout=60, check=False)
    assert done.returncode == 0
    assert len(engine.calls) == 3


@pytest.mark.parametrize(
    "use", ["print(len(client.generate([5])))", "left = client.stream([[5], [5]])\nprint(len([next(left)]))"]
)
def test_an_interpreter_that_ends_without_close_exits(engine, use):
    code = f"{SCRIPT}{use}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, engine.url],
        timeout=60,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"1\n", b"")


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

    async def collect():
        gc.collect()

    runner = thread if which == "own" else RolloutClient(engine.url, kind="sglang")._thread
    cycle = [owner]
    cycle.append(cycle)
    gc.disable()
    try:
        del owner, cycle
        caller = threading.Thread(target=lambda: suppress_request_error(runner, collect()), daemon=True)
        caller.start()
        caller.join(10)
        assert not caller.is_alive()
        ended.join(10)
        assert not ended.is_alive()
    finally:
        gc.enable()


def suppress_request_error(runner, coroutine):
    with contextlib.suppress(errors.RequestError):  # the loop may end before the call that collected
        runner.run(coroutine)


def test_a_background_thread_does_not_wait_for_itself(client):
    async def ask():
        client.generate([5])

    with pytest.raises(errors.RequestError, match="its own background thread"):
        client._thread.run(ask())
