"""Send requests, and push weights or pause generation while they are in flight, by SGLang's own routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.engine.start_servers import Engine, num_prefilled, read_events

__all__ = ["InFlight", "Scoring"]


class InFlight:
    """The requests that a test has sent to one engine. Tests wait for numbers of chunks, not for times.

    Chunks are parsed only when a test reads them. Parsing all of them would delay the test's orders.
    """

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self._events: dict[str, list[bytes]] = {}
        self._tasks: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._moved = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def at(cls, url: str) -> AsyncIterator[InFlight]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as http:
            requests = cls(http)
            try:
                yield requests
            finally:
                for task in requests._tasks.values():
                    task.cancel()
                await asyncio.gather(*requests._tasks.values(), return_exceptions=True)

    def send(self, name: str, **body: Any) -> None:
        """Send a request whose id starts with `name`."""
        body = {"rid": f"{name}.{id(self)}", "return_prompt_token_ids": True, **body}
        if body.get("stream"):
            self._events[name] = []
            answer = self._stream(self._events[name], body)
        else:
            answer = self._ask(body)
        self._tasks[name] = asyncio.create_task(answer)

    def chunks(self, name: str) -> list[dict[str, Any]]:
        """Return the chunks received so far, or none if the request is not streamed."""
        return [json.loads(event) for event in self._events.get(name, ())]

    @property
    def streams(self) -> list[str]:
        """Return the names of the streamed requests."""
        return list(self._events)

    async def answers(self) -> dict[str, dict[str, Any]]:
        """Wait for all requests. Return each one's answer, or its last chunk, by name."""
        await asyncio.gather(*self._tasks.values())
        return {name: task.result() for name, task in self._tasks.items()}

    def is_done(self, name: str) -> bool:
        return self._tasks[name].done()

    async def arrive(self, others: int = 0) -> None:
        """Wait until the scheduler has every unfinished request, and `others` samples of other callers.

        Raises:
            TimeoutError: it has fewer after a minute. A sample of another caller may have ended.
        """
        async with asyncio.timeout(60):
            while True:
                loads = (await self.http.get("/v1/loads")).json()["loads"]
                there = sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
                if there >= others + sum(not task.done() for task in self._tasks.values()):
                    return
                await asyncio.sleep(0.02)

    async def until_idle(self) -> None:
        """Wait until the scheduler has freed everything of every request.

        Raises:
            TimeoutError: it has not after a minute.
        """
        async with asyncio.timeout(60):
            while True:
                loads = (await self.http.get("/v1/loads")).json()["loads"]
                if not any(
                    load[name]
                    for load in loads
                    for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
                ):
                    return
                await asyncio.sleep(0.02)

    async def move(self, name: str, chunks: int) -> None:
        """Wait until a stream has received `chunks` more chunks."""
        end = len(self._events[name]) + chunks
        while len(self._events[name]) < end:
            assert not self.is_done(name), f"{name} ended before it was expected to"
            self._moved.clear()
            await self._moved.wait()

    async def order(self, path: str, status: int = 200, **body: Any) -> None:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == status, answer.text

    async def pause(self, mode: str) -> None:
        await self.order("/pause_generation", mode=mode)

    async def go_on(self) -> None:
        await self.order("/continue_generation")

    async def push(self, path: Path, version: str, *, status: int = 200, **options: Any) -> None:
        """Push new weights under the name `version`."""
        await self.order(
            "/update_weights_from_disk", status, model_path=str(path), weight_version=version, **options
        )

    async def abort(self, name: str) -> None:
        await self.order("/abort_request", rid=f"{name}.{id(self)}")

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self.http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        parsed: dict[str, Any] = answer.json()
        return parsed

    async def _stream(self, events: list[bytes], body: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self.http.stream("POST", "/generate", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for event in read_events(answer):
                    events.append(event)
                    self._moved.set()
        finally:
            self._moved.set()
        last: dict[str, Any] = json.loads(events[-1])
        return last


class Scoring:
    """Pauses generation while the engine scores a long prompt.

    The engine's log says how much of a prompt has been prefilled.
    """

    LENGTH = 4000

    def __init__(self, engine: Engine, requests: InFlight, *, until: int = LENGTH) -> None:
        """`until`: the most tokens of the prompt that may have been prefilled at the pause."""
        self.engine, self.requests = engine, requests
        self._until = until
        self._seed = 0

    def ids(self) -> list[int]:
        """Return a new prompt that shares no prefix with the cache.

        It lacks the vocabulary's last id, which SGLang reports as 0.
        """
        self._seed += 1
        ids: list[int] = np.random.default_rng(self._seed).integers(0, 511, self.LENGTH).tolist()
        return ids

    async def meets_it(self, mode: str, asking: asyncio.Future[Any]) -> bool:
        """Pause while the prompt is scored.

        Returns:
            Whether the pause came in the middle. If so, generation is still paused.
        """
        before = num_prefilled(self.engine)
        while num_prefilled(self.engine) == before and not asking.done():
            await asyncio.sleep(0.01)
        await self.requests.pause(mode)
        if before < num_prefilled(self.engine) < before + self._until:
            return True
        await self.requests.go_on()
        await asking
        return False
