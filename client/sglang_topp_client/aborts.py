"""Telling an engine which of its requests nobody waits for any more, behind the back of who gave them up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["TIMEOUT_S", "Aborts"]

TIMEOUT_S = 3.0
"""An engine that has not taken an abort by then never will. The closed connection is an abort as well,
unless something stands between."""


@dataclass(frozen=True)
class _Abort:
    request_id: str
    engine_id: str
    deadline: float


class Aborts:
    """The aborts of one event loop that are under way.

    A caller's time limit, and its cancellation, must not wait for an engine that may hang: so they go on
    in tasks of their own, each for three seconds at most, and whatever an abort fails with is passed over.
    `asyncio.run` cancels all tasks when it ends, these too, and waits for them: they are sent again
    then, and a loop ends no earlier than the aborts of its calls.

    Args:
        send: asks the engine to abort the request of that id.
    """

    def __init__(self, send: Callable[[str], Awaitable[object]]) -> None:
        self._send = send
        self._under_way: dict[asyncio.Task[None], _Abort] = {}
        self._num_calls = 0
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    @contextmanager
    def expected(self) -> Generator[None, None, None]:
        """Around the calls that may leave something to abort: the loop is kept for it."""
        self._num_calls += 1
        self._keep_loop()
        try:
            yield
        finally:
            self._num_calls -= 1
            self._changed.set()

    def start(self, request_id: str, engine_ids: Iterable[str]) -> None:
        """Abort these requests of the engine's, all of the caller's `request_id`; returns at once."""
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        for engine_id in engine_ids:
            self._start(_Abort(request_id, engine_id, deadline))
        self._keep_loop()

    async def finish(self, request_id: str | None = None) -> None:
        """Wait until the aborts of that request have been sent, or of all; for three seconds at most."""
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
            # Best effort, and nobody is there who could do better.
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
        """Stay while there is, or may come, something to abort: a loop that ends waits for the tasks that
        it had when it began to end, and not for those that their ends begin."""
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
        # What came between its last look and its end.
        if not task.get_loop().is_closed():
            self._keep_loop()
