"""ResultQueue: a queue of results for the caller. While the queue is full, no new samples start."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

__all__ = ["ResultQueue"]

_T = TypeVar("_T")


class ResultQueue(Generic[_T]):
    """A queue with backpressure: while too many results wait for the caller, no new samples start.

    After the client has sent a call, the queue accepts the call's results, even beyond `max_waiting`. If the
    queue refused results, the client would stop reading answers. A sidecar drops a client that leaves an
    answer unread for 30 s, and the engine must then generate the answer's samples again.

    Args:
        max_waiting: once this many results wait for the caller, the client starts no new samples.
    """

    def __init__(self, max_waiting: int) -> None:
        self._results: asyncio.Queue[_T | None] = asyncio.Queue()
        self._max_waiting = max_waiting
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, result: _T) -> None:
        """Add a result."""
        self._results.put_nowait(result)
        if self._results.qsize() >= self._max_waiting:
            self._has_room.clear()

    def close(self) -> None:
        """Mark the end of the results."""
        self._results.put_nowait(None)

    async def get(self) -> _T | None:
        """Wait for the next result and return it; return None after the last one."""
        result = await self._results.get()
        # The tasks in `wait_for_room` continue only after the caller has taken half of the results.
        # If these tasks continued as soon as one place is free, each result that the caller takes would wake
        # them.
        if self._results.qsize() <= self._max_waiting // 2:
            self._has_room.set()
        return result

    async def wait_for_room(self) -> None:
        """If the queue has filled up, wait until the caller has taken half of the results."""
        await self._has_room.wait()

    def lift_limit(self) -> None:
        """Remove the limit `max_waiting`.

        After a graceful abort, the caller might stop taking results. With the limit, the dispatcher could
        then wait in `wait_for_room` forever, and the aborted request would never end.
        """
        self._max_waiting = 1 << 60
        self._has_room.set()
