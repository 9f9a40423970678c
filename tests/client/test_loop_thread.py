"""LoopThread: calls from any thread, exceptions, restarts, and the end of the thread."""

import asyncio
import errno
import gc
import threading
import weakref

import pytest

from sglang_topp.errors import RequestError, TransportError
from sglang_topp_client.sync_client import LoopThread


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "sglang-topp-client"]


async def nothing():
    pass


async def double(x):
    await asyncio.sleep(0)
    return 2 * x


async def fail():
    raise KeyError("x")


def test_runs_from_any_thread_and_again_after_a_stop():
    runner = LoopThread(nothing)
    assert threads() == []
    results = []
    callers = [threading.Thread(target=lambda i=i: results.append(runner.run(double(i)))) for i in range(20)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(results) == [2 * i for i in range(20)]
    assert len(threads()) == 1
    runner.stop()
    assert threads() == []
    runner.stop()
    assert runner.run(double(4)) == 8
    runner.stop()


def test_a_loop_that_cannot_start_is_an_error(monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.events, "new_event_loop", fail)
    runner = LoopThread(nothing)
    with pytest.raises(TransportError, match=r"no event loop could be started.*ulimit -n"):
        runner.run(double(1))
    monkeypatch.undo()
    assert runner.run(double(1)) == 2
    runner.stop()


def test_exceptions_come_through():
    runner = LoopThread(nothing)
    with pytest.raises(KeyError):
        runner.run(fail())
    runner.stop()


def test_the_thread_ends_with_its_owner():
    runner = LoopThread(nothing)
    runner.run(double(1))
    del runner
    gc.collect()
    assert threads() == []


def test_stopped_threads_leave_nothing_behind():
    runner = LoopThread(nothing)
    before = len(weakref.finalize._registry)
    for _ in range(5):
        runner.run(double(1))
        runner.stop()
    assert len(weakref.finalize._registry) == before


async def test_the_loops_own_thread_cannot_wait():
    runner = LoopThread(nothing)
    assert not runner.can_wait

    async def inside():
        return runner.can_wait

    assert runner.run(inside()) is False
    assert runner.can_wait
    runner.stop()
    assert not runner.can_wait


def test_a_stop_ends_waiting_calls():
    runner = LoopThread(nothing)
    started, cleaned_up, caught = threading.Event(), [], []

    async def forever():
        started.set()
        try:
            await asyncio.sleep(1000)
        finally:
            cleaned_up.append(True)

    def wait():
        try:
            runner.run(forever())
        except RequestError as error:
            caught.append(error)

    caller = threading.Thread(target=wait)
    caller.start()
    started.wait()
    runner.stop()
    caller.join()
    assert cleaned_up
    assert caught
