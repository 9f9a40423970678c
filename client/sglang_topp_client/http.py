"""Connections to one server: with `lanes.py`, all that knows the HTTP library.

Sized for hundreds of generations at once: no limit on waiting for a connection (the client bounds its
own calls), no read time limit (a generation may take an hour; TCP keep-alive finds a dead peer), and
idle connections are dropped before the server does so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
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
from sglang_topp_client import files, messages, packed_record, score_record
from sglang_topp_client.checks import MAX_BODY_CHARS, MAX_MESSAGE_CHARS, shown, whole_number
from sglang_topp_client.lanes import Lanes
from sglang_topp_client.record import error_from_record
from sglang_topp_client.turns import Turns

__all__ = ["Connections", "Server"]

_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_BYTES = 1 << 16
_USER_AGENT = "sglang-topp"
_FRAMED = (packed_record.MEDIA_TYPE, score_record.MEDIA_TYPE)

_log = logging.getLogger(__name__)

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
    max_line_bytes: int
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.base_url, str):
            raise InvalidInputError(f"base_url: got {type(self.base_url).__name__}, expected text")
        try:
            url = httpx.URL(self.base_url)
        except (httpx.InvalidURL, ValueError) as error:
            raise InvalidInputError(f"base_url: got {shown(self.base_url)}: {error}") from None
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
        whole_number("max_connections", self.max_connections, 1)
        whole_number("max_line_bytes", self.max_line_bytes, 1)


class Connections:
    """One pool of connections, for the event loop that it was made in.

    It closes itself when that loop shuts down (`asyncio.run` does that), so that a client that lives
    on, to be used from another loop, leaves no open sockets behind.
    """

    def __init__(self, server: Server, long_lines_at_once: int) -> None:
        headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": _USER_AGENT}
        if server.api_key is not None:
            headers["Authorization"] = f"Bearer {server.api_key}"
        self._base_url = server.base_url.rstrip("/")
        self._max_line_bytes = server.max_line_bytes
        self._turns = Turns(long_lines_at_once)
        self._headers = headers
        self._urls: dict[str, httpx.URL] = {}
        self._lanes = Lanes(_SOCKET_OPTIONS)
        self._closer: AsyncGenerator[None, None] | None = None

    async def aclose(self) -> None:
        """Close every connection."""
        if self._closer is not None:
            await self._closer.aclose()

    async def _close_with_loop(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await self._lanes.aclose()

    async def _ready(self) -> None:
        if self._closer is None:
            # A loop that shuts down closes the async generators that were started in it.
            self._closer = self._close_with_loop()
            await anext(self._closer)

    @asynccontextmanager
    async def post(
        self, path: str, body: dict[str, Any], *, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """POST `body` as JSON; yields the messages of the answer as they come: its lines, or its frames where
        that is the form of it (`messages.py`).

        Leaving early closes the connection.

        Args:
            path: where to.
            body: what to.
            headers: others than `Content-Type`; `Accept` asks for another form than lines.

        Raises:
            ResponseError: the answer's status is not 200; another SglangToppError where a sidecar names it.
            TransportError: no whole answer came.
            WireError: a message is longer than `max_line_bytes`; it is not kept until it ends.
        """
        await self._ready()
        content = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        with _transport_errors(self._base_url + path):
            async with self._sent("POST", path, content, headers) as response:
                if response.status_code != 200:
                    raise await _response_error(response)
                media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
                cut = messages.frames if media_type in _FRAMED else messages.lines
                async with aclosing(cut(response, self._turns, self._max_line_bytes)) as each:
                    yield each

    async def request_json(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float
    ) -> Any:
        """A short question; its answer's JSON, or None where the answer is empty.

        Raises:
            ResponseError: the answer's status is not 2xx.
            TransportError: no whole answer came within `timeout_s`.
            WireError: the answer is no JSON, or longer than `max_line_bytes`.
        """
        await self._ready()
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = self._base_url + path
        try:
            async with asyncio.timeout(timeout_s):
                with _transport_errors(url):
                    async with self._sent(method, path, content, headers, is_urgent=True) as response:
                        if not response.is_success:
                            raise await _response_error(response)
                        answer = await messages.whole(response, self._max_line_bytes)
        except TimeoutError:
            raise TransportError(f"{url}: no answer in {timeout_s:g} s") from None
        if not answer:
            return None
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise WireError(path, f"the answer is no JSON: {error}") from None

    @asynccontextmanager
    async def _sent(
        self,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
        *,
        is_urgent: bool = False,
    ) -> AsyncGenerator[httpx.Response, None]:
        """The answer from its headers on. (What httpx's client does beyond this takes as long as sending a
        request does: redirects, which would carry the key to wherever they point, and cookies.)"""
        if (url := self._urls.get(path)) is None:
            url = self._urls[path] = httpx.URL(self._base_url + path)
        request = httpx.Request(
            method,
            url,
            headers={**self._headers, **headers},
            content=content,
            extensions={"timeout": {"connect": _CONNECT_TIMEOUT_S}, "is_urgent": is_urgent},
        )
        response = await self._lanes.handle_async_request(request)
        response.request = request
        try:
            yield response
        finally:
            await response.aclose()


@contextmanager
def _transport_errors(url: str) -> Generator[None, None, None]:
    """Turns the library's exceptions into TransportError."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise TransportError(f"{url}: no answer in time ({type(error).__name__})") from error
    except (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, OSError) as error:
        is_connecting = isinstance(error, httpx.ConnectError | OSError)
        if is_connecting and (sentence := files.shortage(error)) is not None:
            # It may pass, so it is tried again, but not without a word.
            _log.warning("%s: %s", url, sentence)
            raise TransportError(f"{url}: {sentence}") from error
        raise TransportError(f"{url}: {type(error).__name__}: {error}") from error


async def _response_error(response: httpx.Response) -> SglangToppError:
    raw = b""
    async for data in response.aiter_raw():
        raw += data
        if len(raw) > _MAX_ERROR_BYTES:
            break
    body = raw[:MAX_BODY_CHARS].decode("utf-8", "replace")
    status = response.status_code
    reported = _reported(raw)
    sentence = reported.get("message") or reported.get("detail") or body
    words = shown(sentence, MAX_MESSAGE_CHARS)
    message = f"{response.request.method} {response.request.url}: HTTP {status}: {words}"
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
        wait_s = max(0.0, float(value))
        return wait_s if wait_s < math.inf else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, OSError):
        return None
