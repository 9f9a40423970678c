"""RolloutClient: the synchronous client, which runs `AsyncRolloutClient` in a background thread.

The background thread has its own event loop (`LoopThread`). Any number of threads may therefore call the
client, even a thread that already runs an event loop, such as a notebook's. `AsyncRolloutClient` retries and
aborts requests, and decodes the answers.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from sglang_topp.errors import RequestError, TransportError
from sglang_topp_client.async_client import AsyncRolloutClient
from sglang_topp_client.transport.http import fd_shortage

_P = ParamSpec("_P")
_T = TypeVar("_T")


class LoopThread:
    """A background thread with an event loop.

    The first call of `run` starts the thread. A forked process has no copy of it, so there the next call of
    `run` starts a new one. The thread ends when `stop` is called, when the LoopThread is garbage-collected,
    or when the interpreter exits.

    Args:
        last: makes a coroutine that runs on the event loop before it ends.
    """

    def __init__(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._last = last
        self._running: _Thread | None = None
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
            # Without the lock, another thread's `stop` could end the loop before it runs `begin`.
            with self._lock:
                running = self._running
                if running is None:
                    running = self._running = _Thread(self._last)
                    running.finalizer = weakref.finalize(self, running.stop)
                if threading.current_thread() is running:
                    raise RequestError(
                        "a client was called on its own background thread, which would wait for itself; a"
                        " finalizer (__del__) may only close the client"
                    )
                running.loop.call_soon_threadsafe(begin)
        except BaseException:
            coroutine.close()
            raise
        try:
            return result.result()
        except BaseException:
            if not result.done():
                running.loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                result.exception()
            raise

    @property
    def can_wait(self) -> bool:
        """Whether the background thread runs, and the current thread can wait for it."""
        running = self._running
        return running is not None and not running.loop.is_closed() and not _is_loop_thread()

    def stop(self) -> None:
        """End the background thread, and wait until it has ended. The next call of `run` starts a new one.

        The garbage collector may call this method on a background thread, to finalize an object of the
        caller. There, the method does not wait: threads that wait for themselves or each other never end.
        """
        with self._lock:
            running, self._running = self._running, None
        if running is not None:
            running.finalizer.detach()
            running.stop()

    def _renew_lock(self) -> None:
        # The lock is reentrant, because the garbage collector may run while the lock is held, and close a
        # generator or a client of the caller.
        self._lock = threading.RLock()


class _Thread(threading.Thread):
    """The running thread of one LoopThread, and the event loop that runs in it.

    It holds no reference to its LoopThread, which can therefore be garbage-collected while it runs.
    """

    finalizer: weakref.finalize[..., LoopThread]

    def __init__(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        super().__init__(name="sglang-topp-client", daemon=True)
        self._last = last
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        try:
            self.start()
            self.loop = self._ready.result()
        except (OSError, RuntimeError) as error:
            reason = fd_shortage(error) or f"{type(error).__name__}: {error}"
            raise TransportError(f"no event loop could be started for the client: {reason}") from error

    def run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._until_stopped())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _until_stopped(self) -> None:
        self._end = asyncio.Event()
        self._ready.set_result(asyncio.get_running_loop())
        await self._end.wait()
        await self._last()

    def stop(self) -> None:
        """End the event loop, and wait for the thread, unless the caller is such a thread."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._end.set)
        if not _is_loop_thread():
            self.join()


def _is_loop_thread() -> bool:
    return isinstance(threading.current_thread(), _Thread)


_all: weakref.WeakSet[LoopThread] = weakref.WeakSet()
_of_parent: list[_Thread] = []


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


def _same_arguments(
    _: Callable[Concatenate[AsyncRolloutClient, _P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[RolloutClient, _P], None]]:
    """A decorator that gives the constructor the arguments of the asynchronous client's."""
    return functools.wraps(AsyncRolloutClient.__init__, ("__annotations__",), ())


def _blocking(
    method: Callable[Concatenate[AsyncRolloutClient, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[RolloutClient, _P], _T]:
    """Return the synchronous form of a coroutine method, with the same arguments, result, and docstring."""

    @functools.wraps(method)
    def call(self: RolloutClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self._thread.run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncRolloutClient, _P], AsyncGenerator[_T, None]],
) -> Callable[Concatenate[RolloutClient, _P], Iterator[_T]]:
    """Return the synchronous form of a method that returns an asynchronous generator."""

    @functools.wraps(method)
    def iterate(self: RolloutClient, /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        return self._iterate(method(self._client, *args, **kwargs))

    return iterate


class RolloutClient:
    """A synchronous client with the arguments, results, and errors of `AsyncRolloutClient`.

    Several threads may share a client. Pickling a client copies only its configuration. An interrupt (Ctrl-C)
    during a call aborts the request in the engine, and so does leaving the `for` loop of a stream early. A
    running `generate` blocks the thread that called it, so call `abort` and `abort_all` from another thread.
    """

    @_same_arguments(AsyncRolloutClient.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._client = AsyncRolloutClient(*args, **kwargs)
        self._thread = LoopThread(self._client.close)

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, _ = self._client.__reduce__()
        assert isinstance(rebuild, functools.partial)
        return functools.partial(type(self), *rebuild.args, **rebuild.keywords), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{repr(self._client).removeprefix(type(self._client).__name__)}"

    generate = _blocking(AsyncRolloutClient.generate)
    stream = _iterating(AsyncRolloutClient.stream)
    resume = _blocking(AsyncRolloutClient.resume)
    score = _blocking(AsyncRolloutClient.score)
    stream_scores = _iterating(AsyncRolloutClient.stream_scores)
    abort = _blocking(AsyncRolloutClient.abort)
    abort_all = _blocking(AsyncRolloutClient.abort_all)
    push_weights = _blocking(AsyncRolloutClient.push_weights)
    pause = _blocking(AsyncRolloutClient.pause)
    continue_generation = _blocking(AsyncRolloutClient.continue_generation)
    server_info = _blocking(AsyncRolloutClient.server_info)
    server_infos = _blocking(AsyncRolloutClient.server_infos)
    check_servers = _blocking(AsyncRolloutClient.check_servers)

    def _iterate(self, results: AsyncGenerator[_T, None]) -> Iterator[_T]:
        async def following() -> _T | None:
            return await anext(results, None)

        try:
            while (result := self._thread.run(following())) is not None:
                yield result
        finally:
            # Closing the generator `results` aborts the remaining samples. If this thread cannot wait for the
            # event loop, asyncio closes `results` later: when Python garbage-collects `results`, or when the
            # loop ends.
            if self._thread.can_wait:
                self._thread.run(results.aclose())

    def close(self) -> None:
        """Stop all requests, and close the connections. The client stays usable."""
        self._thread.stop()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
