"""Connection: uvicorn's HTTP protocol, with an end to every wait for the other side.

uvicorn waits for ever for headers that do not end, and for readers that do not read: a transport that is
closed with unsent bytes keeps them, and its file, until they are taken. It also takes any number of
connections. Here a connection is cut off, with a reset that tells the peer so, where

- its headers are not there `max_stall_s` after it was opened, or after they began;
- its reader falls `max_stall_s` behind (see `Pace`), on whatever route, or leaves the end of an answer
  unread for that long;
- there are too many, and it is the one that has waited longest to send a request, or else its body.
  Thus whoever comes next is served, the caller of `/healthz` too, however many never send anything.

It builds on h11, which every uvicorn has, and which bounds the bytes of headers.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
from itertools import islice
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from sglang_topp_server.limits import Limits
from sglang_topp_server.pace import Pace

__all__ = ["Connection", "connection_of", "http_protocol"]

# Beyond those with a request in flight: idle ones, bodies under way, health checks and metrics.
_SPARE_CONNECTIONS = 1024
_STATE_KEY = "sglang_topp.connection"
# On, for 0 s: closing sends a reset and frees what the kernel holds, in place of waiting for the reader.
_NO_LINGER = struct.pack("ii", 1, 0)


def connection_of(scope: Any) -> Connection | None:
    """The connection that a request came on; None under a server without `http_protocol`."""
    found = scope.get("state", {}).get(_STATE_KEY)
    return found if isinstance(found, Connection) else None


def http_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """What `uvicorn.Config` takes as `http`, for one server.

    There may be 1,024 connections more than `limits.max_in_flight`, and no more than half of the files that
    this process may have open: the other half is for the engine's side.
    """
    max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    roster = _Roster(min(limits.max_in_flight + _SPARE_CONNECTIONS, max_files // 2))

    class Bounded(Connection):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(roster, limits.max_stall_s, *args, **kwargs)

    return Bounded


class _Roster:
    """Every open connection of a server, those that wait for their peer in the order since when."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._open: set[Connection] = set()
        self._without_request: dict[Connection, None] = {}
        self._without_body: dict[Connection, None] = {}

    def enter(self, connection: Connection) -> None:
        """A new one, which another makes room for; where none can, it is cut off itself."""
        self._open.add(connection)
        if len(self._open) > self._max_connections:
            longest = [*islice(self._without_request, 1), *islice(self._without_body, 1), connection]
            longest[0].cut_off("too many connections, and it has waited longest to send its request")
        if connection in self._open:
            self._without_request[connection] = None

    def note(self, connection: Connection, *, has_request: bool, has_body: bool) -> None:
        """What it has of its next request by now."""
        if connection not in self._open:
            return
        if has_request:
            self._without_request.pop(connection, None)
        else:
            self._without_request.setdefault(connection)
        if has_request and not has_body:
            self._without_body.setdefault(connection)
        else:
            self._without_body.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        """It is closed, or about to be."""
        self._open.discard(connection)
        self._without_request.pop(connection, None)
        self._without_body.pop(connection, None)


class Connection(H11Protocol):
    """One connection.

    Attributes:
        closed: set once it is; nothing of its answer is held by then.
        why_cut_off: a sentence, once it was cut off from this side.
    """

    def __init__(self, roster: _Roster, max_stall_s: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._roster, self._max_stall_s = roster, max_stall_s
        self.closed = asyncio.Event()
        self.why_cut_off: str | None = None
        # uvicorn gives every request a copy of it.
        self.app_state = {**self.app_state, _STATE_KEY: self}
        self._headers_due: asyncio.TimerHandle | None = None
        self._tail_due: asyncio.TimerHandle | None = None
        self._reader = _Reader(self, max_stall_s)

    # -- what the app sees -------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        """Whether what is sent now would wait for the reader."""
        return self.flow.write_paused

    def cut_off(self, why: str) -> None:
        """Close now, and drop what was not sent."""
        if self.why_cut_off is None and not self.closed.is_set():
            self.why_cut_off = why
            self._roster.leave(self)
            if (file := self.transport.get_extra_info("socket")) is not None:
                file.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.transport.abort()

    # -- asyncio's and uvicorn's calls -------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._expect_headers()
        self._roster.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._roster.leave(self)
        self._reader.stop()
        for timer in (self._headers_due, self._tail_due):
            if timer is not None:
                timer.cancel()
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._note():
            self._expect_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()
        self._expect_tail()

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(msg)
        self._expect_tail()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.fall_behind()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.catch_up()

    # -- deadlines ---------------------------------------------------------------------------------

    def _note(self) -> bool:
        """Tell the roster what is there; returns whether a request is."""
        has_request = self.cycle is not None and not self.cycle.response_complete
        has_body = has_request and not self.cycle.more_body
        self._roster.note(self, has_request=has_request, has_body=has_body)
        if has_request and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None
        return has_request

    def _expect_headers(self) -> None:
        """They have begun, or are to."""
        if self._headers_due is None:
            why = f"its headers were not there after {self._max_stall_s:g} s"
            self._headers_due = self.loop.call_later(self._max_stall_s, self.cut_off, why)

    def _expect_tail(self) -> None:
        """The end of an answer is what `fall_behind` does not see: too little for the transport to pause."""
        if self._tail_due is not None:
            self._tail_due.cancel()
        self._tail_due = None
        if self.transport.get_write_buffer_size():
            self._tail_due = self.loop.call_later(self._max_stall_s, self._check_tail, self.cycle)

    def _check_tail(self, cycle: object) -> None:
        if self.cycle is cycle and self.transport.get_write_buffer_size():
            self.cut_off(f"it left the end of an answer unread for {self._max_stall_s:g} s")


class _Reader:
    """The pace of a connection's peer in taking what is sent.

    Between `fall_behind` and `catch_up` nothing is written, so what the buffer loses is what was taken.
    """

    def __init__(self, connection: Connection, max_stall_s: float) -> None:
        self._connection, self._max_stall_s = connection, max_stall_s
        self._pace = Pace(max_stall_s)
        self._since_s = 0.0
        self._unsent = 0
        self._check_due: asyncio.TimerHandle | None = None

    def fall_behind(self) -> None:
        self._pace.rest(self._take_time())
        self._unsent = self._connection.transport.get_write_buffer_size()
        self._expect()

    def catch_up(self) -> None:
        self.stop()
        self._settle()

    def stop(self) -> None:
        if self._check_due is not None:
            self._check_due.cancel()
            self._check_due = None

    def _expect(self) -> None:
        self._check_due = self._connection.loop.call_later(max(self._pace.left_s, 0.0), self._check)

    def _check(self) -> None:
        self._settle()
        if self._pace.left_s > 0:
            self._expect()
        else:
            self._connection.cut_off(f"its reader fell {self._max_stall_s:g} s behind")

    def _settle(self) -> None:
        unsent = self._connection.transport.get_write_buffer_size()
        self._pace.note(self._take_time(), self._unsent - unsent)
        self._unsent = unsent

    def _take_time(self) -> float:
        """Seconds since this was last asked."""
        now = self._connection.loop.time()
        since_s, self._since_s = self._since_s, now
        return now - since_s
