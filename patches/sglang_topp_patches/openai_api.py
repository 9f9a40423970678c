"""OpenAI's form of a call, in the HTTP process: our fields into SGLang's request, the sets into the answer.

SGLang builds its own request from OpenAI's, and OpenAI's answer from its own. The fields that `routes.Guard`
found in the body are put on the former; what the engine answers is listened to on its way, and the sets
go into the answer's `sglext`, which is where SGLang puts its other additions:

    "sglext": {"candidate_sets": [{"index": 0, "output_ids": [...], "output_top_p_logprobs_val_base64": ...}]}

one entry per choice, with its index and the fields of `meta_info` on `/generate`. A stream has them in a last
chunk without choices. An answer in which one is missing is an error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from http.client import responses
from typing import Any

from sglang_topp_patches.payload import AT_END, SETS
from sglang_topp_patches.routes import current_call

__all__ = ["add_to_answer", "add_to_stream", "listen"]

_HEARD = "sglang_topp_heard"


class _Heard:
    """The sets of one call, as the engine sends them.

    Attributes:
        entries: each finished sample's sets by its index; None for one that none were asked for.
        problem: why a finished sample has none; empty while all have.
        status: of the error that ended the call; 0 where it has none of its own.
    """

    def __init__(self, request: Any) -> None:
        self.entries: dict[int, dict[str, Any] | None] = {}
        self.problem = ""
        self.status = 0
        self._request = request

    def hear(self, index: int, sample: Mapping[str, Any]) -> None:
        """Take what a sample has, where it has ended."""
        meta_info = sample["meta_info"]
        if (reason := meta_info.get("finish_reason")) is None:
            return
        if SETS in meta_info:
            self.entries[index] = meta_info.pop(SETS)
        else:
            self.problem = self.problem or reason.get("message") or "the engine sent none"
            self.status = self.status or int(reason.get("status_code") or 0)

    def sglext(self) -> dict[str, Any]:
        """What joins the answer's `sglext`.

        Raises:
            RuntimeError: there is not one entry per choice.
        """
        request = self._request
        expected = 1 if request.is_single else request.batch_size * request.parallel_sample_num
        if self.problem or self.entries.keys() != set(range(expected)):
            found = f"{len(self.entries)} of {expected} choices have candidate sets"
            raise RuntimeError(f"{found}: {self.problem or 'the engine sent no more'}")
        entries = [self.entries[index] for index in range(expected)]
        return {"candidate_sets": [entry and {"index": i, **entry} for i, entry in enumerate(entries)]}


async def add_to_answer(
    original: Callable[..., Awaitable[Any]], self: Any, adapted_request: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND hook on `_handle_non_streaming_request` of both OpenAI routes."""
    heard = _ask(adapted_request)
    answer = await original(self, adapted_request, request, raw_request)
    if heard is None or not hasattr(answer, "model_dump"):
        return answer  # without sets, or an error already
    import orjson
    from starlette.responses import Response

    content = answer.model_dump(mode="json", by_alias=True)
    content["sglext"] = {**(content.get("sglext") or {}), **heard.sglext()}
    return Response(orjson.dumps(content), media_type="application/json")


def add_to_stream(
    original: Callable[..., AsyncGenerator[str, None]],
    self: Any,
    adapted_request: Any,
    request: Any,
    raw_request: Any,
) -> AsyncGenerator[str, None]:
    """AROUND hook on `_generate_completion_stream` and `_generate_chat_stream`."""
    heard = _ask(adapted_request)
    events = original(self, adapted_request, request, raw_request)
    return events if heard is None else _with_sets(events, heard)


def listen(
    original: Callable[..., AsyncGenerator[Any, None]], self: Any, obj: Any, request: Any = None
) -> AsyncGenerator[Any, None]:
    """AROUND hook on `TokenizerManager.generate_request`."""
    answers = original(self, obj, request)
    heard = getattr(obj, _HEARD, None)
    return answers if heard is None else _listen(answers, heard)


def _ask(adapted_request: Any) -> _Heard | None:
    """Put a call's fields on SGLang's request; None where the call asks for no sets."""
    call = current_call.get()
    if call is None or call.fields is None:
        return None
    for name, value in call.fields.items():
        setattr(adapted_request, name, value)
    call.fields = None
    # Whether OpenAI's own log-probs are in the answer is said by the request's `logprobs` alone.
    adapted_request.return_logprob = True
    setattr(adapted_request, AT_END, True)
    heard = _Heard(adapted_request)
    setattr(adapted_request, _HEARD, heard)
    return heard


async def _listen(answers: AsyncGenerator[Any, None], heard: _Heard) -> AsyncGenerator[Any, None]:
    from fastapi import HTTPException

    async with aclosing(answers):
        is_first = True
        try:
            async for answer in answers:
                is_first = False
                for index, sample in enumerate(answer) if isinstance(answer, list) else [(0, answer)]:
                    heard.hear(sample.get("index", index), sample)
                yield answer
        except ValueError as error:
            # SGLang's OpenAI routes make a 400 of any ValueError.
            heard.status = int(getattr(error, "status_code", 0))
            if is_first and heard.status:
                raise HTTPException(heard.status, str(error)) from error
            raise


async def _with_sets(events: AsyncGenerator[str, None], heard: _Heard) -> AsyncGenerator[str, None]:
    """The events of a stream, and one with the sets before the last; an error event instead, unless one went
    out already."""
    template: dict[str, Any] = {}
    is_answered = False
    async with aclosing(events):
        async for event in events:
            if event.startswith('data: {"error"'):
                is_answered = True
                event = _with_status(event, heard.status)
            elif event.startswith("data: [DONE]"):
                if not is_answered:
                    yield _last_event(template, heard)
                is_answered = True
            elif not template:
                template = json.loads(event.removeprefix("data: "))
            yield event
    if not is_answered:
        yield _last_event(template, heard)


def _with_status(error_event: str, status: int) -> str:
    if not status:
        return error_event
    content = json.loads(error_event.removeprefix("data: "))
    content["error"]["code"] = status
    return f"data: {json.dumps(content)}\n\n"


def _last_event(template: Mapping[str, Any], heard: _Heard) -> str:
    import orjson

    try:
        content = {**template, "choices": [], "usage": None, "sglext": heard.sglext()}
    except RuntimeError as problem:
        status = heard.status or 500
        kind = responses.get(status, "InternalServerError").replace(" ", "")
        error = {"object": "error", "message": str(problem), "type": kind, "code": status}
        content = {"error": {**error, "param": None}}
    return f"data: {orjson.dumps(content).decode()}\n\n"
