"""Stopping a request in its engine while its connections stay open, so that what was generated still comes.

Used where an abort delivers the samples instead of ending them with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from sglang_topp.errors import SglangToppError

__all__ = ["Interruption"]

# An order that arrives before its request is lost: engines do not keep it.
_ORDER_AGAIN_S = 0.25


class Interruption:
    """What belongs to one caller's request; to be used within one event loop.

    Args:
        grace_s: seconds without a sample after which an engine that was ordered to stop is given up.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._asked = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._progress_s = 0.0

    def ask(self) -> None:
        """Stop the request: every call in `follow` ends soon."""
        self.note_progress()
        self._asked.set()

    def note_progress(self) -> None:
        """A sample has come: the engine does as it was told, and the others get their time again."""
        self._progress_s = self._clock()

    async def follow(
        self,
        work: Coroutine[Any, Any, None],
        orders_now: Callable[[], Mapping[str, Callable[[], Awaitable[object]]] | None],
    ) -> None:
        """Wait for a call; where the request is to stop, until the engine has ended it, or is given up.

        Args:
            work: the call, with its retries; cancelled where it has not ended in time.
            orders_now: how to stop what is open at the server, by its name there, as far as names are known
                by now; None where nothing is open, and then the call is not waited for.

        Raises:
            Exception: what the call raises, but where it was cancelled here.
        """
        call = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self._asked.wait())
        orders: dict[str, asyncio.Task[None]] = {}
        try:
            await asyncio.wait({call, asked}, return_when=asyncio.FIRST_COMPLETED)
            while not call.done() and (left := orders_now()) is not None:
                for name, order in left.items():
                    if name not in orders or orders[name].done():
                        orders[name] = asyncio.create_task(_give(order))
                left_s = self._progress_s + self._grace_s - self._clock()
                if left_s <= 0:
                    break
                await asyncio.wait({call}, timeout=min(left_s, _ORDER_AGAIN_S))
        finally:
            for future in (asked, call, *orders.values()):
                future.cancel()
            await asyncio.wait({asked, call, *orders.values()})
        if not call.cancelled():
            call.result()


async def _give(order: Callable[[], Awaitable[object]]) -> None:
    with suppress(SglangToppError):
        await order()
