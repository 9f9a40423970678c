"""Keep a prefill server's candidate sets until a decode server has fetched them.

A prefill server and a decode server both receive each generation request. The prefill server draws the first
token, and scores the prompt. SGLang sends the token and the KV cache to the decode server, in buffers of
fixed size, which cannot carry sets. So the prefill server's HTTP process keeps the sets, and the decode
server asks for them over HTTP when it has the first token. The request has the same number on both servers,
its bootstrap room. The route is on SGLang's bootstrap server, a thread of the prefill server's HTTP process.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from sglang_topp_patches.disaggregation.first_token import FirstToken, first_token_inputs
from sglang_topp_patches.hooks import after
from sglang_topp_patches.memory import InFlight
from sglang_topp_patches.set_buffer import SetBuffer

__all__ = ["PATH", "PrefillServer"]

PATH = "/sglang_topp/first/{room}"
"""The route of a bootstrap room's sets: GET returns them, and DELETE drops them once they have arrived."""

# A decode server asks within the first 50 tokens of its answer. A longer pause of the decode server ends its
# requests with an error.
_KEPT_S = 600.0
# The first token may reach the decode server before the sets reach this process.
_LAG_S = 1.0
_POLL_S = 0.02


class PrefillServer:
    """The hooks of a prefill server's HTTP process. On other kinds of server, the hooks do nothing.

    Attributes:
        manager: SGLang's `TokenizerManager`, or None before it exists.
    """

    def __init__(self, in_flight: InFlight) -> None:
        self.manager: Any = None
        self._in_flight = in_flight
        # The sets by bootstrap room, oldest first, with the time at which they are dropped. Only the HTTP
        # process's event loop changes the dict; the bootstrap server's thread reads it.
        self._kept: dict[int, tuple[FirstToken, float]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # None until the first sets are kept

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self,
        server_args: Any,
        obj: Any,
        token_id: int | None,
        sets: SetBuffer,
    ) -> None:
        """Keep a finished request's sets for its decode server, if this is a prefill server.

        Args:
            server_args: SGLang's `ServerArgs`.
            obj: SGLang's `GenerateReqInput`.
            token_id: the id of the first token in the answer, or None if the answer has no token.
            sets: what the request has, or the problem why it has none.
        """
        if server_args.disaggregation_mode != "prefill" or obj.bootstrap_room is None or token_id is None:
            return
        self._loop = asyncio.get_running_loop()
        now = time.monotonic()
        stale = [room for room, (_, until) in self._kept.items() if until < now]
        for room in (*stale, obj.bootstrap_room):
            self._drop(room)
        first = FirstToken(token_id, first_token_inputs(obj), sets.first_position())
        self._kept[obj.bootstrap_room] = first, now + _KEPT_S
        self._in_flight.total += first.sets.num_held

    def _drop(self, room: int) -> None:
        if (kept := self._kept.pop(room, None)) is not None:
            self._in_flight.total -= kept[0].sets.num_held

    @after("sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes")
    def add_routes(self, result: None, bootstrap_server: Any) -> None:
        """Add the routes that decode servers call.

        The bootstrap server runs in a thread of the HTTP process, with an event loop of its own.
        """
        bootstrap_server.app.router.add_get(PATH, self._answer)
        bootstrap_server.app.router.add_delete(PATH, self._forget)

    async def _answer(self, request: Any) -> Any:
        """Return the sets, a 204 if the request is still running here, or a 404."""
        from aiohttp import web

        room, until = _room_of(request), time.monotonic() + _LAG_S
        while True:
            # In this order: a request that ends in between has its sets in `_kept`.
            is_running = self._is_running(room)
            if (kept := self._kept.get(room)) is not None:
                return web.Response(body=await asyncio.to_thread(kept[0].to_bytes))
            if not is_running:
                return web.Response(status=404, text="no sets of this bootstrap room")
            if time.monotonic() > until:
                return web.Response(status=204)
            await asyncio.sleep(_POLL_S)

    async def _forget(self, request: Any) -> Any:
        from aiohttp import web

        room = _room_of(request)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drop, room)
        return web.Response(status=204)

    def _is_running(self, room: int) -> bool:
        states = [] if self.manager is None else list(self.manager.rid_to_state.values())
        return any(getattr(state.obj, "bootstrap_room", None) == room for state in states)


def _room_of(request: Any) -> int:
    from aiohttp import web

    try:
        return int(request.match_info["room"])
    except ValueError:
        raise web.HTTPBadRequest(text="expected the number of a bootstrap room") from None
