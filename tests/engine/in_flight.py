"""Requests in flight while weights are pushed and generation is paused, by SGLang's own routes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.engine.running import read_events

__all__ = ["InFlight"]


class InFlight:
    """What has been asked of one engine. Every streamed chunk moves the test's clock.

    Chunks are parsed when they are looked at: who falls behind the engine is late with what it orders.
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
        """One request; `name` starts its id."""
        body = {"rid": f"{name}.{id(self)}", "return_prompt_token_ids": True, **body}
        if body.get("stream"):
            self._events[name] = []
            answer = self._stream(self._events[name], body)
        else:
            answer = self._ask(body)
        self._tasks[name] = asyncio.create_task(answer)

    def chunks(self, name: str) -> list[dict[str, Any]]:
        """Those of a stream until now; none of what is not streamed."""
        return [json.loads(event) for event in self._events.get(name, ())]

    @property
    def streams(self) -> list[str]:
        """The names of the requests that are streamed."""
        return list(self._events)

    async def answers(self) -> dict[str, dict[str, Any]]:
        """Every request's answer, or last chunk, under its name."""
        await asyncio.gather(*self._tasks.values())
        return {name: task.result() for name, task in self._tasks.items()}

    def is_done(self, name: str) -> bool:
        return self._tasks[name].done()

    async def arrive(self, others: int = 0) -> None:
        """Return once the scheduler has every request that has not ended, and so many samples of others.

        Raises:
            TimeoutError: it has not in a minute; one of the others may have ended.
        """
        async with asyncio.timeout(60):
            while True:
                loads = (await self.http.get("/v1/loads")).json()["loads"]
                there = sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
                if there >= others + sum(not task.done() for task in self._tasks.values()):
                    return
                await asyncio.sleep(0.02)

    async def move(self, name: str, chunks: int) -> None:
        """Return once a stream has got so many chunks more."""
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
        """New weights, named `version`."""
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
