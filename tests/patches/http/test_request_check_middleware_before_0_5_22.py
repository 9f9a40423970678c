"""SGLang before 0.5.22: a 400 before a stream begins, and the plugin's status."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from sglang_topp_patches.http import request_check_middleware_before_0_5_22
from sglang_topp_patches.http.request_check_middleware_before_0_5_22 import OlderReleaseMiddleware
from sglang_topp_patches.set_buffer import KEY
from tests.patches.make_http_process import http_process

# The body names a field of ours without requesting sets, because the plugin does not hold in this process.
NAMED = {"text": "x", "top_logprobs_p": 0}


# The error in a stream, as 0.5.12 and as later releases write it.
EVENTS = (
    b'data: {"text":"a","meta_info":{"error":1}}\n\n',
    b'data: {"error":{"message":"too long: \xc3\xa9"}}\n\n',
    b'data: {"error":{"message":"busy","code":503}}\n\n',
    b'data: {"error":"in words alone"}\n\n',
    b"data: [DONE]\n\n",
)


class Tokenizer:
    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in text]


async def _events() -> AsyncIterator[bytes]:
    for event in EVENTS:
        yield event


async def _generate(request: Request) -> Response:
    body = await request.body()
    if request.method == "PUT" and b'"stream"' in body:
        return StreamingResponse(_events(), media_type="text/event-stream")
    return Response(body)


async def _echo(request: Request) -> Response:
    return Response(await request.body())


async def _server_info(request: Request) -> Response:
    if "wrong" in request.query_params:
        return JSONResponse({"error": "starting"}, 503, {"x-mine": "kept"})
    return JSONResponse({"version": "0.5.15.post1", "internal_states": []})


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TestClient:
    manager = SimpleNamespace(
        server_args=SimpleNamespace(),
        model_config=SimpleNamespace(vocab_size=512),
        tokenizer=Tokenizer(),
        preferred_sampling_params={"min_new_tokens": 5},
    )
    state = SimpleNamespace(tokenizer_manager=manager)
    server = SimpleNamespace(_global_state=state, app=SimpleNamespace(user_middleware=[]))
    monkeypatch.setitem(sys.modules, request_check_middleware_before_0_5_22.HTTP_SERVER, server)
    routes = [
        Route("/generate", _generate, methods=["POST", "PUT"]),
        Route("/encode", _echo, methods=["POST"]),
        Route("/server_info", _server_info),
        Route("/get_server_info", _server_info),
    ]
    return TestClient(
        Starlette(routes=routes, middleware=[Middleware(OlderReleaseMiddleware, http_process())])
    )


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"text": "x", "top_logprobs_p": 2, "return_logprob": True}, "top_logprobs_p: got 2"),
        (
            {"text": "x", "stream": True, "return_logprobs_in_base64": "yes"},
            "return_logprobs_in_base64: got 'yes'",
        ),
        (
            {"text": ["x", "y"], "top_logprobs_p": [0.5], "return_logprob": True},
            "top_logprobs_p: got 1 values",
        ),
        (
            {"text": "x", "sampling_params": {"custom_params": {"top_logprobs_p": "no"}}},
            "sampling_params.custom_params.top_logprobs_p: got 'no'",
        ),
        ({**NAMED, "sampling_params": {"temperature": -1}}, "sampling_params: temperature must be"),
        ({**NAMED, "stream": True, "sampling_params": {"no_such": 1}}, "sampling_params: "),
        ({**NAMED, "text": ["x", "y"], "sampling_params": [{}, {"top_p": 7}]}, "sampling_params: top_p must"),
        ({**NAMED, "sampling_params": {"logit_bias": {"512": 1.0}}}, "sampling_params: logit_bias must"),
        ({**NAMED, "sampling_params": {"stop": 5}}, "sampling_params: "),
        ({**NAMED, "sampling_params": {"stop": ["a", 5]}}, "sampling_params: 'int' object is not iterable"),
        ({**NAMED, "sampling_params": {"stop_regex": "("}}, "sampling_params: missing ), unterminated"),
        ({**NAMED, "sampling_params": {"max_new_tokens": 4}}, "sampling_params: min_new_tokens must"),
    ],
)
def test_bad_input_is_answered_before_the_route(
    client: TestClient, method: str, body: dict[str, Any], problem: str
) -> None:
    escaped = json.dumps(body).replace("top_logprobs_p", "top\\u005flogprobs_p")
    for text in (json.dumps(body), escaped):
        answer = client.request(method, "/generate", content=text)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(problem)


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": "hello"}',
        b'{"text": "\\u00e9"}',
        b"not JSON, with top_logprobs_p",
        b"",
        b"[" * 100_000 + b"top_logprobs_p",
        b'["top_logprobs_p"]',
        b'{"text": "' + b"x" * 3_000_000 + b'"}',
        b'{"text": "x", "sampling_params": {"temperature": -1}}',
        b'{"text": "x", "top_logprobs_p": 0, "sampling_params": {"top_p": 0.5}}',
        b'{"text": "x", "top_logprobs_p": 0, "sampling_params": null}',
    ],
    ids=["plain", "escape", "no JSON", "empty", "deep", "list", "large", "unasked", "parameters", "none"],
)
def test_all_else_reaches_the_route_as_it_came(client: TestClient, body: bytes) -> None:
    assert client.post("/generate", content=body).content == body


@pytest.mark.parametrize("named", [True, False])
def test_an_error_in_a_stream_says_that_it_is_the_requests(client: TestClient, named: bool) -> None:
    body = {**(NAMED if named else {}), "text": "x", "stream": True}
    came = client.put("/generate", json=body).content.split(b"\n\n")
    sent = b"".join(EVENTS).split(b"\n\n")
    if named:
        assert json.loads(came[1].removeprefix(b"data: ")) == {
            "error": {"message": "too long: é", "code": 400}
        }
        assert json.loads(came[2].removeprefix(b"data: ")) == {"error": {"message": "busy", "code": 503}}
        del came[1:3], sent[1:3]
    assert came == sent


def test_other_routes_are_left_alone(client: TestClient) -> None:
    body = b'{"text": "x", "top_logprobs_p": 2}'
    assert client.post("/encode", content=body).content == body


@pytest.mark.filterwarnings("ignore")  # SGLang warns if it is imported without an accelerator
@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_word_of_the_patch_set(client: TestClient, path: str) -> None:
    info = client.get(path).json()
    assert info["version"] == "0.5.15.post1"
    assert info[KEY]["active"] is False  # no hook is in place here
    assert info[KEY]["problems"]


def test_an_error_of_server_info_stays_what_it_is(client: TestClient) -> None:
    answer = client.get("/server_info?wrong=1")
    assert answer.status_code == 503
    assert answer.json() == {"error": "starting"}
    assert answer.headers["x-mine"] == "kept"
