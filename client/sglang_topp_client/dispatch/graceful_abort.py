"""GracefulAbort: abort a request but keep its connections open, so that its partial samples still arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from sglang_topp.errors import SglangToppError

__all__ = ["GracefulAbort"]

# An engine ignores an abort for a request that has not reached the engine yet, so the client repeats each
# abort.
_REPEAT_ORDER_S = 0.25


class GracefulAbort:
    """The graceful abort of one of the caller's requests. All methods run in the same event loop.

    Args:
        grace_s: the idle timeout after an abort, in seconds. The client stops waiting for a server that sends
            nothing for this long.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._requested = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._received_at = 0.0

    def request(self) -> None:
        """Begin the abort.

        After the abort, `run` still waits for the end of the server's answer. If the server sends nothing for
        `grace_s` seconds, `run` stops waiting.
        """
        self.note_received()
        self._requested.set()

    def note_received(self) -> None:
        """Restart the idle timeout, because the server has sent bytes."""
        self._received_at = self._clock()

    async def run(
        self,
        call: Coroutine[Any, Any, None],
        open_orders: Callable[[], Mapping[str, Callable[[], Awaitable[object]]] | None],
    ) -> None:
        """Run one call to the server until the call ends or is aborted.

        The method `request` begins the abort. `run` then sends the abort to the server, and repeats the abort
        until the call ends. If the server sends nothing for `grace_s` seconds after the abort, `run` cancels
        the call.

        Args:
            call: a coroutine that makes the call, with its retries. If the abort began before `run`, the
                coroutine is not started.
            open_orders: a function that returns a mapping from ids to abort functions. The function for an id
                asks the server to abort the request with this id. The mapping leaves out requests whose id
                the client does not know. If no HTTP request is open, `open_orders` returns None, and `run`
                cancels the call.

        Raises:
            Exception: the error that `call` raised.
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
