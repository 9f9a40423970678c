"""Disaggregated prefill and decode: the first token's set, and the prompt's, reach the decode server.

The prefill server draws the first token; the decode server, whose answer is the client's, never sees the
distribution. So it asks: its HTTP process has a question open at the prefill server's, beside the KV
cache's bootstrap server, from when a request begins, and joins the answer to the tokens that it draws
itself. A prefill server that has none, or none of this token, makes the request an error.

Nothing of it passes through the schedulers' connection, whose buffers have a fixed size, and no scheduler
waits for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from sglang_topp.errors import WireError
from sglang_topp_patches.budget import is_refused
from sglang_topp_patches.handover import First, Kept
from sglang_topp_patches.payload import (
    FIELDS,
    KEY,
    SOURCE,
    THRESHOLD,
    Entry,
    Span,
    asking_field,
    custom_params,
)
from sglang_topp_patches.received import Received

__all__ = [
    "PATH",
    "add_route",
    "asked_for",
    "asking",
    "keep",
    "note_first_token",
    "note_server_args",
    "num_scored",
    "take",
]

PATH = "/sglang_topp/first"
"""Of the prefill server's bootstrap server."""

# A question is put again after so long: what stands between the servers may cut a silent connection.
_QUESTION_S = 20.0
_RETRY_S = 0.5
# The prefill server's schedulers and its HTTP process are so far behind the KV cache at the most.
_LATE_S = 30.0

_kept = Kept()
_loop: asyncio.AbstractEventLoop | None = None  # of the HTTP process, which owns what is kept


_role = "null"
_default_port = 0


def note_server_args(result: None, self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `TokenizerManager.__init__`: which server this is."""
    global _role, _default_port
    _role = server_args.disaggregation_mode
    _default_port = server_args.disaggregation_bootstrap_port


def asked_for(obj: Any) -> dict[str, str]:
    """What decides the sets of a request's prompt and first token, by name, in words to compare.

    A router may send a prefill server another length: it draws one token whatever that is.
    """
    sampling = {**(obj.sampling_params or {})}
    sampling.pop("max_new_tokens", None)
    if isinstance(custom := sampling.get("custom_params"), dict):
        # Ours are there too, wherever they came from.
        sampling["custom_params"] = {name: value for name, value in custom.items() if name not in FIELDS}
    prompt = obj.text if obj.input_ids is None else obj.input_ids
    get = vars(obj).get
    return {
        THRESHOLD: repr(float(get(THRESHOLD) or 0)),
        SOURCE: str(get(SOURCE)),
        "logprob_start_len": str(obj.logprob_start_len),
        "sampling_params": json.dumps(sampling, sort_keys=True, default=repr),
        "prompt": hashlib.sha256(repr(prompt).encode()).hexdigest(),
    }


# -- the prefill server ------------------------------------------------------------------------------


def keep(state: Any, received: Received, problem: str) -> None:
    """Have a finished request's sets wait for its decode server, where this is a prefill server.

    Args:
        state: SGLang's `ReqState`.
        received: what has arrived for it.
        problem: why there is not one set for each token, or nothing.
    """
    global _loop
    token_id = received.first_token_id
    if _role != "prefill" or state.obj.bootstrap_room is None or token_id is None:
        return
    _loop = asyncio.get_running_loop()
    prompt: tuple[Span | None, ...] = ()
    if received.refusal is not None:
        entry = received.refusal
    elif problem:
        entry = Entry(None, problem)
    else:
        version = received.versions.meta_info(1)["weight_version"]
        entry, prompt = Entry(received.generated[0], weight_version=version), tuple(received.prompt)
    _kept.put(state.obj.bootstrap_room, First(token_id, asked_for(state.obj), entry, prompt))


def add_route(result: None, self: Any) -> None:
    """AFTER hook on `CommonKVBootstrapServer._setup_routes`: it answers decode servers.

    It runs in a thread of the HTTP process, with a loop of its own.
    """
    self.app.router.add_post(PATH, _answer)


async def _answer(request: Any) -> Any:
    from aiohttp import web

    try:
        question = json.loads(await request.read())
        room, asked = question["room"], question["asked"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return web.Response(status=400, text="expected a JSON object with room and asked")
    if type(room) is not int or not isinstance(asked, dict):
        return web.Response(status=400, text="room: expected an integer; asked: an object")
    if _loop is None:  # no request has ended yet
        await asyncio.sleep(_RETRY_S)
        return web.Response(status=204)
    taking = asyncio.run_coroutine_threadsafe(_kept.take(room, asked, _QUESTION_S), _loop)
    first = await asyncio.wrap_future(taking)
    if first is None:
        return web.Response(status=204)
    if isinstance(first, tuple):
        return web.json_response(first, status=409)
    return web.Response(body=await asyncio.to_thread(first.to_bytes))


# -- the decode server -------------------------------------------------------------------------------


def note_first_token(result: bool | None, self: Any, decode_req: Any) -> None:
    """AFTER hook on `DecodeTransferQueue._commit_transfer_to_req`, in the scheduler: the token that came
    with the KV cache has its set elsewhere."""
    req = decode_req.req
    if not req.return_logprob or not asking_field(custom_params(req).get) or is_refused(req):
        return
    if req.customized_info is None:
        req.customized_info = {}
    entries = req.customized_info.setdefault(KEY, [])
    # A request that was retracted comes back with its last token, which has an entry.
    while len(entries) < len(req.output_ids):
        if getattr(decode_req, "is_rebootstrap", False):  # which there is from 0.5.16 on
            entries.append(Entry(None, "the prefill server drew the token again, without log-probs"))
        else:
            entries.append(Entry(None, handed_over=True))


def num_scored(state: Any) -> int | None:
    """How many prompt positions an answer of this server reports log-probs of, a set for each of which must
    have arrived; None on a decode server, which takes them over with the first token's set."""
    return None if _role == "decode" else len(state.input_token_logprobs_val)


@asynccontextmanager
async def asking(obj: Any) -> AsyncIterator[asyncio.Task[First] | None]:
    """A question at the prefill server for what belongs to a request's first token, open as long as the
    request is; None where this is no decode server."""
    if _role != "decode":
        yield None
        return
    task = asyncio.create_task(_ask(obj))
    try:
        yield task
    finally:
        task.cancel()


async def take(question: asyncio.Task[First] | None, state: Any, received: Received) -> None:
    """Join the answer to what has arrived, once the first token has; a missing one becomes a problem."""
    assert question is not None, "only a decode server's scheduler leaves a token's set elsewhere"
    try:
        async with asyncio.timeout(_LATE_S):
            first = await asyncio.shield(question)
    except TimeoutError:
        first = _none(
            f"the prefill server at {state.obj.bootstrap_host} sent none within {_LATE_S:g} s; was it asked"
            " for sets, and for this bootstrap room?"
        )
    received.hand_over(_checked(first, state, received.first_token_id))


def _none(problem: str) -> First:
    return First(-1, {}, Entry(None, problem))


def _checked(first: First, state: Any, token_id: int | None) -> First:
    """`first`, or a problem where it is not that of the token that the answer begins with."""
    if first.entry.candidates is None:
        return first
    logprob = state.output_token_logprobs_val[0]
    ids, logprobs = (
        np.frombuffer(part, dtype)
        for part, dtype in zip(first.entry.candidates, (np.int32, np.float32), strict=True)
    )
    theirs = logprobs[ids == token_id]
    if first.token_id != token_id or len(theirs) != 1 or abs(float(theirs[0]) - logprob) > 1e-5:
        return _none(
            f"the prefill server sent that of token {first.token_id}, and the answer begins with token"
            f" {token_id} of log-prob {logprob:.6g}; is the bootstrap room used twice?"
        )
    return first


async def _ask(obj: Any) -> First:
    import aiohttp
    from sglang.srt.utils.network import NetworkAddress

    port = _default_port if obj.bootstrap_port is None else obj.bootstrap_port
    url = f"{NetworkAddress(obj.bootstrap_host, port).to_url()}{PATH}"
    question = {"room": obj.bootstrap_room, "asked": asked_for(obj)}
    limits = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=2 * _QUESTION_S)
    async with aiohttp.ClientSession(timeout=limits) as session:
        while True:
            try:
                async with session.post(url, json=question) as answer:
                    body = await answer.read()
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(_RETRY_S)
                continue
            if answer.status == 200:
                try:
                    return First.from_bytes(body)
                except WireError as error:
                    return _none(str(error))
            if answer.status == 409:
                names = ", ".join(json.loads(body))
                return _none(f"the prefill server was asked with other {names}; both need the same")
            if answer.status != 204:
                return _none(f"{url} answered {answer.status}; sglang-topp has to be installed there too")
