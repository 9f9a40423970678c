"""LongMessageSlots: limit how many long messages the client reads at the same time, to save memory.

A server sends each finished sample as one message of its answer. The message holds all candidate sets of the
sample, and can be decoded only after its last byte has arrived. Without a limit, the client would hold many
incomplete messages in memory when many samples finish at the same time. A message counts as long when more
than `LONG_BYTES` bytes of it have arrived. From then on, the client reads the message only while the message
holds one of `max_long_messages` slots. While a message waits for a slot, its unread part stays on the server.
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
    """A limit on the number of long messages that one `HttpClient` reads at the same time.

    Args:
        max_long_messages: the number of slots. Each long message takes one slot while the client reads the
            message. If no bytes of any long message arrive for 5 s, the client reads the waiting messages
            even without a slot.
    """

    def __init__(self, max_long_messages: int) -> None:
        self._free = asyncio.Semaphore(max_long_messages)
        self._num_steps = 0

    @contextmanager
    def reader(self) -> Generator[MessageReader, None, None]:
        """Yield a MessageReader for one HTTP answer. On exit, free the slot that this reader holds."""
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

        If no bytes of any long message arrive for 5 s, stop waiting and return False. Without this time
        limit, long messages that stop arriving before their end would block all other long messages.
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
    """The reader of one HTTP answer. The reader holds a slot while a long message arrives."""

    def __init__(self, limit: LongMessageSlots) -> None:
        self._limit = limit
        self._is_long = self._has_place = False

    def note_received(self) -> None:
        """If the current message is long, record that a part of the message has arrived.

        `LongMessageSlots.enter` uses these records: if no part of any long message arrives for 5 s, `enter`
        stops waiting for a slot.
        """
        if self._is_long:
            self._limit.step()

    async def hold(self, num_bytes: int) -> None:
        """Wait for a slot if the answer's current message has just become long.

        A message is long once more than `LONG_BYTES` of the message have arrived. Later calls for the same
        message do not wait.

        Args:
            num_bytes: how many bytes of the message have arrived.
        """
        if num_bytes > LONG_BYTES and not self._is_long:
            self._is_long = True
            self._has_place = await self._limit.enter()

    def end_message(self) -> None:
        """Free the current message's slot, if the message holds one.

        Call this method after the message was decoded or abandoned.
        """
        if self._has_place:
            self._limit.leave()
        self._is_long = self._has_place = False
