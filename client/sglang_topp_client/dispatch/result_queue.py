"""ResultQueue: a queue of results for the caller; a full queue stops further calls from being sent."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

__all__ = ["ResultQueue"]

_T = TypeVar("_T")


class ResultQueue(Generic[_T]):
    """A queue with backpressure: while too many results wait for the caller, no further calls are sent.

    The queue accepts the results of sent calls even beyond `max_waiting`. If the queue refused these results,
    the client would stop reading answers. A sidecar would then drop the client after 30 s, and the samples
    would be generated again.

    Args:
        max_waiting: the number of waiting results at which further calls are held back.
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
        # Wait until half of the results are taken, so that not every taken result wakes the waiting calls.
        if self._results.qsize() <= self._max_waiting // 2:
            self._has_room.set()
        return result

    async def wait_for_room(self) -> None:
        """Wait until the caller has taken enough results."""
        await self._has_room.wait()

    def lift_limit(self) -> None:
        """Remove the limit, so that an aborted request ends even if its caller takes no more results."""
        self._max_waiting = 1 << 60
        self._has_room.set()
