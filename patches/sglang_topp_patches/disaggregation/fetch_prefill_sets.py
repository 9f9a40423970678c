"""On a decode server, fetch the sets of the prompt and the first generated token from the prefill server.

SGLang transfers the KV cache from the prefill server to the decode server. This transfer cannot carry the
sets, because its buffers have a fixed size. So the decode server's HTTP process asks the prefill server for
the sets over HTTP, as soon as it has the first token. Neither server's scheduler waits for the sets.

If the prefill server has no sets, the request ends with an error. The request also ends with an error if the
sets belong to other inputs or to another first token, as they do if two requests have the same bootstrap
room, the number that identifies a request on both servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from sglang_topp.errors import WireError
from sglang_topp_patches.disaggregation.first_token import FirstToken, differing_names, first_token_inputs
from sglang_topp_patches.disaggregation.serve_prefill_sets import PATH
from sglang_topp_patches.hooks import Seam, after
from sglang_topp_patches.request import sets_request
from sglang_topp_patches.scheduler.requests import buffer_of, is_refused, refuse
from sglang_topp_patches.set_buffer import Problem, SetBuffer

__all__ = ["CALLED", "fetch_first_token", "note_first_token", "num_scored_here"]

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


def num_scored_here(server_args: Any, state: Any) -> int | None:
    """Return the number of prompt positions that this server scores. Each scored position needs a set.

    Returns:
        The number of scored prompt positions, or None on a decode server. A decode server gets the prompt's
        sets from the prefill server, together with the first token's set.
    """
    return None if server_args.disaggregation_mode == "decode" else len(state.input_token_logprobs_val)


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
    url, inputs = f"{server}{PATH.format(room=obj.bootstrap_room)}", first_token_inputs(obj)
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
    if names := differing_names(inputs, first.inputs):
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
