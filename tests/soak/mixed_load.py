"""Part 1: requests of every kind at once, through the sidecar and directly, with pauses and weight pushes.

Every answer is checked. Scores, and the sets of prompts, are compared with the weights that they name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx

from sglang_topp import formats
from sglang_topp_client import Rollout
from sglang_topp_client.wire.records import from_record
from tests.engine.candidate_set_checks import checked_sets
from tests.soak.answer_checks import check_chunk, check_lines, check_whole, events, samples_of
from tests.soak.checked_callers import LIMIT_S, AbortedError, Callers, Order, require_idle
from tests.soak.expected_logprobs import Truth
from tests.soak.process_inspection import Memory
from tests.soak.random_requests import BAD, VOCAB_SIZE, Ask
from tests.soak.report import Report
from tests.soak.serve_process import Server

__all__ = ["SGLANG_ARGUMENTS", "run_mixed"]

# A KV cache that is too small for all requests at once, and chunked prefill.
SGLANG_ARGUMENTS = ("--max-total-tokens", "2048", "--chunked-prefill-size", "128")
_AT_ONCE = 48
_WARM_UP = 200


_THRESHOLDS = (None, 0.1, 0.9, 1.0)
# The engine's error if a push comes between two chunks of a prompt. Our client repeats the request.
_PUSHED = "weights were pushed while"
_NOT_FLUSHED = "the cache was not flushed"


class _PushedError(Exception):
    """The engine reports that weights were pushed while it scored the prompt."""


class _Mix(Callers):
    """Callers of one server, with and without our clients. Some of them score."""

    def __init__(self, server: Server, truth: Truth, report: Report, seed: int) -> None:
        super().__init__(report, seed, [server.sidecar], [server.engine], max_retries=2)
        self.truth = truth
        self.retractions = 0
        # Both servers drop a connection that is idle for 5 s, and a slow caller may notice too late. So each
        # request has its own connection. (The clients keep theirs, and repeat the request.)
        limits = httpx.Limits(max_connections=4 * _AT_ONCE, max_keepalive_connections=0)
        self.engine = httpx.AsyncClient(base_url=server.engine, timeout=LIMIT_S, limits=limits)
        self.sidecar = httpx.AsyncClient(base_url=server.sidecar, timeout=LIMIT_S, limits=limits)

    async def close(self) -> None:
        for http in (self.engine, self.sidecar):
            await http.aclose()
        await super().close()

    async def one(self) -> None:
        fate = self.rng.random()
        if fate < 0.05:
            await self.counted("refused", self.bad(), "bad input")
        elif fate < 0.2:
            await self.counted("scored", self._unless_all_stopped(self.score()), "a score")
        else:
            await super().one()

    async def score(self) -> None:
        """Score some sequences, and compare them with the weights that each score names."""
        lengths = self.rng.choices((2, 20, 120, 140, 300, 600), k=self.rng.choice((1, 1, 2, 4)))
        sequences = [[self.rng.randrange(1, VOCAB_SIZE - 1) for _ in range(length)] for length in lengths]
        thresholds = [self.rng.choice(_THRESHOLDS) for _ in lengths]
        starts = [self.rng.randrange(1, length) for length in lengths]
        client = self.rng.choice(self.clients)
        scores = await client.score(sequences, top_logprobs_p=thresholds, start=starts)
        for score, p in zip(scores, thresholds, strict=True):
            await asyncio.to_thread(self.truth.check_score, score, p)

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
            check_whole([from_record(Rollout, record) for record in answer.json()["rollouts"]], ask)

    async def to_engine(self, ask: Ask, rid: str) -> None:
        while True:
            try:
                return await self.to_engine_once(ask, rid)
            except _PushedError:
                self.report.outcomes["told to send it again"] += 1

    async def to_engine_once(self, ask: Ask, rid: str) -> None:
        answer = await self.engine.post("/generate", json=ask.for_engine(rid))
        _require_ok(answer)
        chunks = events(answer.text) if ask.stream else samples_of(answer.json())
        finished = set()
        for chunk in chunks:
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            self.retractions += int((chunk["meta_info"].get("num_retractions") or 0) > 0)
            reason = chunk["meta_info"]["finish_reason"]
            if reason is not None and _PUSHED in (reason.get("message") or ""):
                raise _PushedError
            if reason is not None and reason["type"] == "abort":
                # A request for no token that is aborted in its prefill returns one without a set. It is an
                # error anyway.
                has_tokens = chunk["output_ids"] and ask.sampling["max_new_tokens"]
                if ask.p and has_tokens:
                    checked_sets(chunk, ask.p)
                elif ask.from_sampler and has_tokens:
                    formats.decode_top_p(chunk["meta_info"], chunk["output_ids"])
                raise AbortedError(str(reason))
            if check_chunk(chunk, ask):
                finished.add(chunk.get("index", len(finished)))
                if ask.p and ask.scores_prompt:
                    await asyncio.to_thread(self.truth.check_prompt, chunk, ask)
        assert len(finished) == ask.n, f"{len(finished)} of {ask.n} samples finished"

    async def bad(self) -> None:
        route, body, field = self.rng.choice(BAD)
        http = self.sidecar if route == "/rollouts" else self.engine
        answer = await http.post(route, json=body)
        if answer.status_code != 400 or field not in answer.text:
            raise RuntimeError(f"bad input: {answer.status_code} {answer.text[:200]} for {body}")


async def run_mixed(
    server: Server, weights: Mapping[str, Path], *, seconds: float, count: int, seed: int
) -> Report:
    """Send requests until the time has passed or the number is reached.

    Args:
        server: the server.
        weights: the folders of weights to push, by version. The server starts with `"default"`.
        seconds, count, seed: as for the whole soak.
    """
    report = Report("mixed")
    mix = _Mix(server, Truth(weights), report, seed)

    async def caller(until: float, most: int) -> None:
        while time.monotonic() < until and report.requests < most:
            await mix.one()

    try:
        await asyncio.gather(*(caller(time.monotonic() + seconds, _WARM_UP) for _ in range(_AT_ONCE)))
        operator = asyncio.create_task(_operate(mix))
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


async def _operate(mix: _Mix) -> None:
    """Pause, push, and stop, as a trainer does."""

    async def order(route: str, allowed: str = "", **body: Any) -> None:
        answer = await mix.engine.post(route, json=body)
        if answer.status_code != 200 and not (allowed and allowed in answer.text):
            mix.report.fault(f"{route} {body}: {answer.status_code} {answer.text[:200]}")

    async def push(*, flush: bool) -> None:
        version = mix.rng.choice(list(mix.truth.folders))
        weights = {"model_path": str(mix.truth.folders[version]), "weight_version": version}
        # An abandoned request may still hold a part of the cache. The weights are pushed anyway.
        await order("/update_weights_from_disk", _NOT_FLUSHED, **weights, flush_cache=flush)

    while True:
        await asyncio.sleep(mix.rng.uniform(2, 8))
        mode = mix.rng.choice(("in_place", "retract", "abort", "no pause", "stop all"))
        pushes, flush = mix.rng.random() < 0.75, mode != "in_place" and mix.rng.random() < 0.5
        what = f"{mode}{', pushed' * pushes}{' and flushed' * (pushes and flush)}"
        if mode == "stop all":
            what = mode
            await mix.stop_all()
        elif mode == "no pause":
            what = f"pushed{' and flushed' * flush} without a pause"
            await push(flush=flush)
        else:
            stopping = mix.stopping() if mode == "abort" else nullcontext()
            with stopping:
                await order("/pause_generation", mode=mode)
                try:
                    await asyncio.sleep(mix.rng.uniform(0.1, 1.0))
                    if pushes:
                        await push(flush=flush)
                finally:
                    await asyncio.shield(order("/continue_generation"))
        mix.report.outcomes[what] += 1


def _require_ok(answer: httpx.Response) -> None:
    if _PUSHED in answer.text[:10_000] and answer.status_code == 503:
        raise _PushedError
    if answer.status_code != 200:
        # SGLang answers an aborted request that is not streamed with a status of its own.
        kind = AbortedError if "abort" in answer.text.lower() else RuntimeError
        raise kind(f"{answer.status_code} {answer.text[:300]}")
