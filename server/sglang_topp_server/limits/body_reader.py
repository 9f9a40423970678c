"""BodyReader: read request bodies, and limit their size, their arrival rate, and their total memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from starlette.datastructures import Headers
from starlette.types import Receive

from sglang_topp.errors import BadRequestError, OverloadedError
from sglang_topp_server.limits.settings import MIN_BYTES_PER_S, Limits

__all__ = ["BodyReader", "DisconnectedError"]

# The sidecar reserves no memory for a body of at most this many bytes, because uvicorn buffers 64 KiB of any
# body anyway.
_UNCOUNTED_BYTES = 1 << 16
# The maximum memory that all bodies together may reserve, as a multiple of `Limits.max_body_bytes`.
_MAX_LARGEST_BODIES = 4


class DisconnectedError(Exception):
    """The caller closed the connection, so the sidecar cannot send an answer."""


class BodyReader:
    """The reader of all request bodies of one server.

    All bodies together may reserve a total of four times `max_body_bytes` of memory. A `BodyReader` reserves
    memory for each body of more than 64 KiB. If the request has a `Content-Length`, the `BodyReader` reserves
    that many bytes before it reads the body. Without a `Content-Length`, the `BodyReader` reserves
    `max_body_bytes` after the first 64 KiB. If too little memory is free, the `BodyReader` stops reading the
    body until other bodies release memory.

    Args:
        limits: the maximum size and the minimum rate of a body.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._free_bytes = _MAX_LARGEST_BODIES * limits.max_body_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def read(self, headers: Headers, receive: Receive) -> AsyncIterator[bytearray]:
        """Yield the whole body, whose memory stays reserved until the `async with` block ends.

        Raises:
            BadRequestError: the body exceeds `max_body_bytes` (413) or arrives too slowly (408).
            OverloadedError: too little memory was free for `Limits.max_stall_s` seconds.
            DisconnectedError: the caller disconnected.
        """
        content_length = _content_length(headers)
        if content_length is not None and content_length > self._limits.max_body_bytes:
            raise self._too_long(str(content_length))
        body = bytearray()
        # The `BodyReader` waits at most `left_s` more seconds for the body's next bytes. For each
        # MIN_BYTES_PER_S bytes that arrive, `left_s` grows by one second, up to `max_stall_s`.
        left_s = self._limits.max_stall_s
        async with AsyncExitStack() as reservation:
            is_counted = False
            is_last = False
            while not is_last:
                if not is_counted and max(len(body), content_length or 0) > _UNCOUNTED_BYTES:
                    await reservation.enter_async_context(
                        self._reserve(content_length or self._limits.max_body_bytes)
                    )
                    is_counted = True
                data, is_last, waited_s = await self._next(receive, left_s, len(body), content_length)
                left_s = min(self._limits.max_stall_s, left_s - waited_s + len(data) / MIN_BYTES_PER_S)
                body += data
                if len(body) > self._limits.max_body_bytes:
                    raise self._too_long("more")
            yield body

    async def _next(
        self, receive: Receive, left_s: float, num_bytes: int, content_length: int | None
    ) -> tuple[bytes, bool, float]:
        """Return the body's next part, whether it is the last part, and the seconds until it arrived."""
        clock = asyncio.get_running_loop().time
        start_s = clock()
        try:
            async with asyncio.timeout(left_s):
                message = await receive()
        except TimeoutError:
            raise BadRequestError(
                f"the body: got {num_bytes} of {content_length or 'some'} bytes and fell"
                f" {self._limits.max_stall_s:g} s behind, expected {MIN_BYTES_PER_S} bytes/s",
                status=408,
            ) from None
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        data: bytes = message.get("body", b"")
        return data, not message.get("more_body", False), clock() - start_s

    @asynccontextmanager
    async def _reserve(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserve `num_bytes` of memory until the `async with` block ends.

        Bodies get memory in their order of arrival, so that small bodies do not overtake a large one.
        """
        if self._waiting or num_bytes > self._free_bytes:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append((num_bytes, turn))
            try:
                async with asyncio.timeout(self._limits.max_stall_s):
                    await turn
            except BaseException as error:
                if turn.done() and not turn.cancelled():
                    self._release(num_bytes)
                else:
                    with suppress(ValueError):
                        self._waiting.remove((num_bytes, turn))
                    self._release(0)
                if isinstance(error, TimeoutError):
                    raise OverloadedError(
                        f"the body: other bodies left no memory for its {num_bytes} bytes during"
                        f" {self._limits.max_stall_s:g} s; send the request again later",
                        retry_after_s=1.0,
                    ) from None
                raise
        else:
            self._free_bytes -= num_bytes
        try:
            yield
        finally:
            self._release(num_bytes)

    def _release(self, num_bytes: int) -> None:
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


def _content_length(headers: Headers) -> int | None:
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
