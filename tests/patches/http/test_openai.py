"""An OpenAI call that lacks a set ends with an error."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp_patches.http.openai import adding_sets
from sglang_topp_patches.http.process_state import Call

FIRST = b'data: {"id": "a", "created": 7, "object": "text_completion", "choices": [{"index": 0}]}\n\n'
DONE = b"data: [DONE]\n\n"
ANSWER = {"choices": [], "sglext": {"routed_experts": "kept"}}


def sample(record: Any = None, *, is_written: bool = True, cause: str = "", status: int = 0) -> Any:
    return SimpleNamespace(
        record=record, is_written=is_written, cause=cause, status=status, has_failed=bool(status)
    )


def unwritten(**attributes: Any) -> Any:
    return sample(is_written=False, **attributes)


async def sent(samples: list[Any], num_choices: int, kind: str, status: int, *parts: bytes) -> list[Any]:
    """Return the messages that are sent for an answer of SGLang."""
    call, messages = Call("/v1/completions", is_openai=True), []
    call.samples, call.num_choices = samples, num_choices

    async def send(message: Any) -> None:
        messages.append(message)

    add = adding_sets(send, call)
    headers = [(b"content-type", kind.encode()), (b"x-mine", b"kept")]
    await add({"type": "http.response.start", "status": status, "headers": headers})
    for i, part in enumerate(parts):
        is_last = kind == "application/json" and i == len(parts) - 1
        await add({"type": "http.response.body", "body": part, "more_body": not is_last})
    if kind != "application/json":
        await add({"type": "http.response.body", "body": b"", "more_body": False})
    assert not messages[-1].get("more_body", False)
    return messages


async def answer(samples: list[Any], num_choices: int, content: Any = ANSWER, status: int = 200) -> Any:
    """Return the status and the content of an answer in two parts."""
    text = json.dumps(content).encode()
    start, *body = await sent(samples, num_choices, "application/json", status, text[:5], text[5:])
    whole = b"".join(message["body"] for message in body)
    lengths = [int(value) for name, value in start["headers"] if name == b"content-length"]
    assert status >= 400 or lengths == [len(whole)]
    return start["status"], json.loads(whole)


async def events(samples: list[Any], num_choices: int, *given: bytes) -> list[bytes]:
    kind = "text/event-stream; charset=utf-8"
    _, *body = await sent(samples, num_choices, kind, 200, *given)
    return [message["body"] for message in body if message["body"]]


async def test_the_sets_reach_the_answer() -> None:
    warm_up = sample({"c": 3})
    status, content = await answer([warm_up, sample({"a": 1}), sample({"b": 2})], 2)
    assert (status, content["sglext"]) == (
        200,
        {"routed_experts": "kept", "candidate_sets": [{"index": 0, "a": 1}, {"index": 1, "b": 2}]},
    )


INCOMPLETE = pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([sample({})], "1 of 2 choices"),
        (
            [sample({}), unwritten(cause="the engine sent none")],
            "1 of 2 choices have candidate sets: the engine",
        ),
        ([sample({}), unwritten()], "1 of 2 choices"),
        ([sample({}), unwritten(cause="because")], "because"),
        ([], "0 of 2 choices"),
    ],
)


@INCOMPLETE
async def test_where_one_choice_has_none_there_is_no_answer(samples: list[Any], words: str) -> None:
    status, content = await answer(samples, 2)
    assert (status, content["object"], content["code"]) == (500, "error", 500)
    assert words in content["message"]


@INCOMPLETE
async def test_where_one_choice_has_none_a_stream_ends_with_an_error(samples: list[Any], words: str) -> None:
    first, last, done = await events(samples, 2, FIRST, DONE)
    assert (first, done) == (FIRST, DONE)
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == 500
    assert words in error["message"]


async def test_an_error_of_sglang_stays_what_it_is() -> None:
    assert await answer([], 0, {"message": "wrong"}, status=400) == (400, {"message": "wrong"})


async def test_a_choice_that_none_were_asked_for_has_none() -> None:
    last, _ = await events([sample()], 1, DONE)
    assert json.loads(last.removeprefix(b"data: "))["sglext"] == {"candidate_sets": [None]}


async def test_the_last_event_is_like_the_first() -> None:
    _, last, done = await events([sample({"a": 1})], 1, FIRST, DONE)
    assert json.loads(last.removeprefix(b"data: ")) == {
        "id": "a",
        "created": 7,
        "object": "text_completion",
        "choices": [],
        "usage": None,
        "sglext": {"candidate_sets": [{"index": 0, "a": 1}]},
    }
    assert done == DONE


async def test_a_stream_that_ends_with_an_error_gets_no_second_one_and_keeps_the_status() -> None:
    error = {"error": {"message": "over budget", "code": 400}}
    event = b"data: " + json.dumps(error).encode() + b"\n\n"
    first, last, done = await events([unwritten(status=413)], 1, FIRST, event, DONE)
    assert (first, done) == (FIRST, DONE)
    assert json.loads(last.removeprefix(b"data: ")) == {"error": {"message": "over budget", "code": 413}}
    assert await events([unwritten()], 1, FIRST, event, DONE) == [FIRST, event, DONE]


async def test_a_stream_without_its_usual_end_has_the_sets_all_the_same() -> None:
    *_, last = await events([sample({"a": 1})], 1, FIRST)
    assert b"candidate_sets" in last
