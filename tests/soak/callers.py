"""Requests at random through our clients, hung up on and aborted, and every answer checked."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from sglang_topp.errors import RolloutError
from sglang_topp.resumable import cut_problem
from sglang_topp_client import AsyncRolloutClient, Rollout
from tests.soak.answers import check_whole
from tests.soak.asks import Ask, random_ask
from tests.soak.report import Report
from tests.soak.serving import Server

__all__ = ["LIMIT_S", "AbortedError", "Callers", "Order", "require_idle"]

LIMIT_S = 180.0

Order = Callable[[], Awaitable[Any]]
"""What aborts a request."""


class AbortedError(Exception):
    """The engine says that it gave the request up."""


async def require_idle(server: Server, report: Report) -> None:
    """Nothing of what was hung up on or aborted may still run."""
    deadline = time.monotonic() + 60
    while left := await server.num_running():
        if time.monotonic() > deadline:
            report.fault(f"{left} requests still run in the engine, a minute after the last answer")
            return
        await asyncio.sleep(0.5)


class Callers:
    """Callers of one server or of several, by their sidecars and straight; and what they share.

    Args:
        report: where everything is counted.
        seed: of what is asked.
        sidecars, engines: their addresses.
        max_retries: of the clients.
    """

    def __init__(
        self, report: Report, seed: int, sidecars: Sequence[str], engines: Sequence[str], *, max_retries: int
    ) -> None:
        self.report = report
        self.rng = random.Random(seed)
        self._num_stops_begun = self._num_stops_over = 0
        self.clients = [
            AsyncRolloutClient(sidecars, kind="sidecar", max_retries=max_retries),
            AsyncRolloutClient(engines, kind="sglang", max_retries=max_retries),
        ]

    async def close(self) -> None:
        for client in self.clients:
            await client.close()

    async def stop_all(self) -> None:
        """Whoever is under way at any moment of it may be stopped by it."""
        self._num_stops_begun += 1
        try:
            await self.rng.choice(self.clients).abort_all()
        finally:
            self._num_stops_over += 1
        self.report.outcomes["abort_all"] += 1

    # -- the ways in -------------------------------------------------------------------------------

    def send(self, ask: Ask, rid: str) -> tuple[Awaitable[None], Order | None]:
        """What sends a request and checks its answer, and what aborts it."""
        client = self.rng.choice(self.clients)
        return self.by_client(client, ask, rid), lambda: client.abort(rid)

    async def by_client(self, client: AsyncRolloutClient, ask: Ask, rid: str) -> None:
        """Raises what the client raises, and AssertionError where the answer is not what was asked for."""
        prompts: Any = [ask.prompt]
        what = "raise" if cut_problem(ask.sampling) else self.rng.choice(("raise", "resume", "return"))
        if what == "resume":
            rollouts = await client.generate(
                prompts, ask.sampling, **ask.fields, request_id=rid, on_abort="resume"
            )
        elif what == "return":
            rollouts = await self._in_parts(client, ask, rid)
        elif ask.stream:
            stream = client.stream(prompts, ask.sampling, **ask.fields, request_id=rid)
            rollouts = [rollout async for rollout in stream]
        else:
            rollouts = await client.generate(prompts, ask.sampling, **ask.fields, request_id=rid)
        check_whole(rollouts, ask)

    async def _in_parts(self, client: AsyncRolloutClient, ask: Ask, rid: str) -> list[Rollout]:
        """What an abort leaves is gone on with until it is whole."""
        prompts: Any = [ask.prompt]
        rollouts = await client.generate(
            prompts, ask.sampling, **ask.fields, request_id=rid, on_abort="return"
        )
        while any(rollout.finish_reason == "abort" for rollout in rollouts):
            self.report.outcomes["resumed by hand"] += 1
            rollouts = await client.resume(rollouts, ask.sampling, **ask.fields, on_abort="return")
        return rollouts

    # -- what becomes of one -----------------------------------------------------------------------

    async def one(self) -> None:
        """Send one, wait for what becomes of it, and count that."""
        ask, rid = random_ask(self.rng), uuid.uuid4().hex
        coroutine, abort = self.send(ask, rid)
        sending = asyncio.ensure_future(coroutine)
        fate = self.rng.random()
        if fate < 0.1:
            await self.counted("hung up", self._unless_all_stopped(self._hang_up(sending)), ask)
        elif fate < 0.15 and abort is not None:
            await self.counted("aborted", self._abort(sending, abort), ask)
        else:
            sets = "with sets" if ask.wants_sets else "without sets"
            await self.counted(sets, self._unless_all_stopped(sending), ask)

    async def _hang_up(self, sending: asyncio.Future[None]) -> None:
        await asyncio.sleep(self.rng.random() ** 2)
        if sending.done():
            return sending.result()
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending
        return None

    async def _abort(self, sending: asyncio.Future[None], abort: Order) -> None:
        await asyncio.sleep(self.rng.random() ** 2)
        await abort()
        with suppress(AbortedError, RolloutError):
            await sending

    async def _unless_all_stopped(self, sending: Awaitable[None]) -> None:
        """It ends well, or somebody stopped everything meanwhile."""
        num_over = self._num_stops_over
        try:
            await sending
        except (AbortedError, RolloutError):
            # One of several engines may have stopped its own while another has not answered the order.
            if self._num_stops_begun == num_over:
                raise
            self.report.outcomes["stopped with all others"] += 1

    async def counted(self, name: str, doing: Awaitable[None], asked: object) -> None:
        """Await, and count it by its name where it ends as it should."""
        self.report.requests += 1
        try:
            async with asyncio.timeout(LIMIT_S):
                await doing
            self.report.outcomes[name] += 1
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.report.outcomes["not as it should be"] += 1
            self.report.failed(error, asked)
