"""Workers: several processes that serve at one address, each with an event loop of its own.

The first process accepts connections and hands each to the worker that has the fewest. (Left to the kernel,
a caller's few connections, each of which brings many samples, often end up in one process.) It carries what
workers ask of each other, and starts one anew where one has ended: its callers see a connection that broke,
which they repeat, and the engine sees its connections close, which aborts what was asked on them.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from typing import Any

from sglang_topp.errors import ServerError
from sglang_topp_server.channel import Channel
from sglang_topp_server.engine import Engine
from sglang_topp_server.engine_status import Phase
from sglang_topp_server.serving import Settings

__all__ = ["Workers"]

_AGAIN_S = 1.0
# What a worker needs beyond its grace: the aborts of what that left over, and to exit.
_LATE_S = 15.0
# Where none takes a connection now, one may soon.
_LOOK_AGAIN_S = 0.02


class _Worker:
    """One of them.

    Attributes:
        open: how many connections it has.
        engine: what it sees of the engine; None before it serves.
    """

    def __init__(self, process: Process, channel: Channel) -> None:
        self.process, self.channel = process, channel
        self.open = 0
        self.turn = 0
        self.engine: tuple[Phase, str] | None = None

    def kill(self) -> None:
        """End it now, where it has not ended."""
        with suppress(ProcessLookupError):
            self.process.kill()


class Workers:
    """All of them, to be used within one event loop.

    Args:
        settings: how to serve; of all together.

    Raises:
        InvalidInputError: `engine_url` is no address, or its key cannot stand in a header.
    """

    def __init__(self, settings: Settings) -> None:
        Engine(settings.engine_url, api_key=settings.engine_api_key)  # a worker could but die of them
        self._settings = settings
        self._workers: dict[int, _Worker] = {}
        self._turns = 0
        self._have_served = asyncio.Event()
        self._accepting: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._asking: set[asyncio.Task[None]] = set()

    @property
    def engine(self) -> tuple[Phase, str]:
        """What they see of the engine: its phase and why; ready where it is so for all."""
        seen = [worker.engine for worker in self._workers.values()]
        for phase, reason in filter(None, seen):
            if phase != "ready":
                return phase, reason
        if len(seen) < self._settings.workers or None in seen:
            return "starting", "not every worker has looked at it yet"
        return "ready", ""

    @property
    def has_started(self) -> bool:
        """Whether all of them have begun to serve."""
        return self._have_served.is_set()

    async def started(self) -> None:
        """Return once all of them have begun to serve."""
        await self._have_served.wait()

    async def serve(self, listener: socket.socket) -> None:
        """Serve until `stop`, and until all have ended.

        Args:
            listener: where callers connect; it is closed then.

        Raises:
            ServerError: one ended before all had begun to serve.
        """
        self._accepting = asyncio.create_task(self._accept(listener))
        try:
            async with asyncio.TaskGroup() as group:
                for place in range(self._settings.workers):
                    group.create_task(self._keep(place))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        finally:
            self._accepting.cancel()
            await asyncio.wait({self._accepting})
            listener.close()

    def stop(self) -> None:
        """Have them end once what is in flight has; a second time: now."""
        for worker in self._workers.values():
            if self._stopping.is_set():
                worker.kill()
            else:
                worker.channel.send({"stop": True})
        self._stopping.set()
        if self._accepting is not None:
            self._accepting.cancel()

    # -- processes ---------------------------------------------------------------------------------

    async def _keep(self, place: int) -> None:
        """Have a worker in this place, one after the other, until they are to stop."""
        while not self._stopping.is_set():
            worker = await self._start(place)
            self._workers[place] = worker
            if self._stopping.is_set():
                worker.channel.send({"stop": True})
            try:
                status = await self._end_of(worker)
            except BaseException:
                worker.kill()
                await worker.process.wait()
                raise
            finally:
                worker.channel.close()
                del self._workers[place]
            if self._stopping.is_set():
                return
            ended = f"worker {place} (process {worker.process.pid}) ended with exit status {status}"
            if not self._have_served.is_set():
                raise ServerError(f"{ended} before all workers served; its own words are above")
            print(f"sglang-topp: {ended}; it is started again", file=sys.stderr, flush=True)
            await asyncio.sleep(_AGAIN_S)

    async def _start(self, place: int) -> _Worker:
        ours, theirs = Channel.pair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sglang_topp_server.worker",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=PIPE,
                stdout=DEVNULL,
                # A Ctrl-C in the terminal is for this process, which then ends the workers in order.
                start_new_session=True,
            )
        finally:
            theirs.close()
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(self._settings.of_worker(place)))
        process.stdin.close()
        worker = _Worker(process, Channel(ours))
        worker.channel.listen(lambda message, _: self._take(worker, message))
        return worker

    async def _end_of(self, worker: _Worker) -> int:
        """Its exit status, once it has one; where it was told to stop and does not, it is killed."""
        ended = asyncio.create_task(worker.process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ended}, timeout=self._settings.grace_s + _LATE_S)
            if not ended.done():
                worker.kill()
            return await ended
        finally:
            ended.cancel()
            stopping.cancel()

    # -- connections -------------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        # Once this ends, whoever comes is refused, as by any server that is ending.
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError:
                    # It broke off, or this process has no file left now.
                    await asyncio.sleep(_LOOK_AGAIN_S)
                    continue
                with connection:
                    while not self._hand_over(connection):
                        await asyncio.sleep(_LOOK_AGAIN_S)

    def _hand_over(self, connection: socket.socket) -> bool:
        serving = [worker for worker in self._workers.values() if worker.engine is not None]
        for worker in sorted(serving, key=lambda worker: (worker.open, worker.turn)):
            if worker.channel.send({}, connection):
                self._turns += 1
                worker.open, worker.turn = worker.open + 1, self._turns
                return True
        return False

    # -- messages ----------------------------------------------------------------------------------

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        if "closed" in message:
            worker.open -= 1
        elif "engine" in message:
            phase, reason = message["engine"]
            worker.engine = phase, reason
            if len(self._workers) == self._settings.workers and all(
                each.engine for each in self._workers.values()
            ):
                self._have_served.set()
        else:
            others = [each.channel for each in self._workers.values() if each is not worker]
            question = {name: value for name, value in message.items() if name != "ask"}

            async def ask() -> None:
                worker.channel.reply(message, await asyncio.gather(*(each.ask(question) for each in others)))

            self._asking.add(task := asyncio.create_task(ask()))
            task.add_done_callback(self._asking.discard)
