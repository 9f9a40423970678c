"""Channel: messages between the sidecar's first process and one of its workers.

Each is a JSON object, whole or not there at all (`SOCK_SEQPACKET`, Linux), and may bring a connection along.
The channel ends where the other process does.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from sglang_topp.errors import InvalidInputError

__all__ = ["Channel"]

# Of the longest message: a worker's metrics.
_MAX_BYTES = 1 << 18
# A process that has not replied by then hangs. (An abort takes ten seconds where the engine does.)
_REPLY_S = 15.0


class Channel:
    """One end, to be used within one event loop.

    Args:
        end: this process's end; it is closed with the channel.

    Attributes:
        closed: set once the other process has gone, or `close` was called.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._loop = asyncio.get_running_loop()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0
        self.closed = asyncio.Event()
        end.setblocking(False)

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """Both ends of a new channel.

        Raises:
            InvalidInputError: this system has none.
        """
        try:
            ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except (AttributeError, OSError) as error:
            raise InvalidInputError(f"--workers: got more than 1, which needs Linux here: {error}") from None
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MAX_BYTES)
        return ends

    def listen(self, take: Callable[[dict[str, Any], socket.socket | None], None]) -> None:
        """Have every message, with the connection that came with it, go to `take`."""

        def read() -> None:
            try:
                data, files, _, _ = socket.recv_fds(self._end, _MAX_BYTES, 1)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data, files = b"", []
            connection = socket.socket(fileno=files[0]) if files else None
            if not data:
                self.close()
                return
            message = json.loads(data)
            if (number := message.get("reply")) is not None:
                if (waiting := self._replies.pop(number, None)) is not None and not waiting.done():
                    waiting.set_result(message["value"])
                return
            take(message, connection)

        self._loop.add_reader(self._end, read)

    def send(self, message: dict[str, Any], connection: socket.socket | None = None) -> bool:
        """Send it now; returns whether the other process has it, or will."""
        if self.closed.is_set():
            return False
        files = [] if connection is None else [connection.fileno()]
        try:
            socket.send_fds(self._end, [json.dumps(message).encode()], files)
        except OSError:  # gone, or stuck for so long that there is no room for more
            return False
        return True

    async def ask(self, message: dict[str, Any]) -> Any:
        """Send it and wait for the reply; None where the other process has gone, or hangs."""
        self._asked += 1
        number = self._asked
        reply = self._replies[number] = self._loop.create_future()
        if not self.send({**message, "ask": number}):
            self._replies.pop(number)
            return None
        try:
            async with asyncio.timeout(_REPLY_S):
                return await reply
        except TimeoutError:
            return None
        finally:
            self._replies.pop(number, None)

    def reply(self, message: dict[str, Any], value: Any) -> None:
        """Answer what was asked."""
        self.send({"reply": message["ask"], "value": value})

    def close(self) -> None:
        """Hear no more; whoever waits for a reply has none."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._loop.remove_reader(self._end)
        self._end.close()
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_result(None)
        self._replies.clear()
