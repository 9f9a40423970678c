"""Part 1: requests of every kind at once, through the sidecar and straight, and every answer checked."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from sglang_topp import CandidateSets
from sglang_topp.errors import RolloutError
from sglang_topp.resumable import cut_problem
from sglang_topp_client import AsyncRolloutClient, Rollout
from sglang_topp_client.record import from_record
from tests.engine.checks import checked_sets
from tests.soak.answers import check_chunk, check_lines, check_whole, events, samples_of
from tests.soak.asks import BAD, Ask, random_ask
from tests.soak.processes import Memory
from tests.soak.report import Report
from tests.soak.serving import Server

__all__ = ["SGLANG_ARGUMENTS", "run_mixed"]

# A pool of tokens that the requests at once do not fit in; prompts are prefilled in parts.
SGLANG_ARGUMENTS = ("--max-total-tokens", "2048", "--chunked-prefill-size", "128")
_AT_ONCE = 48
_WARM_UP = 200
_LIMIT_S = 180.0


class _AbortedError(Exception):
    """The engine says that it gave the request up."""


class _Mix:
    """The requests' ways in, and what they all share."""

    def __init__(self, server: Server, report: Report, seed: int) -> None:
        self.report = report
        self.rng = random.Random(seed)
        self.retractions = 0
        self.num_stops = 0
        # Both servers drop a connection that is idle for 5 s, and a caller that is behind by some seconds
        # itself cannot tell: so each request has its own. (The clients keep theirs, and send once more.)
        limits = httpx.Limits(max_connections=4 * _AT_ONCE, max_keepalive_connections=0)
        self.engine = httpx.AsyncClient(base_url=server.engine, timeout=_LIMIT_S, limits=limits)
        self.sidecar = httpx.AsyncClient(base_url=server.sidecar, timeout=_LIMIT_S, limits=limits)
        self.clients = [
            AsyncRolloutClient(server.sidecar, kind="sidecar", max_retries=1),
            AsyncRolloutClient(server.engine, kind="sglang", max_retries=1),
        ]

    async def close(self) -> None:
        for http in (self.engine, self.sidecar):
            await http.aclose()
        for client in self.clients:
            await client.close()

    # -- the ways in -------------------------------------------------------------------------------

    async def by_client(self, client: AsyncRolloutClient, ask: Ask, rid: str) -> None:
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

    async def to_sidecar(self, ask: Ask, rid: str) -> None:
        answer = await self.sidecar.post("/rollouts", json=ask.for_sidecar(rid))
        _require_ok(answer)
        if ask.stream:
            check_lines(answer.text, ask)
        else:
            check_whole([from_record(record) for record in answer.json()["rollouts"]], ask)

    async def to_engine(self, ask: Ask, rid: str) -> None:
        answer = await self.engine.post("/generate", json=ask.for_engine(rid))
        _require_ok(answer)
        chunks = events(answer.text) if ask.stream else samples_of(answer.json())
        finished = set()
        for chunk in chunks:
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            self.retractions += int((chunk["meta_info"].get("num_retractions") or 0) > 0)
            reason = chunk["meta_info"]["finish_reason"]
            if reason is not None and reason["type"] == "abort":
                # Aborted in its prefill, a request for no token shows one, without a set: an error anyway.
                has_tokens = chunk["output_ids"] and ask.sampling["max_new_tokens"]
                if ask.p and has_tokens:
                    checked_sets(chunk, ask.p)
                elif ask.from_sampler and has_tokens:
                    CandidateSets.from_meta_info(chunk["meta_info"], chunk["output_ids"])
                raise _AbortedError(str(reason))
            if check_chunk(chunk, ask):
                finished.add(chunk.get("index", len(finished)))
        assert len(finished) == ask.n, f"{len(finished)} of {ask.n} samples finished"

    async def bad(self) -> None:
        route, body, field = self.rng.choice(BAD)
        http = self.sidecar if route == "/rollouts" else self.engine
        answer = await http.post(route, json=body)
        if answer.status_code != 400 or field not in answer.text:
            raise RuntimeError(f"bad input: {answer.status_code} {answer.text[:200]} for {body}")

    # -- what becomes of one -----------------------------------------------------------------------

    async def one(self) -> None:
        rng, rid = self.rng, uuid.uuid4().hex
        if rng.random() < 0.05:
            await self._counted("refused", self.bad(), "bad input")
            return
        ask = random_ask(rng)
        way = rng.randrange(4)
        client = self.clients[way % 2]
        if way < 2:
            sending = asyncio.ensure_future(self.by_client(client, ask, rid))
        else:
            sending = asyncio.ensure_future((self.to_sidecar if way == 2 else self.to_engine)(ask, rid))
        fate = rng.random()
        if fate < 0.1:
            await self._counted("hung up", self._hang_up(sending), ask)
        elif fate < 0.15 and way != 2:
            order = client.abort(rid) if way < 2 else self.engine.post("/abort_request", json={"rid": rid})
            await self._counted("aborted", self._abort(sending, order), ask)
        else:
            sets = "with sets" if ask.wants_sets else "without sets"
            await self._counted(sets, self._unless_all_stopped(sending), ask)

    async def _hang_up(self, sending: asyncio.Future[None]) -> None:
        await asyncio.sleep(self.rng.random() ** 2)
        if sending.done():
            return sending.result()
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending
        return None

    async def _abort(self, sending: asyncio.Future[None], order: Any) -> None:
        await asyncio.sleep(self.rng.random() ** 2)
        await order
        with suppress(_AbortedError, RolloutError):
            await sending

    async def _unless_all_stopped(self, sending: asyncio.Future[None]) -> None:
        """It ends well, or somebody stopped everything meanwhile."""
        before = self.num_stops
        try:
            await sending
        except (_AbortedError, RolloutError):
            if self.num_stops == before:
                raise
            self.report.outcomes["stopped with all others"] += 1

    async def _counted(self, name: str, doing: Any, asked: object) -> None:
        self.report.requests += 1
        try:
            async with asyncio.timeout(_LIMIT_S):
                await doing
            self.report.outcomes[name] += 1
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.report.outcomes["not as it should be"] += 1
            self.report.failed(error, asked)


async def run_mixed(server: Server, model: Path, *, seconds: float, count: int, seed: int) -> Report:
    """Until so many seconds have passed, or so many requests were sent."""
    report = Report("mixed")
    mix = _Mix(server, report, seed)

    async def caller(until: float, most: int) -> None:
        while time.monotonic() < until and report.requests < most:
            await mix.one()

    try:
        await asyncio.gather(*(caller(time.monotonic() + seconds, _WARM_UP) for _ in range(_AT_ONCE)))
        operator = asyncio.create_task(_operate(mix, model))
        until = time.monotonic() + seconds
        async with Memory(server.process.pid) as memory:
            await asyncio.gather(*(caller(until, count) for _ in range(_AT_ONCE)))
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        await mix.engine.post("/continue_generation", json={})
        report.leaked_mib = memory.growth_mib()
        report.outcomes["answers of retracted requests"] = mix.retractions
        if not mix.retractions:
            report.fault("no request was retracted: the pool was not too small for them")
        await _require_idle(server, report)
    finally:
        await mix.close()
    return report


async def _operate(mix: _Mix, model: Path) -> None:
    """What a trainer does meanwhile: pauses, and new weights (the same ones: answers stay checkable)."""

    async def order(route: str, **body: Any) -> None:
        answer = await mix.engine.post(route, json=body)
        if answer.status_code != 200:
            mix.report.fault(f"{route} {body}: {answer.status_code} {answer.text[:200]}")
        mix.report.outcomes[route] += 1

    # The same weights keep what is cached true; and to flush with requests in the queue is refused.
    weights = {"model_path": str(model), "weight_version": "again", "flush_cache": False}
    while True:
        await asyncio.sleep(mix.rng.uniform(2, 8))
        what = mix.rng.choice(("retract", "in_place", "weights", "weights while paused", "stop all"))
        if what == "stop all":
            mix.num_stops += 1
            await mix.clients[mix.rng.randrange(2)].abort_all()
            mix.report.outcomes["abort_all"] += 1
            continue
        if what == "weights":
            await order("/update_weights_from_disk", **weights)
            continue
        await order("/pause_generation", mode="in_place" if what == "in_place" else "retract")
        try:
            await asyncio.sleep(mix.rng.uniform(0.1, 1.0))
            if what == "weights while paused":
                await order("/update_weights_from_disk", **weights)
        finally:
            await asyncio.shield(order("/continue_generation"))


async def _require_idle(server: Server, report: Report) -> None:
    """Nothing of what was hung up on or aborted may still run."""
    deadline = time.monotonic() + 60
    while left := await server.num_running():
        if time.monotonic() > deadline:
            report.fault(f"{left} requests still run in the engine, a minute after the last answer")
            return
        await asyncio.sleep(0.5)


def _require_ok(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        # SGLang answers an aborted request that is not streamed with a status of its own.
        kind = _AbortedError if "abort" in answer.text.lower() else RuntimeError
        raise kind(f"{answer.status_code} {answer.text[:300]}")
