"""Serve candidate sets on the OpenAI routes, in the HTTP process.

SGLang turns the body of an OpenAI request into a `GenerateReqInput`. The middleware `route_policy.Guard`
finds the plugin's fields in the body, and `request_fields.normalize` attaches what they ask for to the
`GenerateReqInput`. This module's hooks collect the candidate sets from the engine's answers, and add the sets
to the OpenAI answer. The sets are in `sglext`, which is the answer's field for SGLang's extensions::

    "sglext": {"candidate_sets": [{"index": 0, "output_ids": [...], "output_top_p_logprobs_val_base64": ...}]}

The list `candidate_sets` has one entry for each choice of the answer. The entry of a choice holds the
choice's index and the choice's sets. The sets have the same fields as in `meta_info` on `/generate`. A stream
ends with an additional chunk, which has `sglext` and no choices. If the engine sends no sets for a choice,
the client gets an error.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from http.client import responses
from typing import Any

from sglang_topp_patches.hooks import around
from sglang_topp_patches.http.route_policy import current_call
from sglang_topp_patches.set_buffer import SETS

__all__ = ["add_to_answer", "add_to_stream", "collect_sets"]

_COLLECTOR = "sglang_topp_collector"


class _Collector:
    """The candidate sets of one OpenAI call, collected from the engine's answers.

    Attributes:
        entries: the sets of each finished sample, by the sample's index. The entry of a sample that
            did not ask for sets is None.
        problem: why a finished sample has no sets, or an empty string if no sets are missing.
        status: the HTTP status of the error that ended the OpenAI call, or 0.
    """

    def __init__(self, request: Any) -> None:
        self.entries: dict[int, dict[str, Any] | None] = {}
        self.problem = ""
        self.status = 0
        self._request = request

    def add(self, index: int, sample: Mapping[str, Any]) -> None:
        """Collect a sample's sets if the sample has finished."""
        meta_info = sample["meta_info"]
        if (reason := meta_info.get("finish_reason")) is None:
            return
        if SETS in meta_info:
            self.entries[index] = meta_info.pop(SETS)
        else:
            self.problem = self.problem or reason.get("message") or "the engine sent none"
            self.status = self.status or int(reason.get("status_code") or 0)

    def sglext(self) -> dict[str, Any]:
        """Return the entry that the plugin adds to `sglext` in the answer.

        Raises:
            RuntimeError: a choice of the answer has no candidate sets.
        """
        request = self._request
        expected = 1 if request.is_single else request.batch_size * request.parallel_sample_num
        if self.problem or self.entries.keys() != set(range(expected)):
            found = f"{len(self.entries)} of {expected} choices have candidate sets"
            raise RuntimeError(f"{found}: {self.problem or 'the engine sent no more'}")
        entries = [self.entries[index] for index in range(expected)]
        return {"candidate_sets": [entry and {"index": i, **entry} for i, entry in enumerate(entries)]}


@around(
    "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._handle_non_streaming_request"
)
@around("sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._handle_non_streaming_request")
async def add_to_answer(
    original: Callable[..., Awaitable[Any]], self: Any, adapted_request: Any, request: Any, raw_request: Any
) -> Any:
    """Add the sets to the answer."""
    collector = _ask(adapted_request)
    answer = await original(self, adapted_request, request, raw_request)
    if collector is None or not hasattr(answer, "model_dump"):
        return answer  # the OpenAI call asks for no sets, or SGLang's answer is an error
    import orjson
    from starlette.responses import Response

    content = answer.model_dump(mode="json", by_alias=True)
    content["sglext"] = {**(content.get("sglext") or {}), **collector.sglext()}
    return Response(orjson.dumps(content), media_type="application/json")


@around(
    "sglang.srt.entrypoints.openai.serving_completions.OpenAIServingCompletion._generate_completion_stream"
)
@around("sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._generate_chat_stream")
def add_to_stream(
    original: Callable[..., AsyncGenerator[str, None]],
    self: Any,
    adapted_request: Any,
    request: Any,
    raw_request: Any,
) -> AsyncGenerator[str, None]:
    """Add a chunk with the sets."""
    collector = _ask(adapted_request)
    events = original(self, adapted_request, request, raw_request)
    return events if collector is None else _with_sets(events, collector)


@around("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request")
def collect_sets(
    original: Callable[..., AsyncGenerator[Any, None]], self: Any, obj: Any, request: Any = None
) -> AsyncGenerator[Any, None]:
    """Collect an OpenAI call's candidate sets."""
    answers = original(self, obj, request)
    collector = getattr(obj, _COLLECTOR, None)
    return answers if collector is None else _collect(answers, collector)


def _ask(adapted_request: Any) -> _Collector | None:
    """Return a new `_Collector` for the sets of an OpenAI call, or None if the call asks for no sets."""
    call = current_call.get()
    if call is None or call.fields is None:
        return None
    # The scheduler extracts sets only for requests with `return_logprob`, so set `return_logprob`. The OpenAI
    # answer still contains log-probs only if the caller sets `logprobs`.
    adapted_request.return_logprob = True
    collector = _Collector(adapted_request)
    setattr(adapted_request, _COLLECTOR, collector)
    return collector


async def _collect(answers: AsyncGenerator[Any, None], collector: _Collector) -> AsyncGenerator[Any, None]:
    from fastapi import HTTPException

    async with aclosing(answers):
        is_first = True
        try:
            async for answer in answers:
                is_first = False
                for index, sample in enumerate(answer) if isinstance(answer, list) else [(0, answer)]:
                    collector.add(sample.get("index", index), sample)
                yield answer
        except ValueError as error:
            # SGLang's OpenAI routes turn any ValueError into a 400.
            collector.status = int(getattr(error, "status_code", 0))
            if is_first and collector.status:
                raise HTTPException(collector.status, str(error)) from error
            raise


async def _with_sets(events: AsyncGenerator[str, None], collector: _Collector) -> AsyncGenerator[str, None]:
    """Yield a stream's events, and insert an event with the sets before the last event (`[DONE]`).

    If a choice of the answer has no sets, the inserted event is an error event. If SGLang has already sent an
    error event in the stream, insert nothing.
    """
    template: dict[str, Any] = {}
    is_answered = False
    async with aclosing(events):
        async for event in events:
            if event.startswith('data: {"error"'):
                is_answered = True
                event = _with_status(event, collector.status)
            elif event.startswith("data: [DONE]"):
                if not is_answered:
                    yield _last_event(template, collector)
                is_answered = True
            elif not template:
                template = json.loads(event.removeprefix("data: "))
            yield event
    if not is_answered:
        yield _last_event(template, collector)


def _with_status(error_event: str, status: int) -> str:
    if not status:
        return error_event
    content = json.loads(error_event.removeprefix("data: "))
    content["error"]["code"] = status
    return f"data: {json.dumps(content)}\n\n"


def _last_event(template: Mapping[str, Any], collector: _Collector) -> str:
    import orjson

    try:
        content = {**template, "choices": [], "usage": None, "sglext": collector.sglext()}
    except RuntimeError as problem:
        status = collector.status or 500
        kind = responses.get(status, "InternalServerError").replace(" ", "")
        error = {"object": "error", "message": str(problem), "type": kind, "code": status}
        content = {"error": {**error, "param": None}}
    return f"data: {orjson.dumps(content).decode()}\n\n"
