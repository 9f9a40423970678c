"""Runs: the calls of one client on all event loops: start one, abort by name, and close."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from sglang_topp_client.requests import SampleRequest
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.run import Place, Run, RunOptions
from sglang_topp_client.servers import Kind, Servers
from sglang_topp_client.transport.server_config import ServerConfig

__all__ = ["Runs"]

# A stopped call ends after at most 10 s, and its aborts are sent within three seconds.
_OTHER_LOOPS_S = 15.0


@dataclass
class _LoopState:
    """The connections and the running calls of one event loop."""

    servers: Servers
    runs: set[Run[Any]] = field(default_factory=set)


class Runs:
    """The calls of one client. The code that starts them checks the arguments.

    Several event loops may use it at the same time. A connection belongs to the loop that opened it.

    Args:
        configs: the connection settings of one or several servers.
        kind: the servers' kind, or None to ask each server.
        max_retries: how often a failed call is retried.

    Attributes:
        pauses: why this client's engines are paused, by base URL; see `Server`.
    """

    def __init__(
        self,
        configs: Sequence[ServerConfig],
        *,
        kind: Kind | None,
        max_retries: int,
    ) -> None:
        self.pauses: dict[str, str] = {}
        self._configs = configs
        self._kinds: dict[str, Kind] = {}
        if kind is not None:
            self._kinds = dict.fromkeys((config.base_url for config in configs), kind)
        self._max_retries = max_retries
        self._loops: dict[asyncio.AbstractEventLoop, _LoopState] = {}

    @property
    def servers(self) -> Servers:
        """The servers, as the current event loop uses them."""
        return self._here().servers

    async def stream(
        self,
        requests: Sequence[SampleRequest],
        options: RunOptions,
        existing: Mapping[int, Rollout] | None = None,
    ) -> AsyncGenerator[tuple[Place, Any], None]:
        """Yield each result of a new call with its place, as it arrives; see `Run`."""
        here = self._here()
        run: Run[Any] = Run(here.servers, here.runs, requests, options, existing)
        async with aclosing(run.results()) as results:
            async for item in results:
                yield item

    async def gather(
        self,
        requests: Sequence[SampleRequest],
        options: RunOptions,
        existing: Mapping[int, Rollout] | None = None,
    ) -> list[Any]:
        """Return the results of a new call in the order of its prompts."""
        async with aclosing(self.stream(requests, options, existing)) as results:
            outcomes = {place: outcome async for place, outcome in results}
        return [outcomes[place] for place in sorted(outcomes)]

    async def abort(self, request_id: str) -> int:
        """Abort the calls with the id `request_id`; see `AsyncRolloutClient.abort`."""
        counts: list[int] = []
        elsewhere = [
            asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._abort_here(request_id, counts), loop))
            for loop in list(self._loops)
            if loop is not asyncio.get_running_loop() and loop.is_running()
        ]
        await self._abort_here(request_id, counts)
        if elsewhere:
            # A loop that ends at this moment never answers, and ends its calls too.
            await asyncio.wait(elsewhere, timeout=_OTHER_LOOPS_S)
        if not any(counts):
            counts += await self.servers.on_all(lambda server: server.abort(request_id))
        return sum(counts)

    async def _abort_here(self, request_id: str, counts: list[int]) -> None:
        """Abort the calls of this event loop, and add to `counts` how many prompts were unfinished."""
        here = self._here()
        runs = [run for run in here.runs if run.name == request_id]
        counts.append(sum(len({prompt for prompt, _ in run.missing}) for run in runs))
        for run in runs:
            run.abort()
        for run in runs:
            await run.wait()
        if runs:
            await here.servers.aborts_sent()

    async def abort_all(self) -> None:
        """Abort every request in the engines; see `AsyncRolloutClient.abort_all`."""
        here = self._here()
        stopped = [run for run in here.runs if run.returns_parts]
        for run in stopped:
            run.abort()
        await here.servers.on_all(lambda server: server.abort(None))
        for run in stopped:
            await run.wait()

    async def close(self) -> None:
        """Stop this event loop's calls, and close its connections; see `AsyncRolloutClient.close`."""
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is None:
            return
        try:
            runs = list(here.runs)
            for run in runs:
                run.cancel()
            for run in runs:
                await run.wait()
        finally:
            await here.servers.close()

    def _here(self) -> _LoopState:
        """Return the connections and the running calls of the current event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            # Iterate over a copy, because other threads may add their event loops to `_loops`.
            for other in list(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            servers = Servers(self._configs, self._kinds, self.pauses, max_retries=self._max_retries)
            self._loops[loop] = _LoopState(servers)
        return self._loops[loop]
