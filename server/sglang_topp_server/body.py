"""Bodies: request bodies as they arrive, within a bound for each and for all of them together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from starlette.datastructures import Headers
from starlette.types import Receive

from sglang_topp.errors import BadRequestError, OverloadedError
from sglang_topp_server.limits import MIN_BYTES_PER_S, Limits
from sglang_topp_server.pace import Pace

__all__ = ["Bodies", "HungUpError"]

# A body of this size costs no more than what uvicorn reads ahead of every request.
_UNCOUNTED_BYTES = 1 << 16
# Of the longest bodies that are accepted, so many at once.
_LONGEST_AT_ONCE = 4


class HungUpError(Exception):
    """The caller has closed the connection: there is nobody to answer."""


class Bodies:
    """Reads the bodies of one server.

    A longer body has its bytes, declared or the most that it may have, set aside before it is read, and
    waits while others have them. What waits stays in the network: nobody's body is half read for it.

    Args:
        limits: how long a body may be, and how slow.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._free_bytes = _LONGEST_AT_ONCE * limits.max_body_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def read(self, headers: Headers, receive: Receive) -> AsyncIterator[bytearray]:
        """The whole body; its bytes are set aside until the context ends.

        Raises:
            BadRequestError: 413, it is longer than `max_body_bytes`; 408, it comes too slowly.
            OverloadedError: others have not left room for it within `max_stall_s`.
            HungUpError: the caller is gone.
        """
        declared = _declared(headers)
        if declared is not None and declared > self._limits.max_body_bytes:
            raise self._too_long(str(declared))
        body = bytearray()
        pace = Pace(self._limits.max_stall_s)
        async with AsyncExitStack() as aside:
            is_counted = False
            is_last = False
            while not is_last:
                if not is_counted and max(len(body), declared or 0) > _UNCOUNTED_BYTES:
                    await aside.enter_async_context(self._aside(declared or self._limits.max_body_bytes))
                    is_counted = True
                data, is_last = await self._next(receive, pace, len(body), declared)
                body += data
                if len(body) > self._limits.max_body_bytes:
                    raise self._too_long("more")
            yield body

    async def _next(
        self, receive: Receive, pace: Pace, num_bytes: int, declared: int | None
    ) -> tuple[bytes, bool]:
        clock = asyncio.get_running_loop().time
        start_s = clock()
        try:
            async with asyncio.timeout(pace.left_s):
                message = await receive()
        except TimeoutError:
            raise BadRequestError(
                f"the body: got {num_bytes} of {declared or 'some'} bytes and fell"
                f" {self._limits.max_stall_s:g} s behind, expected {MIN_BYTES_PER_S} bytes/s",
                status=408,
            ) from None
        if message["type"] == "http.disconnect":
            raise HungUpError
        data: bytes = message.get("body", b"")
        pace.note(clock() - start_s, len(data))
        return data, not message.get("more_body", False)

    @asynccontextmanager
    async def _aside(self, num_bytes: int) -> AsyncIterator[None]:
        """In turn: a long body is not passed over for ever by shorter ones."""
        if self._waiting or num_bytes > self._free_bytes:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((num_bytes, turn))
            try:
                async with asyncio.timeout(self._limits.max_stall_s):
                    await turn
            except BaseException as error:
                if turn.done() and not turn.cancelled():
                    self._give_back(num_bytes)
                else:
                    with suppress(ValueError):
                        self._waiting.remove((num_bytes, turn))
                    self._give_back(0)
                if isinstance(error, TimeoutError):
                    raise OverloadedError(
                        f"the body: other bodies were read for {self._limits.max_stall_s:g} s and left no"
                        f" room for its {num_bytes} bytes; send it again later",
                        retry_after_s=1.0,
                    ) from None
                raise
        else:
            self._free_bytes -= num_bytes
        try:
            yield
        finally:
            self._give_back(num_bytes)

    def _give_back(self, num_bytes: int) -> None:
        self._free_bytes += num_bytes
        while self._waiting and self._waiting[0][0] <= self._free_bytes:
            needed, turn = self._waiting.popleft()
            if not turn.done():
                self._free_bytes -= needed
                turn.set_result(None)

    def _too_long(self, got: str) -> BadRequestError:
        return BadRequestError(
            f"the body: got {got} bytes, expected at most {self._limits.max_body_bytes}", status=413
        )


def _declared(headers: Headers) -> int | None:
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
