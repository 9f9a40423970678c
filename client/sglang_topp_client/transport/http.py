"""HTTP client of one server, built on aiohttp: send requests, stream answers, and raise HTTP errors.

The client supports hundreds of generations at once. The client has no read timeout, because a generation may
take an hour. The connection pool has no size limit, because `servers.py` already limits the
calls in flight.

The client uses aiohttp, because aiohttp has the fastest of the three connection pools that we compared. The
other two are the pool of httpx and an earlier pool of this project. The comparison used paired runs with
1,000 samples in flight, against `benchmarks/harness/fake_engine.py`. aiohttp finished 1.2 to 1.4 times as
many samples per second as the earlier pool. httpx finished 0.6 times as many samples per second as the
earlier pool. Whenever a request starts or ends, httpx walks through all its connections once for each idle
connection. With many idle connections, this takes quadratic time.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import math
import os
import socket
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ssl import SSLContext
from typing import Any
from urllib.parse import urlsplit

import aiohttp

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
    describe,
)
from sglang_topp_client.argument_checks import MAX_BODY_CHARS, MAX_MESSAGE_CHARS, truncate, whole_number
from sglang_topp_client.transport import fd_limit, framing
from sglang_topp_client.transport.extra_headers import as_headers
from sglang_topp_client.transport.fd_limit import FileLimitError
from sglang_topp_client.wire.error_json import error_from_json
from sglang_topp_client.wire.records import MEDIA_TYPES

__all__ = ["HttpClient", "ServerConfig", "check_key", "check_url", "server_urls"]

_CONNECT_TIMEOUT_S = 10.0
# SGLang's uvicorn closes an idle connection after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE). A request fails if the
# request starts while the server closes the connection. The client therefore closes an idle connection before
# the server does.
_KEEPALIVE_S = 3.0
# A request body above this size goes to aiohttp as a stream, because aiohttp warns about a large body of type
# `bytes`.
_MAX_BYTES_BODY = 1 << 20
_MAX_ERROR_BYTES = 1 << 16
# A blocked event loop fires a timer late, and would then take an answer that has long arrived for a timeout.
# `probe` therefore waits in so many steps. In each step the loop reads what has arrived.
_PROBE_WAITS = 10
_USER_AGENT = "sglang-topp"
_FRAMED = tuple(MEDIA_TYPES.values())

_log = logging.getLogger(__name__)

# With these TCP keepalive options, the kernel needs 60 + 4 * 15 s to detect that a peer is gone.
_SOCKET_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
]


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of one server's connections: address, key, headers, TLS settings, and limits.

    `throttle` passes on the bytes of each streamed answer, and may delay the reading of more.

    The client ignores the proxy settings of the environment, because the servers usually run in the client's
    own cluster, and need no proxy.

    Raises:
        InvalidInputError: the value of `base_url` is not an http(s) address, `api_key` or `headers` cannot be
            sent, `ssl` is not an SSLContext, or a limit is not a positive number.
    """

    base_url: str
    max_connections: int = 1024
    max_message_bytes: int = 512 * 2**20
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ssl: SSLContext | None = None
    throttle: Callable[[AsyncGenerator[bytes, None]], AsyncGenerator[bytes, None]] = lambda body: body

    def __post_init__(self) -> None:
        check_url("base_url", self.base_url)
        check_key("api_key", self.api_key)
        object.__setattr__(self, "headers", as_headers(self.headers))
        if self.api_key is not None and "authorization" in self.headers:
            raise InvalidInputError(
                "headers: got Authorization beside an API key, which is sent in that header; expected one"
            )
        if self.ssl is not None and not isinstance(self.ssl, SSLContext):
            raise InvalidInputError(f"ssl: got {type(self.ssl).__name__}, expected an ssl.SSLContext")
        whole_number("max_connections", self.max_connections, 1)
        whole_number("max_message_bytes", self.max_message_bytes, 1)


def check_key(name: str, key: Any) -> None:
    """Raise InvalidInputError unless `key` is None or valid in an HTTP header. The message omits `key`."""
    if key is not None and not (
        isinstance(key, str) and key.isascii() and key.isprintable() and key.strip() == key != ""
    ):
        raise InvalidInputError(
            f"{name}: expected printable ASCII text without a space or line end around it"
        )


def server_urls(name: str, urls: Any) -> list[str]:
    """Check the URLs, and return them as a list with one URL per server.

    Raises:
        InvalidInputError: no URL is given, a URL is given twice, or a URL is not an http(s) address.
    """
    if isinstance(urls, str | bytes) or not isinstance(urls, Sequence):
        urls = [urls]
    if not urls:
        raise InvalidInputError(f"{name}: got none, expected at least one")
    for url in urls:
        check_url(name, url)
    plain = [url.rstrip("/") for url in urls]
    if twice := [url for i, url in enumerate(plain) if url in plain[:i]]:
        raise InvalidInputError(f"{name}: got {describe(twice[0])} twice, expected different servers")
    return list(urls)


def check_url(name: str, value: Any) -> None:
    """Raise InvalidInputError unless `value` is the http(s) address of a server."""
    if not isinstance(value, str):
        raise InvalidInputError(f"{name}: got {type(value).__name__}, expected text")
    try:
        url = urlsplit(value)
        is_address = url.scheme in ("http", "https") and url.hostname and (url.port is None or url.port > 0)
        is_address = is_address and value.isprintable() and " " not in value
    except ValueError as error:
        raise InvalidInputError(f"{name}: got {describe(value)}: {error}") from None
    if not is_address or url.query or url.fragment or url.username is not None:
        raise InvalidInputError(
            f"{name}: got {describe(value)}, expected http://host:port or https://…, without a query"
            " or a user name"
        )


class HttpClient:
    """An HTTP client of one server, for the event loop in which it was created.

    When `asyncio.run` shuts down the event loop, the client closes its connections, so that no socket stays
    open. A forked process cannot use them, and leaves them to its parent.

    Args:
        config: the server's connection settings.
        before_close: awaited before the connections close, also if the event loop ends without `aclose`.
    """

    def __init__(
        self,
        config: ServerConfig,
        before_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._before_close = before_close
        # The client asks servers for uncompressed answers, because a few compressed bytes may expand to any
        # size.
        self._headers = {"accept-encoding": "identity", "user-agent": _USER_AGENT, **config.headers}
        if config.api_key is not None:
            self._headers["authorization"] = f"Bearer {config.api_key}"
        self._base_url = config.base_url.rstrip("/")
        self._max_message_bytes = config.max_message_bytes
        self._ssl = config.ssl
        self._throttle = config.throttle
        self._session: aiohttp.ClientSession | None = None
        self._closer: AsyncGenerator[None, None] | None = None
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_of_parent = False
        _all.add(self)

    async def aclose(self) -> None:
        """Close every connection."""
        if self._closer is not None:
            await self._closer.aclose()

    @asynccontextmanager
    async def post(
        self,
        path: str,
        body: dict[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        on_received: Callable[[], None] = lambda: None,
    ) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """POST `body` as JSON, and yield the messages of the answer as they arrive.

        The answer's media type decides whether the answer's messages are lines or frames (`framing.py`). If
        the caller leaves the `async with` block early, the client closes the connection.

        Args:
            path: the route.
            body: the JSON body.
            headers: additional headers, such as an `Accept` that requests frames.
            on_received: called whenever a part of the answer has arrived.

        Raises:
            ResponseError: the answer's status is not 200. If a sidecar's 5xx answer names one of this
                project's error classes, the client raises an error of that class.
            TransportError: the answer did not arrive completely.
            WireError: a message is longer than `max_message_bytes`; the rest of the answer is not read.
        """
        content = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        with _transport_errors(self._base_url + path):
            async with self._send("POST", path, content, headers) as response:
                on_received()
                if response.status != 200:
                    raise await _response_error(response)
                body_bytes = self._throttle(_body_of(response, on_received))
                cut = framing.frames if _media_type(response) in _FRAMED else framing.lines
                async with aclosing(body_bytes), aclosing(cut(body_bytes, self._max_message_bytes)) as each:
                    yield each

    async def request_json(
        self, method: str, path: str, body: dict[str, Any] | bytes | None = None, *, timeout_s: float
    ) -> Any:
        """Send a request, and return the parsed JSON of the answer, or None if the answer is empty.

        Raises:
            SglangToppError: the request failed; see `HttpClient.request`.
            WireError: the answer is not JSON.
        """
        answer = await self.request(method, path, body, timeout_s=timeout_s)
        if not answer:
            return None
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise WireError(path, f"the answer is not JSON: {error}") from None

    async def request(
        self, method: str, path: str, body: dict[str, Any] | bytes | None = None, *, timeout_s: float
    ) -> bytes:
        """Send a request, and return the body of the answer.

        Args:
            method: the HTTP method.
            path: the route.
            body: the object to send as JSON, or the bytes of a JSON text.
            timeout_s: the time limit for the request and its complete answer.

        Raises:
            ResponseError: the answer's status is not 2xx.
            TransportError: no complete answer arrived within `timeout_s`.
            WireError: the answer is longer than `max_message_bytes`.
        """
        content = json.dumps(body, allow_nan=False).encode() if isinstance(body, dict) else body
        headers = {} if body is None else {"Content-Type": "application/json"}
        url = self._base_url + path
        try:
            async with asyncio.timeout(timeout_s):
                with _transport_errors(url):
                    async with self._send(method, path, content, headers) as response:
                        if not 200 <= response.status < 300:
                            raise await _response_error(response)
                        return await framing.whole(_body_of(response), self._max_message_bytes)
        except SglangToppError:  # a server's 504 is a TimeoutError too
            raise
        except TimeoutError:
            raise TransportError(f"{url}: no answer in {timeout_s:g} s") from None

    async def tell(self, path: str, body: dict[str, Any], *, timeout_s: float) -> None:
        """POST `body` as JSON, and ignore the answer and every failure.

        Unlike the other methods, this one works while the event loop shuts down, which allows no new
        asynchronous generators.
        """
        with suppress(aiohttp.ClientError, OSError, TransportError):
            session = await self._open()
            async with asyncio.timeout(timeout_s):
                response = await session.post(self._base_url + path, json=body, allow_redirects=False)
                await response.read()

    async def probe(self, path: str, *, timeout_s: float) -> int | None:
        """Return the status of a GET request's answer, or None if no headers arrive within `timeout_s`.

        Return 0 if the connection fails within `timeout_s`, because a failed connection does not show that
        the server hangs. A server that is shutting down refuses new connections, but still finishes its
        earlier requests.

        `timeout_s` counts only the time in which the event loop could read an answer. A caller that blocks
        the loop for an hour, for example with a training step, uses up a tenth of `timeout_s`.
        """
        answer = asyncio.ensure_future(self._status(path))
        try:
            for _ in range(_PROBE_WAITS):
                if (await asyncio.wait([answer], timeout=timeout_s / _PROBE_WAITS))[0]:
                    return answer.result()
            return None
        finally:
            answer.cancel()
            await asyncio.wait([answer])

    async def _status(self, path: str) -> int:
        try:
            async with self._send("GET", path, None, {}) as response:
                return response.status
        except (aiohttp.ClientError, OSError):
            return 0

    @asynccontextmanager
    async def _send(
        self, method: str, path: str, content: bytes | None, headers: Mapping[str, str]
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """Yield the answer as soon as its headers have arrived.

        The client does not follow redirects, because the target of a redirect would get the API key.
        """
        session = await self._open()
        data = io.BytesIO(content) if content is not None and len(content) > _MAX_BYTES_BODY else content
        response = await session.request(
            method,
            self._base_url + path,
            data=data,
            headers=headers,
            allow_redirects=False,
        )
        try:
            yield response
        finally:
            # `release` closes the connection if part of the answer is still unread.
            response.release()

    async def _open(self) -> aiohttp.ClientSession:
        if self._is_of_parent:
            raise TransportError(
                f"{self._base_url}: this event loop belongs to the process that forked this one; use the"
                " client on an event loop of this process"
            )
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=_Connector(
                    limit=0,
                    keepalive_timeout=_KEEPALIVE_S,
                    socket_factory=self._keepalive_socket,
                    ssl=True if self._ssl is None else self._ssl,
                ),
                timeout=aiohttp.ClientTimeout(connect=_CONNECT_TIMEOUT_S),
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
            # When an event loop shuts down, the loop closes all of its asynchronous generators. The generator
            # `_closer` closes the aiohttp session at that time, even if the caller never calls `aclose`.
            self._closer = self._close_at_end(self._session)
            await anext(self._closer)
            _keep_from_collector(self._session)
        return self._session

    async def _close_at_end(self, session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if self._before_close is not None:
                await self._before_close()
            await session.close()
            _open_sessions.pop(session, None)
            # Wait for one iteration of the event loop, in which aiohttp's transports close their sockets.
            await asyncio.sleep(0)

    def _keepalive_socket(self, address: tuple[Any, ...]) -> socket.socket:
        family, kind, protocol, *_ = address
        made = socket.socket(family, kind, protocol)
        for option in _SOCKET_OPTIONS:
            made.setsockopt(*option)
        self._sockets.add(made)
        return made

    def _leave_to_parent(self, nowhere: int) -> None:
        """In a forked process, replace this process's copies of the sockets by the file `nowhere`.

        The objects of aiohttp and asyncio in this process then reach neither the connections nor the parent's
        epoll, which the processes share: a selector ignores that the file is not registered.
        """
        self._is_of_parent = True
        for each in list(self._sockets):
            if each.fileno() >= 0:
                os.dup2(nowhere, each.fileno(), inheritable=False)
        if self._session is not None:
            self._session.detach()


_all: weakref.WeakSet[HttpClient] = weakref.WeakSet()


def _leave_connections_to_parent() -> None:
    if clients := list(_all):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for client in clients:
            client._leave_to_parent(nowhere)
        os.close(nowhere)
    _open_sessions.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_connections_to_parent)


class _Connector(aiohttp.TCPConnector):
    """A connector whose finalizer does nothing.

    `aclose` closes the connections, and so does the end of the event loop (`_close_at_end`). A finalizer may
    run in any thread, or in a forked process, whose parent uses them.
    """

    def __del__(self, _warnings: Any = None) -> None:
        pass


# The garbage collector may find a client in any thread, and would finalize its open session before the
# client's own finalizer can close it on the session's event loop.
_open_sessions: dict[aiohttp.ClientSession, asyncio.AbstractEventLoop] = {}


def _keep_from_collector(session: aiohttp.ClientSession) -> None:
    """Refer to a session until it or its event loop is closed."""
    for other, loop in list(_open_sessions.items()):
        if loop.is_closed():
            _open_sessions.pop(other, None)
    _open_sessions[session] = asyncio.get_running_loop()


def _media_type(response: aiohttp.ClientResponse) -> str:
    return response.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def _body_of(
    response: aiohttp.ClientResponse, on_received: Callable[[], None] = lambda: None
) -> AsyncGenerator[bytes, None]:
    """Yield the body as it arrives, without decompressing it.

    Raises:
        WireError: the body is compressed, although the request asks for an uncompressed answer.
    """
    if (coding := response.headers.get("Content-Encoding", "identity")).lower() != "identity":
        raise WireError("Content-Encoding", f"got {coding!r}, expected 'identity', as requested")
    async for data in response.content.iter_any():
        on_received()
        yield data


@contextmanager
def _transport_errors(url: str) -> Generator[None, None, None]:
    """A context manager that converts exceptions of aiohttp and the OS to TransportError."""
    try:
        yield
    except SglangToppError:  # a server's 504 is a TimeoutError too
        raise
    except TimeoutError as error:
        raise TransportError(f"{url}: no connection in {_CONNECT_TIMEOUT_S:g} s") from error
    except (aiohttp.ClientError, OSError) as error:
        is_connecting = isinstance(error, aiohttp.ClientConnectorError | OSError)
        if is_connecting and (sentence := fd_limit.shortage(error)) is not None:
            # The client retries after a FileLimitError, because file descriptors may become free. The log
            # message tells the user why the retried call takes long.
            _log.warning("%s: %s", url, sentence)
            raise FileLimitError(f"{url}: {sentence}") from error
        if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED:
            raise TransportError(
                f"{url}: nothing listens at {error.host}:{error.port} (connection refused); start one,"
                f" for example with `sglang-topp serve --model-path MODEL --port {error.port}`, or give"
                " the address of a server that runs"
            ) from error
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            raise TransportError(
                f"{url}: the server's certificate is not trusted: {error.certificate_error}; name its CA in"
                " the SSLContext that you pass as ssl=, or in the file of SSL_CERT_FILE"
            ) from error
        raise TransportError(f"{url}: {type(error).__name__}: {error}") from error


async def _response_error(response: aiohttp.ClientResponse) -> SglangToppError:
    raw = b""
    async for data in response.content.iter_any():
        raw += data
        if len(raw) > _MAX_ERROR_BYTES:
            break
    body = raw[:MAX_BODY_CHARS].decode("utf-8", "replace")
    status = response.status
    reported = _reported(raw)
    sentence = reported.get("message") or reported.get("detail") or body
    words = truncate(sentence, MAX_MESSAGE_CHARS)
    message = f"{response.method} {response.url}: HTTP {status}: {words}"
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
        # A sidecar names the class of the error in its 5xx answers, because the client must not retry every
        # 5xx error.
        if isinstance(reported.get("type"), str) and reported["type"] in errors.__all__:
            return error_from_json(reported | {"status": status})
        return ServerError(message, status=status, body=body)
    if 300 <= status < 400:
        message += f" (a redirect to {response.headers.get('Location')}; not followed, use it as base_url)"
    return ResponseError(message, status=status, body=body)


def _reported(raw: bytes) -> dict[str, Any]:
    """Return the fields of an error answer's body, or an empty dict if the body has none of the known forms.

    The known forms of a body are `{"error": {...}}`, `{"error": "..."}`, and an object without `error`.
    """
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
