"""BodyReader: read request bodies, and limit their size, their time, and the number of large ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from starlette.datastructures import Headers
from starlette.types import Receive

from sglang_topp.errors import BadRequestError
from sglang_topp_server.limits.settings import Limits

__all__ = ["BodyReader", "DisconnectedError"]

# uvicorn buffers this many bytes of any body anyway, so smaller bodies need no place.
_LARGE_BYTES = 1 << 16
_MAX_LARGE_BODIES = 4


class DisconnectedError(Exception):
    """The caller closed the connection, so the sidecar cannot send an answer."""


class BodyReader:
    """The reader of all request bodies of one server.

    At most four bodies that are, or may become, larger than 64 KiB are in memory at once. Others wait for a
    place in their order of arrival. Slow callers cannot keep the places, because each body must arrive within
    `Limits.io_timeout_s`.

    Args:
        limits: the maximum size and time of a body.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(_MAX_LARGE_BODIES)

    @asynccontextmanager
    async def read(self, headers: Headers, receive: Receive) -> AsyncIterator[bytearray]:
        """Yield the whole body, which keeps its place until the `async with` block ends.

        Raises:
            BadRequestError: the body exceeds `max_body_bytes` (413), or takes too long (408).
            DisconnectedError: the caller disconnected.
        """
        length = _content_length(headers)
        if length is not None and length > self._limits.max_body_bytes:
            raise self._too_long(str(length))
        async with nullcontext() if length is not None and length <= _LARGE_BYTES else self._places:
            yield await self._receive(receive)

    async def _receive(self, receive: Receive) -> bytearray:
        body, timeout_s = bytearray(), self._limits.io_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise DisconnectedError
                    body += message.get("body", b"")
                    if len(body) > self._limits.max_body_bytes:
                        raise self._too_long("more")
                    if not message.get("more_body", False):
                        return body
        except TimeoutError:
            raise BadRequestError(
                f"the body: got {len(body)} bytes in {timeout_s:g} s, expected the whole body in this time",
                status=408,
            ) from None

    def _too_long(self, got: str) -> BadRequestError:
        return BadRequestError(
            f"the body: got {got} bytes, expected at most {self._limits.max_body_bytes}", status=413
        )


def _content_length(headers: Headers) -> int | None:
    text = headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
