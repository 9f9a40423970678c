"""An event loop in a thread, for synchronous code to run coroutines on."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from sglang_topp.errors import RequestError

__all__ = ["LoopThread"]

_T = TypeVar("_T")


class LoopThread:
    """Starts at the first `run`, in every process anew (a fork does not take threads along).

    The thread ends with `stop`, with this object, or with the interpreter.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._pid = os.getpid()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run `coroutine` on the loop and return its result.

        An exception that arrives meanwhile (KeyboardInterrupt) cancels it and waits for it to end, so
        that its clean-up has been done.
        """
        loop = self._start().loop
        result: Future[_T] = Future()
        tasks: list[asyncio.Task[_T]] = []

        def settle(task: asyncio.Task[_T]) -> None:
            if task.cancelled():
                result.set_exception(RequestError("the client was closed, or the wait interrupted"))
            elif (error := task.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(task.result())

        def begin() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(settle)

        loop.call_soon_threadsafe(begin)
        try:
            return result.result()
        except BaseException:
            if not result.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                result.exception()
            raise

    def stop(self) -> None:
        """End the thread; the next `run` starts another."""
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.stop()

    def _start(self) -> _Running:
        with self._lock:
            if self._running is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._running = _Running()
                weakref.finalize(self, self._running.stop)
            return self._running


class _Running:
    """The thread and its loop; knows nothing of who uses it, so that its owner can be collected."""

    def __init__(self) -> None:
        ready: Future[asyncio.AbstractEventLoop] = Future()

        async def main() -> None:
            self._end = asyncio.Event()
            ready.set_result(asyncio.get_running_loop())
            await self._end.wait()

        self._thread = threading.Thread(
            target=lambda: asyncio.run(main()), name="sglang-topp-client", daemon=True
        )
        self._thread.start()
        self.loop = ready.result()

    def stop(self) -> None:
        """Let the loop finish its clean-up and end the thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._end.set)
            if threading.current_thread() is not self._thread:
                self._thread.join()
