"""Detect a server that hangs: probe a silent server, and fail all its calls if the probes fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from sglang_topp.errors import TransportError

__all__ = ["HealthCheck"]

_SILENCE_S = 10.0
# One failed probe does not prove that a server hangs. If the client's event loop is blocked, a probe can time
# out although its answer has arrived.
_MAX_FAILED_PROBES = 2


class HealthCheck:
    """The health check of one server, within one event loop.

    A generation may wait in the engine's queue for an hour before its first byte arrives. A timeout of the
    call alone could not tell a busy server from a server that hangs. `HealthCheck` therefore sends a probe to
    a server that has sent nothing for 10 s. The probe has its own connection. After two failed probes in a
    row, all calls to the server fail, and the client moves the calls to other servers or retries the calls.

    Args:
        probe: sends a request that a healthy server answers immediately, and returns whether the server
            answered in time.
        base_url: the server's address, for error messages.
    """

    def __init__(self, probe: Callable[[], Awaitable[bool]], base_url: str) -> None:
        self._probe, self._base_url = probe, base_url
        self._calls: set[asyncio.Timeout] = set()
        self._heard_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._probing: asyncio.Task[None] | None = None

    def note_received(self) -> None:
        """Record that the server has just sent bytes."""
        self._heard_at = asyncio.get_running_loop().time()

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[None, None]:
        """Run the `with` block, which makes one call, and stop the block if the server hangs.

        Raises:
            TransportError: the server hangs.
        """
        if not self._calls:
            self.note_received()
        expiry = asyncio.timeout(None)
        try:
            async with expiry:
                self._calls.add(expiry)
                self._schedule()
                try:
                    yield
                finally:
                    self._calls.discard(expiry)
                    if not self._calls:
                        self._stop()
        except TimeoutError:
            if not expiry.expired():
                raise
            raise TransportError(
                f"{self._base_url}: the server hangs: nothing arrived for {_SILENCE_S:g} s, and then it"
                f" answered none of {_MAX_FAILED_PROBES} probes"
            ) from None

    def _schedule(self) -> None:
        if self._timer is None and self._probing is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._heard_at + _SILENCE_S, self._look)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        if loop.time() < self._heard_at + _SILENCE_S:
            self._schedule()
        else:
            self._probing = loop.create_task(self._check())

    async def _check(self) -> None:
        began = self._heard_at
        for _ in range(_MAX_FAILED_PROBES):
            if await self._probe() or self._heard_at > began:
                self.note_received()
                break
        else:
            for expiry in self._calls:
                expiry.reschedule(asyncio.get_running_loop().time())
            self._calls.clear()
        self._probing = None
        if self._calls:
            self._schedule()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._probing is not None:
            self._probing.cancel()
        self._timer = self._probing = None
