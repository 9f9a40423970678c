"""The connections of one event loop: as many as there are requests at once and files for them.

They are httpcore's, which has the protocol, without its pool, which costs as much as a small request does.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import contextmanager
from typing import Any

import httpcore
import httpx

from sglang_topp_client import files

__all__ = ["Lanes"]

# Both servers are uvicorn with its default of 5 s (SGLang: SGLANG_TIMEOUT_KEEP_ALIVE). A request that
# meets a connection just as the server drops it fails, so the client must be first.
_KEEPALIVE_EXPIRY_S = 3.0
# Files may become free outside of this pool, of which nobody tells it.
_LOOK_AGAIN_S = 0.05


class Lanes(httpx.AsyncBaseTransport):
    """As many connections to one server as there are requests at once, the last used first.

    httpcore's pool would be simpler, but it compares every idle connection with every other whenever a
    request starts or ends: with hundreds, the event loop does little else.

    Where the process has no file left for another connection a request waits for one of those that
    are there; those with the extension `is_urgent` go first, and may use the last files.

    Args:
        socket_options: of every connection.
    """

    def __init__(self, socket_options: list[tuple[int, int, int]]) -> None:
        self._socket_options = socket_options
        self._share = files.Share()
        self._lanes: set[_Lane] = set()
        self._idle: deque[tuple[float, _Lane]] = deque()
        self._waiting: tuple[deque[_Waiter], deque[_Waiter]] = (deque(), deque())
        self._closing: dict[asyncio.Task[None], _Lane] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._next_expiry: asyncio.TimerHandle | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send it over a connection that is free, or over a new one."""
        is_urgent = bool(request.extensions.get("is_urgent"))
        while True:
            lane = await self._take(is_urgent)
            try:
                answer = await lane.handle(request)
            except BaseException as error:
                self._drop(lane)
                # Where the pool has others, one of them will be free.
                if not (isinstance(error, httpx.ConnectError) and self._lanes and files.shortage(error)):
                    raise
            else:
                body = _Body(answer, functools.partial(self._give_back, lane))
                return httpx.Response(answer.status, headers=answer.headers, stream=body)
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def aclose(self) -> None:
        """Close every connection."""
        for timer in (self._next_look, self._next_expiry):
            if timer is not None:
                timer.cancel()
        for line in self._waiting:
            for waiter in line:
                if not waiter.done():
                    waiter.set_exception(httpx.ConnectError("the client was closed"))
            line.clear()
        self._share.is_waiting = False
        self._idle.clear()
        for lane in list(self._lanes):
            self._drop(lane)
        while self._closing:
            await asyncio.wait(list(self._closing))

    # -- who gets one ------------------------------------------------------------------------------

    async def _take(self, is_urgent: bool) -> _Lane:
        line = self._waiting[not is_urgent]
        if not line and (lane := self._free_lane(is_urgent)) is not None:
            return lane
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        line.append(waiter)
        if self._next_look is None:
            self._serve()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._drop(waiter.result())
            raise

    def _free_lane(self, is_urgent: bool) -> _Lane | None:
        if self._idle:
            return self._idle.pop()[1]
        if not self._share.may_open(is_urgent=is_urgent):
            return None
        lane = _Lane(self._share, self._socket_options)
        self._lanes.add(lane)
        return lane

    def _serve(self) -> None:
        """Give what is free to those who wait, and look again soon where that is not enough."""
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None
        for line, is_urgent in zip(self._waiting, (True, False), strict=True):
            while line:
                if line[0].done():
                    line.popleft()
                elif (lane := self._free_lane(is_urgent)) is not None:
                    line.popleft().set_result(lane)
                else:
                    break
        self._share.is_waiting = any(self._waiting)
        if self._share.is_waiting:
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._serve)

    def _give_back(self, lane: _Lane, *, is_usable: bool) -> None:
        """It is free: for the next request, for another pool, or to wait for a while."""
        if lane not in self._lanes:
            return
        if not is_usable or self._share.must_yield:
            self._drop(lane)
            return
        loop = asyncio.get_running_loop()
        self._idle.append((loop.time(), lane))
        if any(self._waiting):
            self._serve()
        elif self._next_expiry is None:
            self._next_expiry = loop.call_later(_KEEPALIVE_EXPIRY_S, self._expire)

    def _expire(self) -> None:
        """Close what has been idle for long."""
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0][0] + _KEEPALIVE_EXPIRY_S <= loop.time():
            self._drop(self._idle.popleft()[1])
        self._next_expiry = (
            loop.call_at(self._idle[0][0] + _KEEPALIVE_EXPIRY_S, self._expire) if self._idle else None
        )

    def _drop(self, lane: _Lane) -> None:
        """Close it, in the background: whoever used it last may be under a time limit."""
        if lane not in self._lanes:
            return
        self._lanes.discard(lane)
        self._close(lane)

    def _close(self, lane: _Lane) -> None:
        task = asyncio.get_running_loop().create_task(lane.aclose())
        self._closing[task] = lane
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        lane = self._closing.pop(task)
        if task.cancelled():
            # By a loop that ends, perhaps before it began.
            self._close(lane)
            return
        self._share.end()
        # Whatever it failed with: there is nothing left to do.
        task.exception()
        if any(self._waiting):
            self._serve()


class _Lane:
    """One connection, opened anew where the server has closed it while nobody used it."""

    def __init__(self, share: files.Share, socket_options: list[tuple[int, int, int]]) -> None:
        self._share, self._socket_options = share, socket_options
        self._connection: httpcore.AsyncHTTPConnection | None = None
        share.begin()
        self._is_opening = True

    async def handle(self, request: httpx.Request) -> httpcore.Response:
        url = request.url
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
        extensions = request.extensions
        if self._connection is not None and (
            # An answer of HTTP/1.0, or one that came before all of its request was sent, closes it.
            not self._connection.is_idle() or self._connection.has_expired()
        ):
            await self._connection.aclose()
            self._connection = None
        if self._connection is None:
            self._connection = httpcore.AsyncHTTPConnection(
                target.origin,
                ssl_context=_ssl_context(),
                keepalive_expiry=_KEEPALIVE_EXPIRY_S,
                socket_options=self._socket_options,
            )
        if self._is_opening:
            extensions = {**extensions, "trace": self._trace}
        try:
            with _as_httpx():
                return await self._connection.handle_async_request(
                    httpcore.Request(
                        request.method,
                        target,
                        headers=request.headers.raw,
                        content=request.stream,
                        extensions=extensions,
                    )
                )
        finally:
            self._opened()

    async def aclose(self) -> None:
        self._opened()
        if self._connection is not None:
            with _as_httpx():
                await self._connection.aclose()

    async def _trace(self, event: str, _: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            self._opened()

    def _opened(self) -> None:
        if self._is_opening:
            self._is_opening = False
            self._share.opened()


_Waiter = asyncio.Future[_Lane]


class _Body(httpx.AsyncByteStream):
    """An answer's body, which gives its connection back when it is closed: usable where it was read to its
    end and the server keeps it open."""

    def __init__(self, answer: httpcore.Response, give_back: Callable[..., None]) -> None:
        self._answer, self._give_back = answer, give_back
        self._stays_open = not any(
            name.lower() == b"connection" and b"close" in value.lower() for name, value in answer.headers
        )
        self._is_read = False
        self._data: AsyncIterator[bytes] | None = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        self._data = self._answer.aiter_stream()
        return self

    async def __anext__(self) -> bytes:
        assert self._data is not None
        try:
            with _as_httpx():
                return await anext(self._data)
        except StopAsyncIteration:
            self._is_read = True
            raise

    async def aclose(self) -> None:
        is_usable = False
        try:
            with _as_httpx():
                await self._answer.aclose()
            is_usable = self._is_read and self._stays_open
        finally:
            # Whoever is cancelled here leaves the connection in the middle of its answer.
            self._give_back(is_usable=is_usable)


@contextmanager
def _as_httpx() -> Generator[None, None, None]:
    """Turns httpcore's exceptions into those of the same name that everything else here knows."""
    try:
        yield
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
        kind: type[httpx.TransportError] = getattr(httpx, type(error).__name__)
        raise kind(str(error)) from error


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    """Reading the certificates takes a tenth of a second."""
    return httpx.create_ssl_context()
