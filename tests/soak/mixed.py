"""Part 1: requests of every kind at once, through the sidecar and straight, and every answer checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx

from sglang_topp import CandidateSets
from sglang_topp_client.record import from_record
from tests.engine.checks import checked_sets
from tests.soak.answers import check_chunk, check_lines, check_whole, events, samples_of
from tests.soak.asks import BAD, Ask
from tests.soak.callers import LIMIT_S, AbortedError, Callers, Order, require_idle
from tests.soak.processes import Memory
from tests.soak.report import Report
from tests.soak.serving import Server

__all__ = ["SGLANG_ARGUMENTS", "run_mixed"]

# A pool of tokens that the requests at once do not fit in; prompts are prefilled in parts.
SGLANG_ARGUMENTS = ("--max-total-tokens", "2048", "--chunked-prefill-size", "128")
_AT_ONCE = 48
_WARM_UP = 200


class _Mix(Callers):
    """Callers of one server who use no client, too."""

    def __init__(self, server: Server, report: Report, seed: int) -> None:
        super().__init__(report, seed, [server.sidecar], [server.engine], max_retries=1)
        self.retractions = 0
        # Both servers drop a connection that is idle for 5 s, and a caller that is behind by some seconds
        # itself cannot tell: so each request has its own. (The clients keep theirs, and send once more.)
        limits = httpx.Limits(max_connections=4 * _AT_ONCE, max_keepalive_connections=0)
        self.engine = httpx.AsyncClient(base_url=server.engine, timeout=LIMIT_S, limits=limits)
        self.sidecar = httpx.AsyncClient(base_url=server.sidecar, timeout=LIMIT_S, limits=limits)

    async def close(self) -> None:
        for http in (self.engine, self.sidecar):
            await http.aclose()
        await super().close()

    async def one(self) -> None:
        if self.rng.random() < 0.05:
            await self.counted("refused", self.bad(), "bad input")
        else:
            await super().one()

    def send(self, ask: Ask, rid: str) -> tuple[Awaitable[None], Order | None]:
        way = self.rng.randrange(4)
        if way == 0:
            return self.to_sidecar(ask, rid), None
        if way == 1:
            return self.to_engine(ask, rid), lambda: self.engine.post("/abort_request", json={"rid": rid})
        return super().send(ask, rid)

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
                raise AbortedError(str(reason))
            if check_chunk(chunk, ask):
                finished.add(chunk.get("index", len(finished)))
        assert len(finished) == ask.n, f"{len(finished)} of {ask.n} samples finished"

    async def bad(self) -> None:
        route, body, field = self.rng.choice(BAD)
        http = self.sidecar if route == "/rollouts" else self.engine
        answer = await http.post(route, json=body)
        if answer.status_code != 400 or field not in answer.text:
            raise RuntimeError(f"bad input: {answer.status_code} {answer.text[:200]} for {body}")


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
        await require_idle(server, report)
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
            await mix.stop_all()
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


def _require_ok(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        # SGLang answers an aborted request that is not streamed with a status of its own.
        kind = AbortedError if "abort" in answer.text.lower() else RuntimeError
        raise kind(f"{answer.status_code} {answer.text[:300]}")
