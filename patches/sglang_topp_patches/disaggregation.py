"""Carry candidate sets from a prefill server to the decode server that answers the client.

A prefill server and a decode server both receive each generation request. The prefill server draws the first
token, and scores the prompt. SGLang sends the token and the KV cache to the decode server, in buffers of
fixed size, which cannot carry sets. So the prefill server's HTTP process keeps the sets, and the decode
server's HTTP process asks for them over HTTP when it has the first token. Neither server's scheduler waits
for them. The request has the same number on both servers, its bootstrap room. The route is on SGLang's
bootstrap server, a thread of the prefill server's HTTP process.

If the prefill server has no sets, the request ends with an error. It also does if the sets belong to other
inputs or to another first token, as they do if two requests have the same bootstrap room.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Annotated, Any, TypeAlias

import msgspec

from sglang_topp.errors import WireError
from sglang_topp_patches.hooks import Seam, after
from sglang_topp_patches.memory import InFlight
from sglang_topp_patches.request import SAMPLER, SOURCE, THRESHOLD, sets_request
from sglang_topp_patches.scheduler.requests import buffer_of, is_refused, refuse
from sglang_topp_patches.set_buffer import NO_SET, PackedSets, Problem, SetBuffer

_FIELD = "the first token's set"
_VERSION = version("sglang-topp")


@dataclass(frozen=True)
class FirstToken:
    """A request's first token, the candidate set of the first token, and the candidate sets of the prompt.

    Attributes:
        token_id: the id of the first token.
        inputs: the inputs of the prefill server's request, as `first_token_inputs` returns them.
        sets: the first token's set and those of the prompt, or the problem why they are missing.
        version: the version of this package that made it. Only the same version can read its bytes.
    """

    token_id: int
    inputs: dict[str, str]
    sets: SetBuffer
    version: str = _VERSION

    def to_bytes(self) -> bytes:
        """Return the attributes as MessagePack, with the arrays in this machine's byte order."""
        return msgspec.msgpack.encode(self, enc_hook=_parts)

    @classmethod
    def from_bytes(cls, body: bytes) -> FirstToken:
        """Decode the bytes that `to_bytes` returned.

        Raises:
            WireError: another version of this package wrote the bytes, or the bytes are incomplete.
        """
        try:
            first = msgspec.msgpack.decode(body, type=cls, dec_hook=_packed)
        except msgspec.DecodeError as error:
            raise WireError(
                _FIELD, f"got {body[:60]!r}, expected MessagePack of sglang-topp {_VERSION}: {error}"
            ) from error
        if first.version != _VERSION:
            raise WireError(
                _FIELD,
                f"the prefill server has sglang-topp {first.version}, this one {_VERSION}; expected the same",
            )
        if first.sets.problem is None and not len(first.sets.generated) == len(first.sets.spans) == 1:
            raise WireError(_FIELD, f"got {len(first.sets.generated)} sets, expected one")
        return first


def _parts(packed: PackedSets) -> tuple[bytearray, bytearray, list[int]]:
    return packed.ids, packed.logprobs, packed.sizes.tolist()


_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=NO_SET, lt=1 << 31)]


def _packed(_: type, parts: Any) -> PackedSets:
    packed = PackedSets(*msgspec.convert(parts, tuple[bytes, bytes, list[_Size]]))
    num_bytes = 4 * sum(max(size, 0) for size in packed.sizes)
    if (len(packed.ids), len(packed.logprobs)) != (num_bytes, num_bytes):
        raise ValueError(f"got arrays of {len(packed.ids)} and {len(packed.logprobs)} bytes, not {num_bytes}")
    return packed


def first_token_inputs(obj: Any) -> dict[str, str]:
    """Return a dict of the inputs that determine the sets of a request's prompt and first token.

    The dict maps each input's name to its value as a string (for the prompt, a SHA-256 hash).
    The dict does not contain `max_new_tokens`, because a router may send different values to the prefill
    server and the decode server. The prefill server draws one token, whatever the value of `max_new_tokens`
    is.

    Args:
        obj: SGLang's `GenerateReqInput`.
    """
    sampling = {**(obj.sampling_params or {})}
    sampling.pop("max_new_tokens", None)
    if not sampling.get("custom_params"):
        sampling.pop("custom_params", None)
    prompt = obj.text if obj.input_ids is None else obj.input_ids
    wanted = sets_request(obj)
    return {
        THRESHOLD: repr(wanted.threshold),
        SOURCE: str(SAMPLER if wanted.is_from_sampler else None),
        "logprob_start_len": str(obj.logprob_start_len),
        "sampling_params": json.dumps(sampling, sort_keys=True, default=repr),
        "prompt": hashlib.sha256(repr(prompt).encode()).hexdigest(),
    }


# -- on the prefill server

PATH = "/sglang_topp/first/"
"""The route of a bootstrap room's sets, before its number.

GET returns them, and DELETE drops them once they have arrived."""
_ROUTE = PATH + r"{room:\d+}"

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

    def keep(self, obj: Any, token_id: int | None, sets: SetBuffer) -> None:
        """Keep a finished request's sets for its decode server.

        Args:
            obj: SGLang's `GenerateReqInput`.
            token_id: the id of the first token in the answer, or None if the answer has no token.
            sets: what the request has, or the problem why it has none.
        """
        if obj.bootstrap_room is None or token_id is None:
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
        bootstrap_server.app.router.add_get(_ROUTE, self._answer)
        bootstrap_server.app.router.add_delete(_ROUTE, self._forget)

    async def _answer(self, request: Any) -> Any:
        """Return the sets, a 204 if the request is still running here, or a 404."""
        from aiohttp import web

        room, until = int(request.match_info["room"]), time.monotonic() + _LAG_S
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

        room = int(request.match_info["room"])
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._drop, room)
        return web.Response(status=204)

    def _is_running(self, room: int) -> bool:
        states = [] if self.manager is None else list(self.manager.rid_to_state.values())
        return any(getattr(state.obj, "bootstrap_room", None) == room for state in states)


# -- on the decode server

CALLED = (
    Seam("sglang.srt.utils.network.NetworkAddress", "Build the prefill server's address.", ("host", "port")),
)

_READ_S = 10.0
_RETRY_S = 0.5
# The sets pass through the prefill server's scheduler and HTTP process, which may be busy.
_LATE_S = 30.0


@after("sglang.srt.disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req")
def note_first_token(result: bool | None, self: Any, decode_req: Any) -> None:
    """Record where the first token's set is.

    The prefill server sends a request's first token with the KV cache, but without the first token's set.
    This hook runs in the decode server's scheduler, and records that the first token's set is on the prefill
    server.
    """
    req = decode_req.req
    if not req.return_logprob or not sets_request(req).field or is_refused(req):
        return
    buffer = buffer_of(req)
    # After a retraction, SGLang transfers a request's KV cache again, and restores the request's last token.
    # `buffer` already has a restored token, so the loop adds none.
    while buffer.end < len(req.output_ids):
        if getattr(decode_req, "is_rebootstrap", False):  # SGLang before 0.5.16 lacks the attribute
            problem = "the prefill server drew the token again, without log-probs"
            return refuse(req, f"no candidate set at position {buffer.end}: {problem}")
        buffer.append(None)


async def fetch_first_token(server_args: Any, state: Any, token_id: int) -> FirstToken:
    """Ask the prefill server for the sets of a request's first token and of its prompt.

    If the sets are missing or belong to something else, `sets.problem` of the result says why.

    Args:
        server_args: SGLang's `ServerArgs`.
        state: SGLang's `ReqState`.
        token_id: the id of the first token in the decode server's answer to the client.
    """
    import aiohttp
    from sglang.srt.utils.network import NetworkAddress

    obj = state.obj
    port = server_args.disaggregation_bootstrap_port if obj.bootstrap_port is None else obj.bootstrap_port
    server = NetworkAddress(obj.bootstrap_host, port).to_url()
    url, inputs = f"{server}{PATH}{obj.bootstrap_room}", first_token_inputs(obj)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_READ_S)
    cause = "it is still at work on the request"
    try:
        async with asyncio.timeout(_LATE_S), aiohttp.ClientSession(timeout=limits) as session:
            while True:
                try:
                    async with session.get(url) as answer:
                        body, status = await answer.read(), answer.status
                    if status != HTTPStatus.NO_CONTENT:
                        break
                except (aiohttp.ClientError, TimeoutError) as error:
                    cause = str(error) or type(error).__name__
                    await asyncio.sleep(_RETRY_S)
            first = _first_of(status, body, server)
            if first.sets.problem is None:
                first = _checked(first, inputs, token_id, state.output_token_logprobs_val[0])
            if first.sets.problem is None:
                # If this does not arrive, the prefill server drops the sets later.
                with suppress(aiohttp.ClientError, TimeoutError):
                    await (await session.delete(url)).release()
            return first
    except TimeoutError:
        return _problem(f"the prefill server at {server} sent no set within {_LATE_S:g} s: {cause}")


def _first_of(status: int, body: bytes, server: str) -> FirstToken:
    if status == HTTPStatus.NOT_FOUND:
        return _problem(
            f"the prefill server at {server} has none for this bootstrap room; was it asked for sets, and is"
            " sglang-topp installed there?"
        )
    if status != HTTPStatus.OK:
        return _problem(f"the prefill server at {server} answered {status}: {body[:200]!r}")
    try:
        return FirstToken.from_bytes(body)
    except WireError as error:
        return _problem(str(error))


def _checked(first: FirstToken, inputs: Mapping[str, str], token_id: int, logprob: float) -> FirstToken:
    """Return `first`, or a problem if it belongs to another request than the decode server's."""
    if names := sorted(name for name, value in inputs.items() if first.inputs.get(name) != value):
        return _problem(f"the prefill server was asked with other {', '.join(names)}; both need the same")
    ours = first.sets.generated.positions(0, 1)
    theirs = ours.logprobs[ours.token_ids == token_id]
    if first.token_id != token_id or len(theirs) != 1 or abs(float(theirs[0]) - logprob) > 1e-5:
        return _problem(
            f"the prefill server sent the set of token {first.token_id}, and the answer begins with token"
            f" {token_id} of log-prob {logprob:.6g}; is the bootstrap room used twice?"
        )
    return first


def _problem(sentence: str) -> FirstToken:
    sets = SetBuffer()
    sets.fail(Problem(f"no candidate set at position 0: {sentence}"))
    return FirstToken(-1, {}, sets)
