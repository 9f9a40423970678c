"""Connections to one server: the only file that knows the HTTP library.

Sized for hundreds of generations at once: no limit on waiting for a connection (the client bounds its
own calls), no read time limit (a generation may take an hour; TCP keep-alive finds a dead peer), and
idle connections are dropped before the server does so.
"""

from __future__ import annotations

import functools
import json
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from sglang_topp import SglangToppError, errors
from sglang_topp.errors import (
    AuthenticationError,
    BadRequestError,
    InvalidInputError,
    OverloadedError,
    ResponseError,
    ServerError,
    TransportError,
    WireError,
)
from sglang_topp_client.record import error_from_record

__all__ = ["Connections", "Server"]

_CONNECT_TIMEOUT_S = 10.0
# Both servers are uvicorn with its default of 5 s (SGLang: SGLANG_TIMEOUT_KEEP_ALIVE). A request that
# meets a connection just as the server drops it fails, so the client must be first.
_KEEPALIVE_EXPIRY_S = 3.0
_MAX_ERROR_BYTES = 1 << 16
_MAX_ERROR_CHARS = 2000

# A peer that is gone without a word is noticed after 60 + 4 * 15 s.
_SOCKET_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
]


@dataclass(frozen=True)
class Server:
    """Where a server is and how it is spoken to; nothing but configuration.

    Proxies from the environment are not used: rollouts stay inside a cluster.

    Raises:
        InvalidInputError: `base_url` is no http(s) address, `api_key` cannot stand in a header, or a
            limit is no positive number.
    """

    base_url: str
    max_connections: int
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.base_url)
        except (httpx.InvalidURL, TypeError) as error:
            raise InvalidInputError(f"base_url: got {self.base_url!r}: {error}") from None
        is_address = (
            url.scheme in ("http", "https") and url.host and (url.port is None or 0 < url.port < 1 << 16)
        )
        if not is_address or url.query or url.fragment:
            raise InvalidInputError(
                f"base_url: got {self.base_url!r}, expected http://host:port or https://…, without a query"
            )
        key = self.api_key
        if key is not None and not (
            isinstance(key, str) and key.isascii() and key.isprintable() and key.strip() == key != ""
        ):
            # Without showing it.
            raise InvalidInputError(
                "api_key: expected printable ASCII text without a space or line end around it"
            )
        if self.max_connections < 1:
            raise InvalidInputError(f"max_connections: got {self.max_connections}, expected 1 or more")


class Connections:
    """One pool of connections, for the event loop that it was made in.

    It closes itself when that loop shuts down (`asyncio.run` does that), so that a client that lives
    on, to be used from another loop, leaves no open sockets behind.
    """

    def __init__(self, server: Server) -> None:
        headers = {"Accept-Encoding": "identity"}
        if server.api_key is not None:
            headers["Authorization"] = f"Bearer {server.api_key}"
        self._base_url = server.base_url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self._base_url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            # A redirect would carry the key to wherever the answer points.
            follow_redirects=False,
            transport=_Lanes(),
        )
        self._closer: AsyncGenerator[None, None] | None = None

    async def aclose(self) -> None:
        """Close every connection."""
        if self._closer is not None:
            await self._closer.aclose()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._client.aclose()

    async def _ready(self) -> None:
        if self._closer is None:
            # A loop that shuts down closes the async generators that were started in it.
            self._closer = self._close_with_loop()
            await anext(self._closer)

    @asynccontextmanager
    async def post_lines(self, path: str, body: dict[str, Any]) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """POST `body` as JSON; yields the lines of the answer as they come, without their line ends.

        Leaving early closes the connection.

        Raises:
            ResponseError: the answer's status is not 200; another SglangToppError where a sidecar names it.
            TransportError: no whole answer came.
        """
        await self._ready()
        content = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json"}
        with _transport_errors(self._base_url + path):
            async with self._client.stream("POST", path, content=content, headers=headers) as response:
                if response.status_code != 200:
                    raise await _response_error(response)
                yield _lines(response)

    async def request_json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float
    ) -> Any:
        """A short question; its answer's JSON, or None where the answer is empty.

        Raises:
            ResponseError: the answer's status is not 2xx.
            TransportError: no whole answer came within `timeout_s`.
            WireError: the answer is no JSON.
        """
        await self._ready()
        with _transport_errors(self._base_url + path):
            response = await self._client.request(method, path, json=body, timeout=timeout_s)
        if not response.is_success:
            raise await _response_error(response)
        if not response.content:
            return None
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise WireError(path, f"the answer is no JSON: {error}") from None


class _Lanes(httpx.AsyncBaseTransport):
    """As many connections as there are requests at once, each in a pool of its own, the last used first.

    One pool for all would be simpler, but httpcore's compares every idle connection with every other
    whenever a request starts or ends: with hundreds, the event loop does little else.
    """

    def __init__(self) -> None:
        self._lanes: set[httpx.AsyncHTTPTransport] = set()
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        lane = self._idle.pop()[1] if self._idle else self._open()
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            await self._release(lane)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _LaneStream(response.stream, functools.partial(self._release, lane))
        return response

    async def aclose(self) -> None:
        while self._lanes:
            await self._lanes.pop().aclose()
        self._idle.clear()

    def _open(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_keepalive_connections=1, keepalive_expiry=_KEEPALIVE_EXPIRY_S)
        lane = httpx.AsyncHTTPTransport(verify=_ssl_context(), limits=limits, socket_options=_SOCKET_OPTIONS)
        self._lanes.add(lane)
        return lane

    async def _release(self, lane: httpx.AsyncHTTPTransport) -> None:
        now = time.monotonic()
        self._idle.append((now, lane))
        # While one is being closed, requests may take all others.
        while self._idle and self._idle[0][0] < now - _KEEPALIVE_EXPIRY_S:
            _, expired = self._idle.popleft()
            self._lanes.discard(expired)
            await expired.aclose()


class _LaneStream(httpx.AsyncByteStream):
    """An answer's body; its connection is free for the next request when it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, release: Callable[[], Awaitable[None]]) -> None:
        self._stream, self._release = stream, release

    def __aiter__(self) -> AsyncIterator[bytes]:
        return aiter(self._stream)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._release()


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Reading the certificates takes a tenth of a second."""
    return httpx.create_ssl_context()


@contextmanager
def _transport_errors(url: str) -> Generator[None, None, None]:
    """Turns the library's exceptions into TransportError."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise TransportError(f"{url}: no answer in time ({type(error).__name__})") from error
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL) as error:
        raise TransportError(f"{url}: {type(error).__name__}: {error}") from error


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    parts: list[bytes] = []
    async for data in response.aiter_bytes():
        *ends, rest = data.split(b"\n")
        for end in ends:
            yield b"".join([*parts, end]).rstrip(b"\r")
            parts.clear()
        if rest:
            parts.append(rest)
    if parts:
        raise TransportError(f"the answer was cut off in the middle of a line: {b''.join(parts)[:200]!r}")


async def _response_error(response: httpx.Response) -> SglangToppError:
    raw = b""
    if response.is_stream_consumed:
        raw = response.content
    else:
        async for data in response.aiter_bytes():
            raw += data
            if len(raw) > _MAX_ERROR_BYTES:
                break
    body = raw[:_MAX_ERROR_CHARS].decode("utf-8", "replace")
    status = response.status_code
    reported = _reported(raw)
    sentence = reported.get("message") or reported.get("detail") or body
    message = f"{response.request.method} {response.request.url}: HTTP {status}: {sentence}"
    if status in (401, 403):
        return AuthenticationError(message, status=status, body=body)
    if status == 429:
        return OverloadedError(
            message,
            status=status,
            body=body,
            retry_after_s=_retry_after_s(response.headers.get("Retry-After")),
        )
    if 400 <= status < 500:
        return BadRequestError(message, status=status, body=body)
    if status >= 500:
        # The sidecar says which error its 5xx is: not all of them pass with time.
        if isinstance(reported.get("type"), str) and reported["type"] in errors.__all__:
            return error_from_record(reported | {"status": status})
        return ServerError(message, status=status, body=body)
    if 300 <= status < 400:
        message += f" (a redirect to {response.headers.get('Location')}; not followed, put it into base_url)"
    return ResponseError(message, status=status, body=body)


def _reported(raw: bytes) -> dict[str, Any]:
    """What an error body says, whichever server wrote it: `{"error": {...}}`, `{"error": "..."}`, or flat."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    if isinstance(body, dict) and "error" in body:
        body = body["error"]
    if isinstance(body, str):
        return {"message": body}
    return body if isinstance(body, dict) else {}


def _retry_after_s(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
