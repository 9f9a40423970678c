"""Let a prefill server send the candidate sets of prompts and first tokens to decode servers.

A prefill server and a decode server both receive each generation request. The decode server answers the
client, but the prefill server draws the first token. The decode server's HTTP process therefore asks the
prefill server for the sets, as soon as a request arrives. The patch set adds a route for this purpose to
SGLang's bootstrap server, which runs in the prefill server's HTTP process. A decode server without the patch
set does not ask for the sets, and would send an answer without sets. So if a client requests sets, the
prefill server begins the prefill only after a decode server has asked for the sets. If no decode server asks
in time, the prefill server refuses the request with a 503.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from sglang_topp_patches.disaggregation.input_comparison import first_token_inputs
from sglang_topp_patches.disaggregation.prefill_set_store import PATH, FirstToken, PrefillSets
from sglang_topp_patches.hooks import after, around
from sglang_topp_patches.http_exception import CallEndedError
from sglang_topp_patches.memory.budget import InFlight
from sglang_topp_patches.request import sets_request
from sglang_topp_patches.scheduler_messages import Entry, PackedSet

__all__ = ["PrefillServer"]

# If the sets are not ready within this number of seconds, the prefill server answers without sets, and the
# decode server asks for the sets again. During a longer wait, a proxy between the servers might close the
# idle connection.
_QUESTION_S = 20.0
_RETRY_S = 0.5
# The prefill server waits at most this number of seconds for a decode server to ask for a request's sets. The
# prefill server and the decode server receive a request at about the same time, unless one server is paused.
_SKEW_S = 30.0


class PrefillServer:
    """The hooks of a prefill server's HTTP process. On other kinds of server, the hooks do nothing.

    Attributes:
        sets: the candidate sets that no decode server has fetched yet. Only the HTTP process's event loop
            accesses the attribute `sets`.
    """

    def __init__(self, in_flight: InFlight) -> None:
        self.sets = PrefillSets(in_flight)
        self._loop: asyncio.AbstractEventLoop | None = None  # None until the first request arrives

    @around("sglang.srt.managers.tokenizer_manager.TokenizerManager._tokenize_one_request")
    async def await_decode_server(
        self, original: Callable[..., Awaitable[Any]], manager: Any, obj: Any
    ) -> Any:
        """Delay the prefill of one prompt.

        The hook waits until a decode server has asked for the request's sets. SGLang sends the request to the
        scheduler only after the hook returns.
        """
        tokenized = await original(manager, obj)
        if _is_prefill_server(manager.server_args):
            await self._await_question(obj)
        return tokenized

    @around("sglang.srt.managers.tokenizer_manager.TokenizerManager._batch_tokenize_and_process")
    async def await_decode_servers(
        self, original: Callable[..., Awaitable[Any]], manager: Any, batch_size: int, obj: Any
    ) -> Any:
        """Delay the prefill of all prompts.

        SGLang calls the hooked function to tokenize all prompts of a request at once. The hook waits until
        decode servers have asked for the sets of every prompt.
        """
        tokenized = await original(manager, batch_size, obj)
        if _is_prefill_server(manager.server_args):
            for i in range(batch_size):
                await self._await_question(obj[i])
        return tokenized

    async def _await_question(self, obj: Any) -> None:
        """Wait at most `_SKEW_S` seconds for a decode server to ask for the sets of a request.

        Raises:
            CallEndedError: no decode server asked for the sets, and the answer is streamed.
            HTTPException: no decode server asked for the sets, and the answer is not streamed.
        """
        from fastapi import HTTPException

        if (room := getattr(obj, "bootstrap_room", None)) is None:
            return
        self._loop = asyncio.get_running_loop()
        field = sets_request(obj).field
        if not field:
            self.sets.note_request_without_sets(room)
        elif not await self.sets.wait_for_question(room, _SKEW_S):
            problem = (
                f"{field}: no decode server asked for the first token's set of this bootstrap room within"
                f" {_SKEW_S:g} s; expected sglang-topp on both servers, and the request to both at the same"
                " time"
            )
            if getattr(obj, "stream", False):
                raise CallEndedError(problem, HTTPStatus.SERVICE_UNAVAILABLE)
            # Do not raise `CallEndedError` here, because it is a ValueError. On `/generate`, SGLang before
            # 0.5.17 answers every ValueError with 400, and ignores the error's `status_code`.
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, problem)

    def keep(
        self,
        server_args: Any,
        obj: Any,
        token_id: int | None,
        first_entry: Callable[[], tuple[Entry, tuple[PackedSet | None, ...]]],
    ) -> None:
        """Store a finished request's sets for its decode server, if this is a prefill server.

        Args:
            server_args: SGLang's `ServerArgs`.
            obj: SGLang's `GenerateReqInput`.
            token_id: the id of the first token in the answer, or None if the answer has no token.
            first_entry: a function that returns a pair: the first token's `Entry`, and the sets of the prompt
                positions. The `Entry` holds the token's set, or the reason why the set is missing.
        """
        if _is_prefill_server(server_args) and obj.bootstrap_room is not None and token_id is not None:
            first = FirstToken(token_id, first_token_inputs(obj), *first_entry())
            self.sets.put(obj.bootstrap_room, first)

    @after("sglang.srt.disaggregation.common.conn.CommonKVBootstrapServer._setup_routes")
    def add_route(self, result: None, bootstrap_server: Any) -> None:
        """Add the route that decode servers call.

        The bootstrap server runs in a thread of the HTTP process, with an event loop of its own.
        """
        bootstrap_server.app.router.add_post(PATH, self._answer)

    async def _answer(self, request: Any) -> Any:
        from aiohttp import web

        try:
            question = json.loads(await request.read())
            room, inputs = question["room"], question["inputs"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return web.Response(status=400, text="expected a JSON object with room and inputs")
        if type(room) is not int or not isinstance(inputs, dict):
            return web.Response(status=400, text="room: expected an integer; inputs: an object")
        if self._loop is None:  # no request has reached this prefill server yet
            await asyncio.sleep(_RETRY_S)
            return web.Response(status=204)
        answer = await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(self.sets.take(room, inputs, _QUESTION_S), self._loop)
        )
        if answer is None:
            return web.Response(status=204)
        if isinstance(answer, tuple):
            return web.json_response(answer, status=409)
        return web.Response(body=await asyncio.to_thread(answer.to_bytes))


def _is_prefill_server(server_args: Any) -> bool:
    return bool(server_args.disaggregation_mode == "prefill")
