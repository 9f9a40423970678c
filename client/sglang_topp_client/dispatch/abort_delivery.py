"""AbortDelivery: tell an engine, in the background, to abort requests that the caller has abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["TIMEOUT_S", "AbortDelivery"]

TIMEOUT_S = 3.0
"""The time limit of one abort, in seconds.

The client also closes the aborted request's connection. SGLang then aborts the request even if the abort call
fails, unless a proxy keeps the proxy's own connection to SGLang open.
"""


@dataclass(frozen=True)
class _Abort:
    request_id: str
    engine_id: str
    deadline: float


class AbortDelivery:
    """The abort requests that one event loop still has to deliver to one engine.

    A caller's timeout or cancellation must not wait for an engine that may hang. Each abort therefore runs in
    its own task, for three seconds at most, and errors of the abort are ignored. When `asyncio.run` ends, it
    cancels all tasks, including these abort tasks. `AbortDelivery` then starts each canceled abort again in
    a new task. Another task, `_keep`, keeps the event loop alive until all aborts have been sent.

    Args:
        send: asks the engine to abort the request with the given id.
    """

    def __init__(self, send: Callable[[str], Awaitable[object]]) -> None:
        self._send = send
        self._under_way: dict[asyncio.Task[None], _Abort] = {}
        self._num_calls = 0
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @contextmanager
    def expected(self) -> Generator[None, None, None]:
        """Keep the event loop alive until the `with` block has ended and all pending aborts are sent."""
        self._num_calls += 1
        self._keep_loop()
        try:
            yield
        finally:
            self._num_calls -= 1
            self._changed.set()

    def start(self, request_id: str, engine_ids: Iterable[str]) -> None:
        """Start to abort the engine's requests with the ids `engine_ids`, and return at once.

        The client sent these requests to the engine for the caller's request `request_id`.
        """
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        for engine_id in engine_ids:
            self._start(_Abort(request_id, engine_id, deadline))
        self._keep_loop()

    async def finish(self, request_id: str | None = None) -> None:
        """Wait up to three seconds for the pending aborts of `request_id`.

        If `request_id` is None, wait for all pending aborts.
        """
        if request_id is None:
            if self._keeper is not None:
                await asyncio.wait([self._keeper])
            return
        while tasks := [task for task, abort in self._under_way.items() if abort.request_id == request_id]:
            await asyncio.wait(tasks)

    def _start(self, abort: _Abort) -> None:
        task = asyncio.get_running_loop().create_task(self._run(abort))
        self._under_way[task] = abort
        task.add_done_callback(self._ended)

    async def _run(self, abort: _Abort) -> None:
        try:
            async with asyncio.timeout_at(abort.deadline):
                await self._send(abort.engine_id)
        except Exception:
            # Ignore errors of the abort, because the client also closes the request's connection.
            return

    def _ended(self, task: asyncio.Task[None]) -> None:
        abort = self._under_way.pop(task)
        if task.cancelled() and task.get_loop().time() < abort.deadline:
            self._start(abort)
        self._changed.set()

    def _keep_loop(self) -> None:
        if (self._num_calls or self._under_way) and self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep())
            self._keeper.add_done_callback(self._kept)

    async def _keep(self) -> None:
        """Keep the event loop running until all aborts have ended, even if this task is canceled.

        When `asyncio.run` ends, it cancels the running tasks, and waits only for these tasks. A canceled
        abort starts again in a new task, and `asyncio.run` does not wait for this new task. But `asyncio.run`
        waits for the task that runs `_keep`, which ends only when no abort is pending or expected.
        """
        task = asyncio.current_task()
        assert task is not None
        while self._num_calls or self._under_way:
            self._changed.clear()
            try:
                await self._changed.wait()
            except asyncio.CancelledError:
                task.uncancel()

    def _kept(self, task: asyncio.Task[None]) -> None:
        self._keeper = None
        # A new abort may have started after `_keep` last looked for aborts, so start `_keep` again if needed.
        if not task.get_loop().is_closed():
            self._keep_loop()
