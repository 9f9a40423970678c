"""An event loop in a thread, for synchronous code to run coroutines on."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from sglang_topp.errors import RequestError, TransportError
from sglang_topp_client import files

__all__ = ["LoopThread"]

_T = TypeVar("_T")


class LoopThread:
    """Starts at the first `run`, in every process anew (a fork does not take threads along).

    The thread ends with `stop`, with this object, or with the interpreter.
    """

    def __init__(self) -> None:
        # The collector may end a generator, which asks again, while this thread holds it.
        self._lock = threading.RLock()
        self._running: _Running | None = None
        self._pid = os.getpid()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run `coroutine` on the loop and return its result.

        An exception that arrives meanwhile (KeyboardInterrupt) cancels it and waits for it to end, so
        that its clean-up has been done.

        Raises:
            TransportError: the thread or its loop could not be started: no file is left, for example.
        """
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
            tasks.append(asyncio.get_running_loop().create_task(coroutine))
            tasks[0].add_done_callback(settle)

        try:
            loop = self._call(begin)
        except BaseException:
            coroutine.close()
            raise
        try:
            return result.result()
        except BaseException:
            if not result.done():
                loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                result.exception()
            raise

    @property
    def can_wait(self) -> bool:
        """Whether the thread runs, and is not this one: what waits on a loop for itself waits forever."""
        running = self._running
        return (
            running is not None
            and self._pid == os.getpid()
            and not running.loop.is_closed()
            and threading.current_thread() is not running.thread
        )

    def stop(self) -> None:
        """End the thread; the next `run` starts another."""
        with self._lock:
            running, self._running = self._running, None
            if running is None:
                return
            running.end()
        running.finalizer.detach()
        running.join()

    def _call(self, callback: Callable[[], None]) -> asyncio.AbstractEventLoop:
        """Have the loop call `callback`; returns the loop."""
        # A loop that was told to end before would never answer; one that is told after cancels it.
        with self._lock:
            if self._running is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._running = _Running()
                self._running.finalizer = weakref.finalize(self, self._running.stop)
            self._running.loop.call_soon_threadsafe(callback)
            return self._running.loop


class _Running:
    """The thread and its loop; knows nothing of who uses it, so that its owner can be collected."""

    finalizer: weakref.finalize[..., LoopThread]

    def __init__(self) -> None:
        ready: Future[asyncio.AbstractEventLoop] = Future()

        async def main() -> None:
            self._end = asyncio.Event()
            ready.set_result(asyncio.get_running_loop())
            await self._end.wait()

        def run() -> None:
            whole_life = main()
            try:
                asyncio.run(whole_life)
            except BaseException as error:
                if ready.done():
                    raise
                whole_life.close()
                ready.set_exception(error)

        self.thread = threading.Thread(target=run, name="sglang-topp-client", daemon=True)
        try:
            self.thread.start()
            self.loop = ready.result()
        except (OSError, RuntimeError) as error:
            reason = files.shortage(error) or f"{type(error).__name__}: {error}"
            raise TransportError(f"no event loop could be started for the client: {reason}") from error

    def stop(self) -> None:
        """Let the loop finish its clean-up and end the thread."""
        if not self.loop.is_closed():
            self.end()
            self.join()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self._end.set)

    def join(self) -> None:
        if threading.current_thread() is not self.thread:
            self.thread.join()
