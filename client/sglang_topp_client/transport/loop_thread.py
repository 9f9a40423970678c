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

    The first call of `run` starts the thread. A forked process has no copy of it, so there the next call of
    `run` starts a new one. The thread ends when `stop` is called, when the LoopThread is garbage-collected,
    or when the interpreter exits.
    """

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._renew_lock()
        _all.add(self)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run `coroutine` on the background event loop, wait until it ends, and return its result.

        If an exception such as KeyboardInterrupt interrupts the wait, this method cancels the coroutine, and
        waits until the coroutine ends.

        Raises:
            RequestError: the caller is the background thread, which would wait for itself.
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
        """Whether the background thread runs, and the current thread can wait for it."""
        running = self._running
        return running is not None and not running.loop.is_closed() and not _is_loop_thread()

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """End the background thread, and wait until it has ended. The next call of `run` starts a new one.

        The garbage collector may call this method on a background thread, to finalize an object of the
        caller. There, the method does not wait: threads that wait for themselves or each other never end.

        Args:
            last: makes a coroutine that runs before the event loop ends. It is not called if no thread runs.
        """
        with self._lock:
            running, self._running = self._running, None
        if running is None:
            return
        running.finalizer.detach()
        ended = running.end(last)
        if not _is_loop_thread():
            running.join()
            ended.result()

    def _call(self, callback: Callable[[], None]) -> asyncio.AbstractEventLoop:
        """Schedule `callback` on the background event loop, and return the loop."""
        # Without the lock, another thread's `stop` could end the loop before `callback` is scheduled. A loop
        # that has ended would never run `callback`.
        with self._lock:
            running = self._running
            if running is None:
                running = _Running()
                running.finalizer = weakref.finalize(self, running.stop)
                self._running = running
            if threading.current_thread() is running.thread:
                raise RequestError(
                    "a client was called on its own background thread, which would wait for itself; a"
                    " finalizer (__del__) may only close the client"
                )
            running.loop.call_soon_threadsafe(callback)
            return running.loop

    def _renew_lock(self) -> None:
        # The lock is reentrant, because the garbage collector may run while the lock is held, and close a
        # generator or a client of the caller.
        self._lock = threading.RLock()


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

        self.thread = _Thread(target=run, name="sglang-topp-client", daemon=True)
        try:
            self.thread.start()
            self.loop = ready.result()
        except (OSError, RuntimeError) as error:
            reason = fd_limit.shortage(error) or f"{type(error).__name__}: {error}"
            raise TransportError(f"no event loop could be started for the client: {reason}") from error

    def stop(self) -> None:
        """Cancel all tasks of the event loop, end the loop, and wait until the thread ends."""
        if not self.loop.is_closed():
            self.end(None)
            self.join()

    def end(self, last: Callable[[], Coroutine[Any, Any, None]] | None) -> Future[None]:
        """End the event loop after the coroutine that `last` makes, and return the coroutine's future."""
        ended: Future[None] = Future()

        async def finish() -> None:
            try:
                if last is not None:
                    await last()
                ended.set_result(None)
            except BaseException as error:
                ended.set_exception(error)
            finally:
                self._end.set()

        def begin() -> None:
            self._last = asyncio.get_running_loop().create_task(finish())

        self.loop.call_soon_threadsafe(begin)
        return ended

    def join(self) -> None:
        if not _is_loop_thread():
            self.thread.join()


class _Thread(threading.Thread):
    """The thread of a LoopThread."""


def _is_loop_thread() -> bool:
    return isinstance(threading.current_thread(), _Thread)


_all: weakref.WeakSet[LoopThread] = weakref.WeakSet()
_of_parent: list[_Running] = []


def _forget_threads_of_parent() -> None:
    """In a forked process, forget the parent's threads, and the locks that these threads may hold."""
    for owner in list(_all):
        owner._renew_lock()
        if owner._running is not None:
            owner._running.finalizer.detach()
            # Destroying the parent's event loop would change the epoll that the processes share.
            _of_parent.append(owner._running)
            owner._running = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads_of_parent)
