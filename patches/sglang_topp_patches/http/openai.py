"""Add candidate sets to the answers of the OpenAI routes, where `guard.Guard` sends them.

The sets are in `sglext`, which is the answer's field for SGLang's extensions::

    "sglext": {"candidate_sets": [{"index": 0, "output_ids": [...], "output_top_p_logprobs_val_base64": ...}]}

The list `candidate_sets` has one entry for each choice of the answer, with the same fields as `meta_info` on
`/generate`. A stream ends with an additional chunk, which has `sglext` and no choices. If the engine sends no
sets for a choice, the client gets an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from http.client import responses
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Message, Send

from sglang_topp_patches.http.process_state import Call, CallEndedError

_EVENT, _ERROR_EVENT, _DONE = b"data: ", b'data: {"error"', b"data: [DONE]"


def rewriting(send: Send, change: Callable[[dict[str, Any]], Response]) -> Send:
    """Return a `send` that answers with `change(body)` in place of a JSON body of status 200."""
    parts: list[bytes] | None = None

    async def send_changed(message: Message) -> None:
        nonlocal parts
        if message["type"] == "http.response.start" and message["status"] == 200:
            parts = []
        elif parts is None:
            await send(message)
        else:
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                answer = change(json.loads(b"".join(parts)))
                await send(
                    {
                        "type": "http.response.start",
                        "status": answer.status_code,
                        "headers": answer.raw_headers,
                    }
                )
                await send({"type": "http.response.body", "body": answer.body})

    return send_changed


def adding_sets(send: Send, call: Call) -> Send:
    """Return a `send` that adds the sets of a call to its answer, or to its stream before the last event.

    If a choice of the answer has no sets, the call ends with an error. If SGLang has already sent an error
    event in the stream, it gets the status of the sample that failed, and nothing is added.
    """
    send_whole = rewriting(send, lambda content: _with_sets(content, call))
    is_stream = is_answered = False
    template: dict[str, Any] = {}

    async def send_with_sets(message: Message) -> None:
        nonlocal is_stream, is_answered, template
        if message["type"] == "http.response.start":
            is_stream = (b"content-type", b"text/event-stream; charset=utf-8") in message["headers"]
            return await (send if is_stream else send_whole)(message)
        if not is_stream:
            return await send_whole(message)
        event = message.get("body", b"")
        if event.startswith(_ERROR_EVENT):
            is_answered = True
            message = {**message, "body": _with_status(event, _status(call))}
        elif event.startswith(_DONE) or not message.get("more_body", False):
            if not is_answered:
                last = _with_sets({**template, "choices": [], "usage": None}, call)
                is_error = last.status_code != 200
                body = b'{"error":' + last.body + b"}" if is_error else last.body
                await send({**message, "body": _EVENT + body + b"\n\n", "more_body": True})
            is_answered = True
        elif not template:
            template = json.loads(event.removeprefix(_EVENT))
        await send(message)

    return send_with_sets


def _with_sets(content: dict[str, Any], call: Call) -> Response:
    """Return an answer with the sets of all choices, or with an error if a choice has none."""
    import orjson

    try:
        sets = _candidate_sets(call)
    except CallEndedError as problem:
        status = problem.status_code
        kind = responses.get(status, "InternalServerError").replace(" ", "")
        error = {"object": "error", "message": str(problem), "type": kind, "param": None, "code": status}
        return JSONResponse(error, status)
    content["sglext"] = {**(content.get("sglext") or {}), "candidate_sets": sets}
    return Response(orjson.dumps(content), media_type="application/json")


def _with_status(error_event: bytes, status: int) -> bytes:
    if not status:
        return error_event
    content = json.loads(error_event.removeprefix(_EVENT))
    content["error"]["code"] = status
    return _EVENT + json.dumps(content).encode() + b"\n\n"


def _status(call: Call) -> int:
    """Return the HTTP status of the error that ended a sample, or 0."""
    return next((sample.status for sample in call.samples if sample.has_failed), 0)


def _candidate_sets(call: Call) -> list[dict[str, Any] | None]:
    """Return the sets of each choice; None for a choice that asked for none.

    Raises:
        CallEndedError: a choice has no sets.
    """
    expected = max(call.num_choices, 1)
    choices = call.samples[-expected:]
    missing = [sample for sample in choices if not sample.is_written]
    if missing or len(choices) != expected:
        cause = next((sample.cause for sample in missing if sample.cause), "the engine sent no more")
        found = f"{len(choices) - len(missing)} of {expected} choices have candidate sets"
        raise CallEndedError(f"{found}: {cause}", _status(call) or HTTPStatus.INTERNAL_SERVER_ERROR)
    return [sample.record and {"index": i, **sample.record} for i, sample in enumerate(choices)]
