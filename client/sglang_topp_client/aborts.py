"""Aborts: ask a server to stop requests, and wait, or do not wait, until it has been asked.

`run.py` decides which requests are aborted, and when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import msgspec

from sglang_topp.errors import SglangToppError
from sglang_topp_client.rollout import Count
from sglang_topp_client.transport.http import HttpClient
from sglang_topp_client.transport.server_config import Kind
from sglang_topp_client.value_checks import decode_json, is_fresh_id

_TIMEOUT_S = 3.0
# The route, the field of one request's id, the field for all requests, and the time limit. A sidecar answers
# only after its engine has stopped the request, so a short time limit would expire too early.
_ROUTES: dict[Kind, tuple[str, str, str, float]] = {
    "sglang": ("/abort_request", "rid", "abort_all", _TIMEOUT_S),
    "sidecar": ("/abort", "request_id", "all", 10.0),
}


class _Answer(msgspec.Struct):
    aborted: Count | None = None


class Aborts:
    """The aborts of one server's requests, from one event loop.

    Args:
        http: the server's HTTP client. Before its connections close, it waits for the aborts under way.
        kind: returns the server's kind.
    """

    def __init__(self, http: HttpClient, kind: Callable[[], Awaitable[Kind]]) -> None:
        self._http, self._kind = http, kind
        self._under_way: dict[str, asyncio.Task[None]] = {}
        http.before_close = self.wait

    async def send(self, request_id: str | None) -> int:
        """Ask the server to abort a request, and return how many prompts a sidecar says that it aborted.

        An engine does not say whether it knew the id, and its aborts are not counted.

        Args:
            request_id: the request's id on this server: for an engine, the engine's id; for a sidecar, the
                `request_id` that the sidecar received. None aborts every request in the engine.
        """
        kind = await self._kind()
        path, name, everything, timeout_s = _ROUTES[kind]
        body = {everything: True} if request_id is None else {name: request_id}
        answer = await self._http.request("POST", path, body, timeout_s=timeout_s)
        return 0 if kind == "sglang" else decode_json(answer, _Answer, field=path).aborted or 0

    async def send_unknown(self, request_id: str) -> int:
        """Ask the server to abort a request that this client did not send; see `send`.

        An engine is only asked about ids that end as its own do. It may abort every request whose id begins
        with the given one, so `step-7` would end another caller's `step-70`.
        """
        if await self._kind() == "sglang" and not is_fresh_id(request_id):
            return 0
        return await self.send(request_id)

    async def try_send(self, request_id: str) -> None:
        """Ask the server to abort a request, and ignore errors."""
        with suppress(SglangToppError):
            await self.send(request_id)

    def send_soon(self, engine_id: str) -> None:
        """Ask the engine to abort a request that the caller has abandoned, and return at once.

        The client has closed its connection too, and the engine then aborts it even without this message,
        unless a proxy keeps its own connection open. So the abort is sent once, and errors are ignored.
        """
        self._under_way[engine_id] = asyncio.create_task(self._send_once(engine_id))

    async def _send_once(self, engine_id: str) -> None:
        await self.try_send(engine_id)
        self._under_way.pop(engine_id, None)

    async def wait(self) -> None:
        """Wait for the aborts that `send_soon` has begun, at most three seconds."""
        if self._under_way:
            await asyncio.wait(self._under_way.values())
        # An event loop that ends cancels its tasks, and then closes the connections.
        await asyncio.gather(*map(self._send_once, list(self._under_way)))
