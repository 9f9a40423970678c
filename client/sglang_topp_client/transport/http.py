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
import math
import os
import socket
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]  # a module, or none

from sglang_topp import errors
from sglang_topp_client.transport.server_config import ServerConfig
from sglang_topp_client.value_checks import MAX_BODY_CHARS, decode_json, truncate
from sglang_topp_client.wire.error_json import class_of_status, error_from_json
from sglang_topp_client.wire.records import MEDIA_TYPES

# The number of descriptors to keep free for files that the process opens later, and for attempts to connect.
# One attempt to connect may take several descriptors: resolving the host name opens files and sockets, and
# the client may try two addresses at once.
_RESERVE = 64
# SGLang's uvicorn closes an idle connection after 5 s (SGLANG_TIMEOUT_KEEP_ALIVE). A request fails if the
# request starts while the server closes the connection. The client therefore closes an idle connection before
# the server does.
_KEEPALIVE_S = 3.0
_CONNECT_TIMEOUT_S = 10.0
_MAX_ERROR_BYTES = 1 << 16
# A request body above this size goes to aiohttp as a stream, because aiohttp warns about a large body of type
# `bytes`.
_MAX_BYTES_BODY = 1 << 20
# A blocked event loop fires a timer late, and would then take an answer that has long arrived for a timeout.
# `probe` therefore waits in so many steps. In each step the loop reads what has arrived.
_PROBE_WAITS = 10
_USER_AGENT = "sglang-topp"
_FRAMED = tuple(MEDIA_TYPES.values())
_HEAD_BYTES = 8

# With these TCP keepalive options, the kernel needs 60 + 4 * 15 s to detect that a peer is gone.
_SOCKET_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))
    if hasattr(socket, name)
]


class HttpClient:
    """An HTTP client of one server, for the event loop in which it was created.

    When `asyncio.run` shuts down the event loop, the client closes its connections, so that no socket stays
    open. A forked process cannot use them, and leaves them to its parent.

    Args:
        config: the server's connection settings.

    Attributes:
        heard_at: when a part of an answer to `post` last arrived, as the event loop counts time.
        before_close: awaited before the connections close, also if the event loop ends without `aclose`.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.heard_at = 0.0
        self.before_close: Callable[[], Awaitable[None]] | None = None
        # The client asks servers for uncompressed answers, because a few compressed bytes may expand to any
        # size.
        self._headers = {"accept-encoding": "identity", "user-agent": _USER_AGENT, **config.headers}
        if config.api_key is not None:
            self._headers["authorization"] = f"Bearer {config.api_key}"
        self._base_url = config.base_url
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
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """POST `body` as JSON, and yield the messages of the answer as they arrive.

        The answer's media type decides whether the answer's messages are lines or frames. If
        the caller leaves the `async with` block early, the client closes the connection.

        Args:
            path: the route.
            body: the JSON body.
            headers: additional headers, such as an `Accept` that requests frames.

        Raises:
            ResponseError: the answer's status is not 200. If a sidecar's 5xx answer names one of this
                project's error classes, the client raises an error of that class.
            TransportError: the answer did not arrive completely.
            WireError: a message is longer than `max_message_bytes`; the rest of the answer is not read.
        """
        try:
            async with await self._send("POST", path, body, headers) as response:
                self.heard_at = asyncio.get_running_loop().time()
                await _check_answer(response, accepted=range(200, 201))
                parts = self._parts(response)
                if self._throttle is not None:
                    parts = self._throttle(parts)
                media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
                split = frames if media_type in _FRAMED else lines
                async with aclosing(parts), aclosing(split(parts, self._max_message_bytes)) as messages:
                    yield messages
        except errors.SglangToppError:  # a server's 504 is an OSError too
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise _transport_error(self._base_url + path, error) from error

    async def _parts(self, response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
        async for data in response.content.iter_any():
            self.heard_at = asyncio.get_running_loop().time()
            yield data

    async def request_json(
        self, method: str, path: str, body: dict[str, Any] | bytes | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        """Send a request, and return the JSON object of the answer.

        Raises:
            SglangToppError: the request failed; see `HttpClient.request`.
            WireError: the answer is not a JSON object.
        """
        answer = await self.request(method, path, body, timeout_s=timeout_s)
        return decode_json(answer, dict[str, Any], field=path)

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
        # Make no asynchronous generator here: aborts are sent while the event loop shuts its generators down.
        try:
            async with asyncio.timeout(timeout_s) as limit:
                async with await self._send(method, path, body) as response:
                    await _check_answer(response, accepted=range(200, 300))
                    answer = bytearray()
                    async for data in response.content.iter_any():
                        answer += data
                        if len(answer) > self._max_message_bytes:
                            raise _too_long(len(answer), self._max_message_bytes)
                    return bytes(answer)
        except errors.SglangToppError:  # a server's 504 is an OSError too
            raise
        except (aiohttp.ClientError, OSError) as error:
            if limit.expired():
                raise errors.TransportError(
                    f"{self._base_url + path}: no answer in {timeout_s:g} s"
                ) from None
            raise _transport_error(self._base_url + path, error) from error

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
            async with await self._send("GET", path) as response:
                return response.status
        except (aiohttp.ClientError, OSError):
            return 0

    async def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> aiohttp.ClientResponse:
        """Return the answer as soon as its headers have arrived.

        The answer is an asynchronous context manager, which closes the connection if part of the answer is
        unread. The client does not follow redirects, because the target of a redirect would get the API key.
        """
        data: Any = body
        if isinstance(body, dict):
            data = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
        sent = dict(headers or {})
        if data is not None:
            sent["Content-Type"] = "application/json"
            data = data if len(data) <= _MAX_BYTES_BODY else io.BytesIO(data)
        session = self._session or await self._open()
        url = self._base_url + path
        return await session.request(method, url, data=data, headers=sent, allow_redirects=False)

    async def _open(self) -> aiohttp.ClientSession:
        if self._is_of_parent:
            raise errors.TransportError(
                f"{self._base_url}: this event loop belongs to the process that forked this one; use the"
                " client on an event loop of this process"
            )
        session = self._session = aiohttp.ClientSession(
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
        self._closer = self._close_at_end(session)
        await anext(self._closer)
        _keep_from_collector(session)
        return session

    async def _close_at_end(self, session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            if self.before_close is not None:
                await self.before_close()
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
            self._session = None


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


# -- messages --------------------------------------------------------------------------------------


def frame_head(num_bytes: int) -> bytes:
    """Return the length prefix of a frame that holds `num_bytes` bytes."""
    return num_bytes.to_bytes(_HEAD_BYTES, "little")


async def lines(body: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the lines of an answer as they arrive, without their line ends.

    Raises:
        WireError: a line is longer than `max_bytes`; the rest of the answer is not read.
        TransportError: the answer ends in the middle of a line.
    """
    # Collect a line in one large buffer, and not in a list of chunks. malloc returns the memory of a large
    # buffer to the OS as soon as the buffer is freed.
    pending = bytearray()
    async for data in body:
        *ends, rest = data.split(b"\n")
        for end in ends:
            pending += end
            if len(pending) > max_bytes:
                raise _too_long(len(pending), max_bytes)
            line = bytes(pending).rstrip(b"\r")
            # A line may be hundreds of MB long. To save memory, this loop frees the buffer `pending`
            # before the caller decodes the line, and frees `line` before the next line is read.
            pending = bytearray()
            yield line
            del line
        pending += rest
        if len(pending) > max_bytes:
            raise _too_long(len(pending), max_bytes)
    if pending:
        raise errors.TransportError(
            f"the answer was cut off in the middle of a line: {bytes(pending[:200])!r}"
        )


async def frames(body: AsyncIterator[bytes], max_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield the frames of an answer as they arrive, without their length prefixes.

    Raises:
        WireError: a frame is longer than `max_bytes`; the frame is not read.
        TransportError: the answer ends in the middle of a frame.
    """
    pending = bytearray()
    async for data in body:
        pending += data
        while len(pending) >= _HEAD_BYTES:
            end = _HEAD_BYTES + int.from_bytes(pending[:_HEAD_BYTES], "little")
            if end - _HEAD_BYTES > max_bytes:
                raise _too_long(end - _HEAD_BYTES, max_bytes)
            if len(pending) < end:
                break
            frame = bytes(memoryview(pending)[_HEAD_BYTES:end])
            # Free the frame's part of the buffer before the caller decodes the frame.
            del pending[:end]
            yield frame
            del frame
    if pending:
        raise errors.TransportError(
            f"the answer was cut off in the middle of a frame: {len(pending)} bytes of it arrived"
        )


def _too_long(size: int, max_bytes: int) -> errors.WireError:
    return errors.WireError(
        "max_message_bytes",
        f"got {size} bytes of one message of the answer (one sample) so far, expected at most {max_bytes}; if"
        " samples are that long, increase the client's max_message_bytes",
    )


# -- errors ----------------------------------------------------------------------------------------


def _transport_error(url: str, error: aiohttp.ClientError | OSError) -> errors.TransportError:
    """Return the error of a request that got no complete answer."""
    if isinstance(error, TimeoutError):
        return errors.TransportError(f"{url}: no connection in {_CONNECT_TIMEOUT_S:g} s")
    is_connecting = isinstance(error, aiohttp.ClientConnectorError | OSError)
    if is_connecting and (sentence := fd_shortage(error)) is not None:
        return FileLimitError(f"{url}: {sentence}")
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED:
        return errors.TransportError(
            f"{url}: nothing listens at {error.host}:{error.port} (connection refused); start one, for"
            f" example with `sglang-topp serve --model-path MODEL --port {error.port}`, or give the address"
            " of a server that runs"
        )
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return errors.TransportError(
            f"{url}: the server's certificate is not trusted: {error.certificate_error}; name its CA in the"
            " SSLContext that you pass as ssl=, or in the file of SSL_CERT_FILE"
        )
    return errors.TransportError(f"{url}: {type(error).__name__}: {error}")


async def _check_answer(response: aiohttp.ClientResponse, accepted: range) -> None:
    """Raise the error that an answer reports, or a WireError if it is compressed, which no request allows."""
    if response.status not in accepted:
        raise await _response_error(response)
    if (coding := response.headers.get("Content-Encoding", "identity")).lower() != "identity":
        raise errors.WireError("Content-Encoding", f"got {coding!r}, expected 'identity', as requested")


async def _response_error(response: aiohttp.ClientResponse) -> errors.SglangToppError:
    """Return the error that an answer of a status that is not accepted reports."""
    raw = b""
    async for data in response.content.iter_any():
        raw += data
        if len(raw) > _MAX_ERROR_BYTES:
            break
    body = raw[:MAX_BODY_CHARS].decode("utf-8", "replace")
    status = response.status
    reported = _reported(raw)
    sentence = reported.get("message") or reported.get("detail") or body
    words = truncate(sentence)
    message = f"{response.method} {response.url}: HTTP {status}: {words}"
    kind = class_of_status(status) if status >= 400 else errors.ResponseError
    if kind is errors.OverloadedError:
        retry_after_s = _retry_after_s(response.headers.get("Retry-After"))
        return errors.OverloadedError(message, status=status, body=body, retry_after_s=retry_after_s)
    # A sidecar names the class of the error in its 5xx answers, because the client must not retry every 5xx
    # error.
    if (
        kind is errors.ServerError
        and isinstance(reported.get("type"), str)
        and reported["type"] in errors.__all__
    ):
        return error_from_json(reported | {"status": status})
    if 300 <= status < 400:
        message += f" (a redirect to {response.headers.get('Location')}; not followed, use it as base_url)"
    return kind(message, status=status, body=body)


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


# -- the limit on open files -----------------------------------------------------------------------
#
# Every connection takes one file descriptor. The soft limit on open descriptors (`ulimit -n`, RLIMIT_NOFILE)
# is often 1,024, and 256 on macOS. The client does not raise it, because other code in the process may call
# `select`, which fails on descriptors of 1,024 and above.


class FileLimitError(errors.TransportError):
    """Raised if a connection fails to open because the process or the machine has no free file descriptor."""


def max_connections(wanted: int) -> int:
    """Return how many connections a client may have open at once.

    The returned number is `wanted` or the number of free descriptors, whichever is smaller. The number of
    free descriptors is the process's limit on open files, minus the number of files open now, minus a
    reserve. The reserve is 64 files or an eighth of the limit, whichever is smaller. The returned number is
    at least 1, so that a client without a free descriptor raises an error, and does not wait forever.
    """
    limit = _limit()
    if limit is None:
        return wanted
    return max(1, min(wanted, limit - _num_open() - min(_RESERVE, limit // 8)))


def fd_shortage(error: BaseException) -> str | None:
    """Return a sentence that names a remedy if `error` comes from a lack of file descriptors.

    Return None if `error` has another cause.
    """
    code = getattr(error, "errno", None)
    if code == errno.ENFILE:
        return "the machine has no file left for a connection (ENFILE, fs.file-max): close some, or raise it"
    if code != errno.EMFILE and not _is_none_left():
        return None
    return (
        f"no file is left for a connection: this process may have {_limit()} open (EMFILE); raise that with"
        " `ulimit -n 65536` before it starts or resource.setrlimit(resource.RLIMIT_NOFILE, ...) in it, or"
        " close files"
    )


def _limit() -> int | None:
    """Return the soft limit on open files, or None if there is no limit."""
    if resource is None:
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _num_open() -> int:
    """Return how many files this process has open, or 0 if the system cannot list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def _is_none_left() -> bool:
    """Try to open a file, and return whether the process has no file descriptor left.

    The `errno` of an exception does not always show that no descriptor is left. For example, a host-name
    lookup without a free descriptor raises an error whose `errno` is not EMFILE.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno == errno.EMFILE
    return False
