"""LoopThread: a background thread whose event loop runs coroutines for synchronous code."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from sglang_topp.errors import RequestError, TransportError
from sglang_topp_client.transport import fd_limit

__all__ = ["LoopThread"]

_T = TypeVar("_T")


class LoopThread:
    """A background thread with an event loop.

    The first call of `run` starts the thread. In a forked process, the next call of `run` starts a new
    thread, because a fork does not copy threads. The thread ends when `stop` is called, when the LoopThread
    is garbage-collected, or when the interpreter exits.
    """

    def __init__(self) -> None:
        # The lock is reentrant, because a thread that holds the lock may call `run`. For example, the garbage
        # collector runs on this thread and closes a client's generator. The generator then calls `run`.
        self._lock = threading.RLock()
        self._running: _Running | None = None
        self._pid = os.getpid()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run `coroutine` on the background event loop, wait until it ends, and return its result.

        If an exception such as KeyboardInterrupt interrupts the wait, this method cancels the coroutine, and
        waits until the coroutine ends.

        Raises:
            TransportError: the thread or its loop could not start, for example because no file descriptor is
                left.
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
        """Whether the current thread can wait for a result of the background event loop.

        Waiting works only if the loop's thread is running, and is not the current thread.
        """
        running = self._running
        return (
            running is not None
            and self._pid == os.getpid()
            and not running.loop.is_closed()
            and threading.current_thread() is not running.thread
        )

    def stop(self) -> None:
        """End the background thread. The next call of `run` starts a new thread."""
        with self._lock:
            running, self._running = self._running, None
            if running is None:
                return
            running.end()
        running.finalizer.detach()
        running.join()

    def _call(self, callback: Callable[[], None]) -> asyncio.AbstractEventLoop:
        """Schedule `callback` on the background event loop, and return the loop."""
        # Without the lock, another thread's `stop` could end the loop before `callback` is scheduled. A loop
        # that has ended would never run `callback`.
        with self._lock:
            if self._running is None or self._pid != os.getpid():
                self._pid = os.getpid()
                self._running = _Running()
                self._running.finalizer = weakref.finalize(self, self._running.stop)
            self._running.loop.call_soon_threadsafe(callback)
            return self._running.loop


class _Running:
    """The running thread of one LoopThread, and the event loop that runs in this thread.

    A `_Running` holds no reference to its LoopThread, so that the LoopThread can be garbage-collected while
    the thread runs.
    """

    finalizer: weakref.finalize[..., LoopThread]

    def __init__(self) -> None:
        ready: Future[asyncio.AbstractEventLoop] = Future()

        async def main() -> None:
            self._end = asyncio.Event()
            ready.set_result(asyncio.get_running_loop())
            await self._end.wait()

        def run() -> None:
            lifetime = main()
            try:
                asyncio.run(lifetime)
            except BaseException as error:
                if ready.done():
                    raise
                lifetime.close()
                ready.set_exception(error)

        self.thread = threading.Thread(target=run, name="sglang-topp-client", daemon=True)
        try:
            self.thread.start()
            self.loop = ready.result()
        except (OSError, RuntimeError) as error:
            reason = fd_limit.shortage(error) or f"{type(error).__name__}: {error}"
            raise TransportError(f"no event loop could be started for the client: {reason}") from error

    def stop(self) -> None:
        """Cancel all tasks of the event loop, end the loop, and wait until the thread ends."""
        if not self.loop.is_closed():
            self.end()
            self.join()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self._end.set)

    def join(self) -> None:
        if threading.current_thread() is not self.thread:
            self.thread.join()
