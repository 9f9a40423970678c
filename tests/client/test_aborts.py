"""An engine that hangs: callers get away in time, and what they leave is aborted all the same."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import aclosing, asynccontextmanager, suppress

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient, aborts

# What a loaded machine may add; without it the figures are some hundredths of a second.
SLACK_S = 1.5


@asynccontextmanager
async def hung_engine():
    """Takes connections and never answers, neither a request nor an abort."""
    connections = []

    async def connected(reader, writer):
        connections.append(asyncio.current_task())
        with suppress(ConnectionError):
            while await reader.read(65536):
                pass
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        await asyncio.gather(*connections)


@pytest.fixture
def slow_aborts(engine):
    """Aborts take half a second; returns the ids of those that were answered."""
    answered = []

    async def slowly(asked, reply):
        await asyncio.sleep(0.5)
        await reply.start()
        await reply.end()
        answered.append(asked.body["rid"])

    engine.paths["/abort_request"] = slowly
    return answered


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("num_prompts", [1, 200])
async def test_a_time_limit_holds(num_prompts):
    async with hung_engine() as url, AsyncRolloutClient(url, kind="sglang") as client:
        start = time.monotonic()
        with pytest.raises(errors.RequestTimeoutError, match=r"1\.0 s passed"):
            await client.generate([[1]] * num_prompts, timeout_s=1)
        assert 1.0 <= time.monotonic() - start < 1.0 + SLACK_S


@pytest.mark.parametrize("num_prompts", [1, 200])
async def test_a_cancellation_is_immediate(num_prompts):
    async with hung_engine() as url, AsyncRolloutClient(url, kind="sglang") as client:
        task = asyncio.create_task(client.generate([[1]] * num_prompts))
        await asyncio.sleep(0.5)
        start = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - start < SLACK_S


async def test_the_time_limit_is_the_callers_while_it_looks_at_samples(engine, hang, fakes):
    """It passes between two samples: the calls end then, not when the caller comes back."""
    engine.script += [fakes.answer_generate, hang]
    async with (
        AsyncRolloutClient(engine.url, kind="sglang") as client,
        aclosing(client.stream([[5], [6]], timeout_s=1.0)) as rollouts,
    ):
        await anext(rollouts)
        await until(lambda: engine.hang_ups == 1)
        with pytest.raises(errors.RequestTimeoutError):
            await anext(rollouts)


async def test_leaving_a_stream_is_immediate(engine, hang, fakes, slow_aborts):
    async def never(asked, reply):
        await reply.hung_up()

    engine.paths["/abort_request"] = never
    engine.script += [fakes.answer_generate, hang]
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        rollouts = client.stream([[5], [6]])
        await anext(rollouts)
        await until(lambda: len(engine.calls) == 2)
        start = time.monotonic()
        await rollouts.aclose()
        assert time.monotonic() - start < SLACK_S


async def test_close_waits_for_the_aborts(engine, hang, slow_aborts):
    engine.script += [hang] * 3
    client = AsyncRolloutClient(engine.url, kind="sglang")
    task = asyncio.create_task(client.generate([[5], [6]]))
    await until(lambda: len(engine.calls) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert slow_aborts == []
    running = asyncio.create_task(client.generate([7]))
    await until(lambda: len(engine.calls) == 3)
    await client.close()
    assert sorted(slow_aborts) == sorted(body["rid"] for body in engine.calls)
    with pytest.raises(errors.RolloutError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_close_waits_no_longer_than_that():
    async with hung_engine() as url:
        client = AsyncRolloutClient(url, kind="sglang")
        with pytest.raises(errors.RequestTimeoutError):
            await client.generate([[1]] * 20, timeout_s=0.2)
        start = time.monotonic()
        await client.close()
        assert time.monotonic() - start < aborts.TIMEOUT_S + SLACK_S
        assert len(asyncio.all_tasks()) <= 1 + 20 * 2  # this test, and the server's side


async def test_abort_by_name_waits_until_the_engine_has_been_told(engine, hang, slow_aborts):
    engine.script += [hang] * 2
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        task = asyncio.create_task(client.generate([[5], [6]], request_id="mine"))
        await until(lambda: engine.in_flight == 2)
        await client.abort("mine")
        assert sorted(slow_aborts) == sorted(body["rid"] for body in engine.calls)
        with pytest.raises(errors.RolloutError):
            await task


async def test_a_retry_does_not_wait_for_the_abort_of_what_broke(engine, fakes, slow_aborts):
    async def cut(asked, reply):
        await reply.start()
        await reply.event(fakes.chunk(fakes.sample([5], 0), first_token_only=True))
        raise fakes.Cut

    engine.script.append(cut)
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        assert len(await client.generate([5])) == 1
        assert slow_aborts == []
    assert slow_aborts == [fakes.sample([5], 0).request_id]


async def test_an_engine_that_refuses_aborts_is_left_alone(engine, hang):
    async def refuse(asked, reply):
        await reply.json({"error": "no"}, 500)

    engine.paths["/abort_request"] = refuse
    engine.script.append(hang)
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        task = asyncio.create_task(client.generate([5]))
        await until(lambda: len(engine.calls) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(engine.aborted) == 1


# -- loops that end --------------------------------------------------------------------------------

SCRIPT = """
import asyncio, contextlib, signal, sys
from sglang_topp_client import AsyncRolloutClient
from sglang_topp.errors import RequestTimeoutError
signal.signal(signal.SIGINT, signal.default_int_handler)
client = AsyncRolloutClient(sys.argv[1], kind="sglang")

async def both_arrived():
    await asyncio.to_thread(sys.stdin.readline)

async def cancelled():
    task = asyncio.create_task(client.generate([[5], [6]]))
    await both_arrived()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

async def left_open():
    global rollouts
    rollouts = client.stream([[4], [5], [6]])
    await anext(rollouts)
    await both_arrived()

async def still_running():
    global task
    task = asyncio.create_task(client.generate([[5], [6]]))
    await both_arrived()

async def interrupted():
    await client.generate([[5], [6]])

async def hung():
    with contextlib.suppress(RequestTimeoutError):
        await client.generate([[5], [6]], timeout_s=0.3)
"""


def run(url, use, interfere=lambda process: None):
    """Run it with warnings as errors and the event loop's own checks; returns what it wrote to stderr."""
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-c", f"{SCRIPT}\nasyncio.run({use}())", url],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    interfere(process)
    _, written = process.communicate(timeout=120)
    # In its own checks asyncio also reports what took long on a loaded machine.
    return [line for line in written.splitlines() if not line.startswith("Executing <")]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("use", ["cancelled", "left_open", "still_running"])
def test_a_loop_that_ends_sends_them_first(engine, hang, fakes, slow_aborts, use):
    def go_on(process):
        wait_for(lambda: len(engine.calls) == 2 + (use == "left_open"))
        process.stdin.write("\n")
        process.stdin.flush()

    async def first_answers(asked, reply):
        await (fakes.answer_generate if asked.body["input_ids"] == [4] else hang)(asked, reply)

    engine.paths["/generate"] = first_answers
    assert run(engine.url, use, go_on) == []
    left = {body["rid"] for body in engine.calls if body["input_ids"] != [4]}
    assert set(slow_aborts) == left
    assert len(left) == 2


def test_a_loop_that_an_interrupt_ends_sends_them_first(engine, hang, slow_aborts):
    def interrupt(process):
        wait_for(lambda: len(engine.calls) == 2)
        process.send_signal(signal.SIGINT)

    engine.script += [hang] * 2
    *_, last = run(engine.url, "interrupted", interrupt)
    assert last == "KeyboardInterrupt"
    assert set(slow_aborts) == {body["rid"] for body in engine.calls}


def test_a_loop_that_ends_waits_no_longer_than_that(engine):
    async def never(asked, reply):
        await reply.hung_up()

    engine.paths |= {"/generate": never, "/abort_request": never}
    assert run(engine.url, "hung") == []


def test_the_synchronous_client_keeps_its_limit_too(engine, hang, slow_aborts):
    async def never(asked, reply):
        await reply.hung_up()

    engine.script += [hang] * 100
    engine.paths["/abort_request"] = never
    with RolloutClient(engine.url, kind="sglang") as client:
        start = time.monotonic()
        with pytest.raises(errors.RequestTimeoutError):
            client.generate([[i] for i in range(50)], timeout_s=1)
        assert time.monotonic() - start < 1 + SLACK_S
        rollouts = client.stream([5], timeout_s=30)
        caller = threading.Thread(target=lambda: suppressed(next, rollouts))
        caller.start()
        time.sleep(0.3)
        start = time.monotonic()
    assert time.monotonic() - start < aborts.TIMEOUT_S + SLACK_S
    caller.join()


def suppressed(function, *args):
    with suppress(errors.RequestError):
        function(*args)
