"""Random requests through our clients, some disconnected or aborted, with every answer checked."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from sglang_topp.engine_contract import find_resume_problem
from sglang_topp.errors import RolloutError
from sglang_topp_client import AsyncRolloutClient, Rollout
from tests.soak.answer_checks import check_whole
from tests.soak.random_requests import Ask, random_ask
from tests.soak.report import Report
from tests.soak.serve_process import Server

__all__ = ["LIMIT_S", "AbortedError", "Callers", "Order", "require_idle"]

LIMIT_S = 180.0

Order = Callable[[], Awaitable[Any]]
"""What aborts a request."""


class AbortedError(Exception):
    """The engine reports that it aborted the request."""


async def require_idle(server: Server, report: Report) -> None:
    """Check that no abandoned or aborted request still runs."""
    deadline = time.monotonic() + 60
    while left := await server.num_running():
        if time.monotonic() > deadline:
            report.fault(f"{left} requests still run in the engine, a minute after the last answer")
            return
        await asyncio.sleep(0.5)


class Callers:
    """Callers of one or more servers, through sidecars and directly, with their shared state.

    Args:
        report: counts everything.
        seed: of the random requests.
        sidecars, engines: the addresses.
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
        """Abort everything through one of the clients."""
        with self.stopping():
            await self.rng.choice(self.clients).abort_all()

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Accept aborts of every request in flight at any moment of the `with` block."""
        self._num_stops_begun += 1
        try:
            yield
        finally:
            self._num_stops_over += 1

    # -- ways to send a request
    # -------------------------------------------------------------------------------

    def send(self, ask: Ask, rid: str) -> tuple[Awaitable[None], Order | None]:
        """Return a function that sends a request and checks its answer, and one that aborts it."""
        client = self.rng.choice(self.clients)
        return self.by_client(client, ask, rid), lambda: client.abort(rid)

    async def by_client(self, client: AsyncRolloutClient, ask: Ask, rid: str) -> None:
        """Raise the client's error, or AssertionError if the answer is not the requested one."""
        prompts: Any = [ask.prompt]
        what = (
            "raise" if find_resume_problem(ask.sampling) else self.rng.choice(("raise", "resume", "return"))
        )
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
        """Resume an aborted sample until it is complete."""
        prompts: Any = [ask.prompt]
        rollouts = await client.generate(
            prompts, ask.sampling, **ask.fields, request_id=rid, on_abort="return"
        )
        while any(rollout.finish_reason == "abort" for rollout in rollouts):
            self.report.outcomes["resumed by hand"] += 1
            rollouts = await client.resume(rollouts, ask.sampling, **ask.fields, on_abort="return")
        return rollouts

    # -- the outcome of a request -----------------------------------------------------------------------

    async def one(self) -> None:
        """Send one request, wait for its outcome, and count it."""
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
        """Check that a request ends well, or that all requests were aborted meanwhile."""
        num_over = self._num_stops_over
        try:
            await sending
        except (AbortedError, RolloutError):
            # One engine may have aborted its requests while another one has not answered the abort yet.
            if self._num_stops_begun == num_over:
                raise
            self.report.outcomes["stopped with all others"] += 1

    async def counted(self, name: str, doing: Awaitable[None], asked: object) -> None:
        """Await a request, and count it by its name if it ends as expected."""
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
