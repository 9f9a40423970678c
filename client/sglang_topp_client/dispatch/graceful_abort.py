"""GracefulAbort: abort a request but keep its connections open, so that its partial samples still arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from sglang_topp.errors import SglangToppError

__all__ = ["GracefulAbort"]

# An engine ignores an abort for a request that has not arrived yet, so the abort is repeated.
_REPEAT_ORDER_S = 0.25


class GracefulAbort:
    """The graceful abort of one caller's request, within one event loop.

    Args:
        grace_s: idle timeout after an abort. The client stops waiting for an engine that sends nothing for
            this many seconds.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._requested = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._received_at = 0.0

    def request(self) -> None:
        """Begin the abort.

        A call in `run` ends once the server has aborted the call, or at the idle timeout.
        """
        self.note_received()
        self._requested.set()

    def note_received(self) -> None:
        """Restart the idle timeout, because bytes have arrived."""
        self._received_at = self._clock()

    async def run(
        self,
        call: Coroutine[Any, Any, None],
        open_orders: Callable[[], Mapping[str, Callable[[], Awaitable[object]]] | None],
    ) -> None:
        """Run a call until the call ends.

        Once `request` has begun the abort, `run` also orders the server to abort the call.

        Args:
            call: a coroutine that makes the call, with its retries. The idle timeout cancels the call. If the
                abort has already begun, the call is not started.
            open_orders: returns one entry for each open HTTP request: the request's name at the server, and a
                function that sends its abort. A request without a known name has no entry. Returns None if no
                request is open, in which case `run` cancels the call.

        Raises:
            Exception: the call's own error.
        """
        if self._requested.is_set():
            call.close()
            return
        task = asyncio.ensure_future(call)
        requested = asyncio.ensure_future(self._requested.wait())
        sent: dict[str, asyncio.Task[None]] = {}
        try:
            await asyncio.wait({task, requested}, return_when=asyncio.FIRST_COMPLETED)
            while not task.done() and (orders := open_orders()) is not None:
                for name, order in orders.items():
                    if name not in sent or sent[name].done():
                        sent[name] = asyncio.create_task(_send(order))
                left_s = self._received_at + self._grace_s - self._clock()
                if left_s <= 0:
                    break
                await asyncio.wait({task}, timeout=min(left_s, _REPEAT_ORDER_S))
        finally:
            for future in (requested, task, *sent.values()):
                future.cancel()
            await asyncio.wait({requested, task, *sent.values()})
        if not task.cancelled():
            task.result()


async def _send(order: Callable[[], Awaitable[object]]) -> None:
    with suppress(SglangToppError):
        await order()
