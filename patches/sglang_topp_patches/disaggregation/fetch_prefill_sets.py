"""On a decode server, fetch the sets of the prompt and the first generated token from the prefill server.

SGLang transfers the KV cache from the prefill server to the decode server. This transfer cannot carry the
sets, because the transfer's buffers have a fixed size. So when a generation request arrives, the decode
server's HTTP process asks the prefill server for the sets over HTTP. The function `open_question` sends this
question. The answer arrives after the prefill. Neither server's scheduler waits for the sets.

If the prefill server sends no sets, the generation request ends with an error. The request also ends with an
error if the sets belong to a first token other than the one that SGLang transferred. Such sets may come from
another request that has the same bootstrap room, the number that identifies a request on both servers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from sglang_topp.errors import WireError
from sglang_topp_patches.disaggregation.input_comparison import first_token_inputs
from sglang_topp_patches.disaggregation.prefill_set_store import PATH, FirstToken
from sglang_topp_patches.hooks import Seam, after
from sglang_topp_patches.request import sets_request
from sglang_topp_patches.scheduler.request_budget import is_refused
from sglang_topp_patches.scheduler_messages import KEY, Entry

__all__ = ["CALLED", "fetch_first_token", "note_first_token", "num_scored_here", "open_question"]

CALLED = (
    Seam("sglang.srt.utils.network.NetworkAddress", "Build the prefill server's address.", ("host", "port")),
)

# The timeout of one HTTP request to the prefill server. The prefill server answers within 20 s, with an empty
# answer if the sets are not ready.
_READ_S = 40.0
_RETRY_S = 0.5
# `fetch_first_token` waits at most this number of seconds. The function has to wait because the sets arrive
# after the KV cache: the sets pass through the prefill server's scheduler and HTTP process.
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
    if req.customized_info is None:
        req.customized_info = {}
    entries = req.customized_info.setdefault(KEY, [])
    # After a retraction, SGLang transfers a request's KV cache again, and restores the request's last token.
    # `entries` already has an entry for a restored token, so the loop adds none.
    while len(entries) < len(req.output_ids):
        if getattr(decode_req, "is_rebootstrap", False):  # SGLang before 0.5.16 lacks the attribute
            entries.append(Entry(None, "the prefill server drew the token again, without log-probs"))
        else:
            entries.append(Entry(None, handed_over=True))


def num_scored_here(server_args: Any, state: Any) -> int | None:
    """Return the number of prompt positions that this server scores. Each scored position needs a set.

    Returns:
        The number of scored prompt positions, or None on a decode server. A decode server gets the prompt's
        sets from the prefill server, together with the first token's set.
    """
    return None if server_args.disaggregation_mode == "decode" else len(state.input_token_logprobs_val)


@asynccontextmanager
async def open_question(server_args: Any, obj: Any) -> AsyncIterator[asyncio.Task[FirstToken] | None]:
    """Ask the prefill server for the sets of a request's prompt and first generated token.

    Yields:
        The asyncio task that fetches the sets, or None if this server is not a decode server. When the
        context exits, the context manager cancels the task that fetches the sets.
    """
    if server_args.disaggregation_mode != "decode":
        yield None
        return
    task = asyncio.create_task(_ask(server_args, obj))
    try:
        yield task
    finally:
        task.cancel()


async def fetch_first_token(
    question: asyncio.Task[FirstToken] | None, state: Any, token_id: int | None
) -> FirstToken:
    """Return the prefill server's answer: the first token, and the sets of the first token and the prompt.

    If the sets are missing or invalid, `entry.problem` of the returned `FirstToken` says why.

    Args:
        question: the asyncio task that fetches the sets, as `open_question` yields it.
        state: SGLang's `ReqState`.
        token_id: the id of the first token in the decode server's answer to the client.
    """
    assert question is not None, "only a decode server's scheduler leaves a token's set elsewhere"
    try:
        async with asyncio.timeout(_LATE_S):
            first = await asyncio.shield(question)
    except TimeoutError:
        return _problem(
            f"the prefill server at {state.obj.bootstrap_host} sent no set within {_LATE_S:g} s; was it asked"
            " for sets, and for this bootstrap room?"
        )
    if first.entry.candidates is None:
        return first
    logprob = state.output_token_logprobs_val[0]
    ids, logprobs = (
        np.frombuffer(part, dtype)
        for part, dtype in zip(first.entry.candidates, (np.int32, np.float32), strict=True)
    )
    theirs = logprobs[ids == token_id]
    if first.token_id != token_id or len(theirs) != 1 or abs(float(theirs[0]) - logprob) > 1e-5:
        return _problem(
            f"the prefill server sent the set of token {first.token_id}, and the answer begins with token"
            f" {token_id} of log-prob {logprob:.6g}; is the bootstrap room used twice?"
        )
    return first


def _problem(sentence: str) -> FirstToken:
    return FirstToken(-1, {}, Entry(None, sentence))


async def _ask(server_args: Any, obj: Any) -> FirstToken:
    import aiohttp
    from sglang.srt.utils.network import NetworkAddress

    port = server_args.disaggregation_bootstrap_port if obj.bootstrap_port is None else obj.bootstrap_port
    url = f"{NetworkAddress(obj.bootstrap_host, port).to_url()}{PATH}"
    question = {"room": obj.bootstrap_room, "inputs": first_token_inputs(obj)}
    limits = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=_READ_S)
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
                    return FirstToken.from_bytes(body)
                except WireError as error:
                    return _problem(str(error))
            if answer.status == 409:
                names = ", ".join(json.loads(body))
                return _problem(f"the prefill server was asked with other {names}; both need the same")
            if answer.status != 204:
                return _problem(f"{url} answered {answer.status}; sglang-topp has to be installed there too")
