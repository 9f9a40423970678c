"""Turns: how many long lines are read at the same time.

A line is as long as a sample's candidate sets, and is of use only once it is whole. Where many end together
they would all be in memory half read; those that wait here are still where they were made.
"""

from __future__ import annotations

import asyncio

__all__ = ["LONG_BYTES", "Turns"]

LONG_BYTES = 1 << 20
"""A line is long from here on."""

_STUCK_S = 5.0


class Turns:
    """To be used within one event loop.

    Args:
        at_once: how many long lines are read at once, unless none of those gets any further.
    """

    def __init__(self, at_once: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._steps = 0

    def step(self) -> None:
        """Something came, of any line that is being read."""
        self._steps += 1

    async def take(self) -> bool:
        """Wait for a turn; returns whether it is to be given back.

        It is not where those that have one have not got any further for 5 s: a server that hangs in the
        middle of its lines does not hold up those of others.
        """
        while True:
            steps = self._steps
            try:
                async with asyncio.timeout(_STUCK_S):
                    await self._free.acquire()
                return True
            except TimeoutError:
                if self._steps == steps:
                    return False

    def give_back(self) -> None:
        """The line has been read, and what it holds taken out of it."""
        self._steps += 1
        self._free.release()
