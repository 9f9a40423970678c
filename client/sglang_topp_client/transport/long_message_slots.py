"""LongMessageSlots: limit how many long messages the client reads at the same time, to save memory.

A message holds all candidate sets of a sample, and can be decoded only after its last byte has arrived. Many
samples may finish at the same time. Without slots, the client would hold all of their incomplete messages in
memory. While a message waits for a slot, its unread part stays on the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["LONG_BYTES", "UNLIMITED", "LongMessageSlots", "MessageReader"]

LONG_BYTES = 1 << 20
"""The length, in bytes, above which a message counts as long."""

UNLIMITED = 1 << 30

_STUCK_S = 5.0


class LongMessageSlots:
    """A limit on the number of long messages that an event loop reads at the same time.

    Args:
        max_long_messages: the number of slots. Each long message takes one slot while it is read. If no
            message with a slot makes progress for 5 s, the waiting messages are read without a slot.
    """

    def __init__(self, max_long_messages: int) -> None:
        self._free = asyncio.Semaphore(max_long_messages)
        self._num_steps = 0

    @contextmanager
    def reader(self) -> Generator[MessageReader, None, None]:
        """Yield a reader for one answer. On exit, free the slot that the reader holds."""
        reader = MessageReader(self)
        try:
            yield reader
        finally:
            reader.end_message()

    def step(self) -> None:
        """Record that more bytes of a long message have arrived, or that a slot was freed."""
        self._num_steps += 1

    async def enter(self) -> bool:
        """Wait for a slot, and return whether the caller got one.

        The wait ends without a slot if no long message makes progress for 5 s. A server that hangs in the
        middle of its messages must not block the messages of other servers.
        """
        while True:
            num_steps = self._num_steps
            try:
                async with asyncio.timeout(_STUCK_S):
                    await self._free.acquire()
                return True
            except TimeoutError:
                if self._num_steps == num_steps:
                    return False

    def leave(self) -> None:
        """Free a slot."""
        self.step()
        self._free.release()


class MessageReader:
    """A reader of one answer. Each long message of the answer takes a slot while the message is read."""

    def __init__(self, limit: LongMessageSlots) -> None:
        self._limit = limit
        self._is_long = self._has_place = False

    def note_received(self) -> None:
        """Record the arrival of a part of the answer, so that long messages count as making progress."""
        if self._is_long:
            self._limit.step()

    async def hold(self, num_bytes: int) -> None:
        """Wait for a slot once more than `LONG_BYTES` of a message have arrived.

        Args:
            num_bytes: how many bytes of the message have arrived.
        """
        if num_bytes > LONG_BYTES and not self._is_long:
            self._is_long = True
            self._has_place = await self._limit.enter()

    def end_message(self) -> None:
        """Free the slot after a message was decoded or abandoned."""
        if self._has_place:
            self._limit.leave()
        self._is_long = self._has_place = False
