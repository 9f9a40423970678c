"""LongMessageSlots: limit how many long messages of the engine the sidecar reads at the same time.

The engine sends each finished sample as one line, which holds all of its candidate sets and can be decoded
only after its last byte. Without a limit, the sidecar would hold many incomplete lines in memory when many
samples finish at once. Once more than `LONG_BYTES` of a line have arrived, the sidecar reads on only while
the line holds one of a few slots. The unread part of a line that waits stays on the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

__all__ = ["LONG_BYTES", "LongMessageSlots"]

LONG_BYTES = 1 << 20
"""The length, in bytes, above which a message counts as long."""

_STUCK_S = 5.0


class LongMessageSlots:
    """A limit on the number of long lines that are read at once.

    Args:
        num_slots: the number of slots. If no byte of any long line arrives for 5 s, the lines that wait are
            read without a slot, because a line that never ends would block them.
    """

    def __init__(self, num_slots: int) -> None:
        self._free = asyncio.Semaphore(num_slots)
        self._num_steps = 0

    async def throttle(self, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the parts of an answer as they arrive, and wait for a slot inside of each long line."""
        num_bytes, is_long, has_slot = 0, False, False
        try:
            async for data in body:
                if is_long:
                    self._num_steps += 1
                yield data
                if end := data.rfind(b"\n") + 1:  # the reader has taken the line
                    if has_slot:
                        self._leave()
                    num_bytes, is_long, has_slot = -end, False, False
                num_bytes += len(data)
                if num_bytes > LONG_BYTES and not is_long:
                    is_long = True
                    has_slot = await self._enter()
        finally:
            if has_slot:
                self._leave()

    async def _enter(self) -> bool:
        """Wait for a slot, and return whether there was one before the long lines got stuck."""
        while True:
            num_steps = self._num_steps
            try:
                async with asyncio.timeout(_STUCK_S):
                    await self._free.acquire()
                return True
            except TimeoutError:
                if self._num_steps == num_steps:
                    return False

    def _leave(self) -> None:
        self._num_steps += 1
        self._free.release()
