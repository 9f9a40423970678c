"""Worker: one of several processes that serve at one address (`--workers`), and what it asks of the others.

    python -m sglang_topp_server.worker <descriptor>

The descriptor is this process's end of a channel. The first process (`workers`) sends its settings, then
connections that it has accepted; it is told when one is closed, and whether the engine is ready. What
concerns all callers of the sidecar is asked of the other workers through it. Where that process ends, so does
this one.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from contextlib import suppress
from typing import Any

from sglang_topp.errors import SglangToppError
from sglang_topp_server.channel import Channel
from sglang_topp_server.connection import http_protocol
from sglang_topp_server.limits import Limits
from sglang_topp_server.metrics import Families
from sglang_topp_server.serving import Server, Settings

__all__ = ["main"]

_POLL_S = 0.1


class _Siblings:
    """The other workers, through the first process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    async def abort(self, request_id: str | None) -> bool:
        """Whether one of them had it."""
        return any(await self._channel.ask({"abort": request_id}) or ())

    async def families(self) -> list[Families]:
        """What they count."""
        found: list[Families] = [each for each in await self._channel.ask({"metrics": True}) or () if each]
        return found


def main() -> None:
    """Serve until the first process says to stop, or has gone."""
    end = socket.socket(fileno=int(sys.argv[1]))
    settings = pickle.load(sys.stdin.buffer)
    asyncio.run(_run(end, settings))


async def _run(end: socket.socket, settings: Settings) -> None:
    channel = Channel(end)
    server = Server(settings, _Siblings(channel), _counted(settings.limits, channel))
    tasks: set[asyncio.Task[None]] = set()

    def go(work: Any) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def take(message: dict[str, Any], connection: socket.socket | None) -> None:
        if connection is not None:
            go(_serve(server, channel, connection))
        elif "stop" in message:
            server.stop()
        elif "abort" in message:
            go(_abort(server, channel, message))
        else:
            channel.reply(message, server.metrics.families())

    serving = asyncio.create_task(server.serve(sockets=[]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    channel.listen(take)
    telling = asyncio.create_task(_tell(server, channel))
    gone = asyncio.create_task(channel.closed.wait())
    await asyncio.wait({serving, gone}, return_when=asyncio.FIRST_COMPLETED)
    if gone.done():
        # Nobody is there to wait for an orderly end.
        server.should_exit = server.force_exit = True
    await serving
    telling.cancel()
    gone.cancel()


def _counted(limits: Limits, channel: Channel) -> type[asyncio.Protocol]:
    class Counted(http_protocol(limits)):  # type: ignore[misc]  # a class that is made for these limits
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            channel.send({"closed": True})

    return Counted


async def _serve(server: Server, channel: Channel, connection: socket.socket) -> None:
    try:
        if server.should_exit:
            raise ConnectionAbortedError("it is stopping")
        await server.take(connection)
    except OSError:
        connection.close()
        channel.send({"closed": True})


async def _abort(server: Server, channel: Channel, message: dict[str, Any]) -> None:
    had_it = False
    with suppress(SglangToppError):  # who was asked first says so, too
        had_it = await server.engine.abort_here(message["abort"])
    channel.reply(message, had_it)


async def _tell(server: Server, channel: Channel) -> None:
    """What is seen of the engine, when it changes."""
    told = None
    while True:
        status = server.engine.status
        if (now := [status.phase, status.reason]) != told and channel.send({"engine": now}):
            told = now
        await asyncio.sleep(_POLL_S)


if __name__ == "__main__":
    main()
