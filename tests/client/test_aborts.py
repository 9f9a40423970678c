"""Aborts to an engine that hangs: callers return in time, and abandoned requests are still aborted."""

import asyncio
import signal
import subprocess
import sys
import threading
import time
from contextlib import aclosing, suppress

import pytest

from sglang_topp import errors
from sglang_topp_client import AsyncRolloutClient, RolloutClient, aborts
from tests.client import conftest as fakes
from tests.client.conftest import hung_server, silent, status, until

# Tolerance for a loaded machine; otherwise the times are some hundredths of a second.
SLACK_S = 2.5


@pytest.fixture
def slow_aborts(engine):
    """Answer each abort after half a second. Return the ids of the answered aborts."""
    answered = []

    async def slowly(asked, reply):
        await asyncio.sleep(0.5)
        await reply.start()
        await reply.end()
        answered.append(asked.body["rid"])

    engine.paths["/abort_request"] = slowly
    return answered


@pytest.mark.parametrize("num_prompts", [1, 200])
async def test_a_time_limit_holds(num_prompts):
    async with hung_server() as url, AsyncRolloutClient(url, kind="sglang") as client:
        start = time.monotonic()
        with pytest.raises(errors.RequestTimeoutError, match=r"1\.0 s passed"):
            await client.generate([[1]] * num_prompts, timeout_s=1)
        assert 1.0 <= time.monotonic() - start < 1.0 + SLACK_S


@pytest.mark.parametrize("num_prompts", [1, 200])
async def test_a_cancellation_is_immediate(num_prompts):
    async with hung_server() as url, AsyncRolloutClient(url, kind="sglang") as client:
        task = asyncio.create_task(client.generate([[1]] * num_prompts))
        await asyncio.sleep(0.5)
        start = time.monotonic()
        await fakes.cancel(task)
        assert time.monotonic() - start < SLACK_S


async def test_the_time_limit_is_the_callers_while_it_looks_at_samples(engine, hang):
    """The time limit passes between two samples. The calls end then, not when the caller reads again."""
    engine.script += [fakes.answer_generate, hang]
    async with (
        AsyncRolloutClient(engine.url, kind="sglang") as client,
        aclosing(client.stream([[5], [6]], timeout_s=1.0)) as rollouts,
    ):
        await anext(rollouts)
        await until(lambda: engine.hang_ups == 1)
        with pytest.raises(errors.RequestTimeoutError):
            await anext(rollouts)


async def test_leaving_a_stream_is_immediate(engine, hang, slow_aborts):
    engine.paths["/abort_request"] = silent
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
    await fakes.cancel(task)
    assert slow_aborts == []
    running = asyncio.create_task(client.generate([7]))
    await until(lambda: len(engine.calls) == 3)
    await client.close()
    assert sorted(slow_aborts) == sorted(body["rid"] for body in engine.calls)
    with pytest.raises(errors.RolloutError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_close_waits_at_most_three_seconds():
    async with hung_server() as url:
        client = AsyncRolloutClient(url, kind="sglang")
        with pytest.raises(errors.RequestTimeoutError):
            await client.generate([[1]] * 20, timeout_s=0.2)
        start = time.monotonic()
        await client.close()
        assert time.monotonic() - start < aborts._TIMEOUT_S + SLACK_S
        assert len(asyncio.all_tasks()) <= 1 + 20 * 2  # this test's task, and the server's


async def test_abort_by_name_waits_for_the_delivery(engine, hang, slow_aborts):
    engine.script += [hang] * 2
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        task = asyncio.create_task(client.generate([[5], [6]], request_id="mine"))
        await until(lambda: engine.in_flight == 2)
        await client.abort("mine")
        assert sorted(slow_aborts) == sorted(body["rid"] for body in engine.calls)
        with pytest.raises(errors.RolloutError):
            await task


async def test_a_retry_does_not_wait_for_the_abort_of_the_failed_call(engine, slow_aborts):
    first = fakes.events_of(fakes.chunk(fakes.sample([5], 0), first_token_only=True))
    engine.script.append(fakes.sends_bytes(first, ends=False))
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        assert len(await client.generate([5])) == 1
        assert slow_aborts == []
    assert slow_aborts == [fakes.sample([5], 0).request_id]


async def test_an_engine_that_refuses_an_abort_gets_it_once(engine, hang):
    engine.paths["/abort_request"] = status(500)
    engine.script.append(hang)
    async with AsyncRolloutClient(engine.url, kind="sglang") as client:
        task = asyncio.create_task(client.generate([5]))
        await until(lambda: len(engine.calls) == 1)
        await fakes.cancel(task)
    assert len(engine.aborted) == 1


# -- loops that end --------------------------------------------------------------------------------

SCRIPT = """
import asyncio, contextlib, signal, sys
from sglang_topp_client import AsyncRolloutClient, RolloutClient
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

async def hung():
    with contextlib.suppress(RequestTimeoutError):
        await client.generate([[5], [6]], timeout_s=0.3)
"""


def run(url, code, interfere=lambda process: None):
    """Run code with warnings as errors and asyncio's debug checks. Return its stderr."""
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-W", "error", "-c", f"{SCRIPT}\n{code}", url],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    interfere(process)
    _, written = process.communicate(timeout=120)
    # In debug mode, asyncio also reports slow callbacks, which a loaded machine may have.
    return [line for line in written.splitlines() if not line.startswith("Executing <")]


@pytest.mark.parametrize("use", ["cancelled", "left_open", "still_running"])
def test_a_loop_that_ends_sends_its_aborts_first(engine, hang, slow_aborts, use):
    def go_on(process):
        fakes.wait_for(lambda: len(engine.calls) == 2 + (use == "left_open"))
        process.stdin.write("\n")
        process.stdin.flush()

    engine.paths["/generate"] = fakes.by_request(
        lambda asked: fakes.answer_generate if asked.body["input_ids"] == [4] else hang
    )
    assert run(engine.url, f"asyncio.run({use}())", go_on) == []
    left = {body["rid"] for body in engine.calls if body["input_ids"] != [4]}
    assert set(slow_aborts) == left
    assert len(left) == 2


@pytest.mark.parametrize(
    "use",
    [
        "asyncio.run(client.generate([[5], [6]]))",
        "RolloutClient(sys.argv[1], kind='sglang').generate([[5], [6]])",
    ],
)
def test_an_interrupt_sends_the_aborts_first(engine, hang, slow_aborts, use):
    def interrupt(process):
        fakes.wait_for(lambda: len(engine.calls) == 2)
        process.send_signal(signal.SIGINT)

    engine.script += [hang] * 2
    *_, last = run(engine.url, use, interrupt)
    assert last == "KeyboardInterrupt"
    assert set(slow_aborts) == {body["rid"] for body in engine.calls}


def test_a_loop_that_ends_waits_at_most_three_seconds(engine):
    engine.paths |= {"/generate": silent, "/abort_request": silent}
    assert run(engine.url, "asyncio.run(hung())") == []


def test_the_synchronous_client_keeps_its_time_limit(engine, hang, slow_aborts):
    engine.script += [hang] * 100
    engine.paths["/abort_request"] = silent
    with RolloutClient(engine.url, kind="sglang") as client:
        start = time.monotonic()
        with pytest.raises(errors.RequestTimeoutError):
            client.generate([[i] for i in range(50)], timeout_s=1)
        assert time.monotonic() - start < 1 + SLACK_S
        rollouts = client.stream([5], timeout_s=30)

        def read_on():
            with suppress(errors.RequestError):
                next(rollouts)

        caller = threading.Thread(target=read_on)
        caller.start()
        time.sleep(0.3)
        start = time.monotonic()
    assert time.monotonic() - start < aborts._TIMEOUT_S + SLACK_S
    caller.join()
