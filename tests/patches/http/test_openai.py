"""An OpenAI call that lacks a set ends with an error."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncGenerator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import HTTPException

from sglang_topp_patches.http import openai, route_policy
from sglang_topp_patches.set_buffer import SETS

STOP = {"type": "stop"}
FIRST = 'data: {"id": "a", "created": 7, "object": "text_completion", "choices": [{"index": 0}]}\n\n'
DONE = "data: [DONE]\n\n"


@pytest.fixture
def call() -> Iterator[route_policy.Call]:
    call = route_policy.Call(fields={"top_logprobs_p": 0.9})
    token = route_policy.current_call.set(call)
    yield call
    route_policy.current_call.reset(token)
    call.close()


def request(n: int) -> Any:
    return SimpleNamespace(is_single=n == 1, batch_size=1, parallel_sample_num=n, return_logprob=False)


def sample(sets: Any = None, index: int = 0, **meta_info: Any) -> dict[str, Any]:
    found = {} if sets is None else {SETS: sets}
    return {"index": index, "meta_info": {"finish_reason": STOP, **found, **meta_info}}


class Answer:
    """Behave like pydantic's models."""

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        return {"choices": [], "sglext": {"routed_experts": "kept"}}


async def engine(outputs: list[Any], obj: Any) -> None:
    """Record the calls of SGLang's `generate_request`."""

    async def answers(self: Any, obj: Any, request: Any) -> AsyncGenerator[Any, None]:
        for output in copy.deepcopy(outputs):
            if isinstance(output, Exception):
                raise output
            yield output

    async for _ in openai.collect_sets(answers, None, obj):
        pass


async def answer(outputs: list[Any], obj: Any) -> Any:
    async def original(self: Any, adapted: Any, request: Any, raw_request: Any) -> Any:
        await engine(outputs, adapted)
        return Answer()

    return await openai.add_to_answer(original, None, obj, None, None)


async def events(outputs: list[Any], sent: list[str], obj: Any) -> list[str]:
    async def original(self: Any, adapted: Any, request: Any, raw_request: Any) -> AsyncGenerator[str, None]:
        await engine(outputs, adapted)
        for event in sent:
            yield event

    return [event async for event in openai.add_to_stream(original, None, obj, None, None)]


async def test_the_sets_reach_the_answer(call: route_policy.Call) -> None:
    obj = request(2)
    body = json.loads((await answer([[sample({"a": 1}), sample({"b": 2}, 1)]], obj)).body)
    assert body["sglext"] == {
        "routed_experts": "kept",
        "candidate_sets": [{"index": 0, "a": 1}, {"index": 1, "b": 2}],
    }
    assert obj.return_logprob is True
    assert call.fields == {"top_logprobs_p": 0.9}  # which SGLang's request takes when it's normalized


INCOMPLETE = pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([sample({})], "1 of 2 choices"),
        ([sample({}), sample(None, 1)], "1 of 2 choices have candidate sets: the engine sent none"),
        ([sample({}), sample({}, 1, finish_reason=None)], "1 of 2 choices"),
        ([sample({}), sample(None, 1, finish_reason={"message": "because"})], "because"),
        ([], "0 of 2 choices"),
    ],
)


@pytest.mark.usefixtures("call")
@INCOMPLETE
async def test_where_one_choice_has_none_there_is_no_answer(samples: list[Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        await answer([samples], request(2))


@pytest.mark.usefixtures("call")
@INCOMPLETE
async def test_where_one_choice_has_none_a_stream_ends_with_an_error(samples: list[Any], words: str) -> None:
    first, last, done = await events(samples, [FIRST, DONE], request(2))
    assert (first, done) == (FIRST, DONE)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["code"] == 500
    assert words in error["message"]


@pytest.mark.usefixtures("call")
async def test_a_choice_that_none_were_asked_for_has_none() -> None:
    unasked = {"meta_info": {"finish_reason": STOP, SETS: None}}
    last, _ = await events([unasked], [DONE], request(1))
    assert json.loads(last.removeprefix("data: "))["sglext"] == {"candidate_sets": [None]}


@pytest.mark.usefixtures("call")
async def test_the_last_event_is_like_the_first() -> None:
    _, last, done = await events([sample({"a": 1})], [FIRST, DONE], request(1))
    content = json.loads(last.removeprefix("data: "))
    assert content == {
        "id": "a",
        "created": 7,
        "object": "text_completion",
        "choices": [],
        "usage": None,
        "sglext": {"candidate_sets": [{"index": 0, "a": 1}]},
    }
    assert done == DONE


@pytest.mark.usefixtures("call")
async def test_a_stream_that_ends_with_an_error_gets_no_second_one() -> None:
    error = 'data: {"error": {"message": "over budget", "code": 413}}\n\n'
    assert await events([sample(finish_reason={"type": "abort"})], [FIRST, error, DONE], request(1)) == [
        FIRST,
        error,
        DONE,
    ]


@pytest.mark.usefixtures("call")
async def test_a_stream_without_its_usual_end_has_the_sets_all_the_same() -> None:
    *_, last = await events([sample({"a": 1})], [FIRST], request(1))
    assert "candidate_sets" in last


class Ended(ValueError):
    status_code = 429


@pytest.mark.usefixtures("call")
async def test_an_error_keeps_its_status() -> None:
    with pytest.raises(HTTPException) as error:
        await answer([Ended("too much in flight")], request(1))
    assert (error.value.status_code, error.value.detail) == (429, "too much in flight")
    with pytest.raises(ValueError, match="wrong"):
        await answer([ValueError("wrong")], request(1))


@pytest.mark.usefixtures("call")
async def test_an_error_in_a_stream_keeps_its_status() -> None:
    async def original(self: Any, adapted: Any, request: Any, raw: Any) -> AsyncGenerator[str, None]:
        yield FIRST
        with pytest.raises(Ended):
            await engine([{"index": 0, "meta_info": {"finish_reason": None}}, Ended("too much")], adapted)
        yield 'data: {"error": {"message": "too much", "code": 400}}\n\n'
        yield DONE

    stream = openai.add_to_stream(original, None, request(1), None, None)
    first, error, done = [event async for event in stream]
    assert (first, done) == (FIRST, DONE)
    assert json.loads(error.removeprefix("data: ")) == {"error": {"message": "too much", "code": 429}}


async def test_who_does_not_ask_is_left_alone() -> None:
    obj = request(1)
    assert isinstance(await answer([[sample()]], obj), Answer)
    obj = request(1)
    assert await events([sample()], [FIRST, DONE], obj) == [FIRST, DONE]
    assert vars(obj) == vars(request(1))
