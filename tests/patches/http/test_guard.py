"""Every route of SGLang is known, and none ignores a request for sets."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from sglang.srt.sampling.sampling_params import SamplingParams
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.capabilities import Capabilities
from sglang_topp_patches.http import guard
from sglang_topp_patches.http.guard import Guard
from sglang_topp_patches.http.process_state import HTTP_SERVER, HttpProcess, current_call, note_server_args
from sglang_topp_patches.memory import InFlight
from sglang_topp_patches.set_buffer import KEY
from tests.patches.make_http_process import http_process

ASKED = {"top_logprobs_p": 0.9}


# A separate process, because SGLang's server imports half of SGLang, with warnings.
LIST_ROUTES = """
import json
from sglang.srt.entrypoints.http_server import app

paths = {path for route in app.routes if (path := getattr(route, "path", None))}
described = {path.replace("{model}", "{model:path}") for path in app.openapi()["paths"]}
print(json.dumps(sorted(paths | described)))
"""


async def test_every_route_of_sglang_that_is_not_served_refuses(client: httpx.AsyncClient) -> None:
    listing = subprocess.run([sys.executable, "-c", LIST_ROUTES], capture_output=True, text=True, check=True)
    paths = set(json.loads(listing.stdout.splitlines()[-1]))
    assert paths > {*guard.SERVED, *guard._OF_WEIGHTS}
    for path in paths - {*guard.SERVED, *guard._OF_WEIGHTS, *guard._SERVER_INFO}:
        assert (await client.post(path, json=ASKED)).status_code == 400, path
    for path in guard._OF_WEIGHTS:
        assert (await client.post(path, json=ASKED)).status_code == 200, path


@pytest.fixture
def client() -> httpx.AsyncClient:
    async def echo(request: Request) -> JSONResponse:
        if (call := current_call.get()) is not None:
            call.fields = None  # as SGLang's request takes them
        return JSONResponse({"bytes": len(await request.body())})

    app = Starlette(routes=[Route("/{path:path}", echo, methods=["POST", "PUT"])])
    app.user_middleware.append(Middleware(Guard, http_process()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/score", "/encode", "/of/another/release"])
@pytest.mark.parametrize("method", ["POST", "PUT"])
async def test_what_cannot_answer_with_sets_refuses(
    client: httpx.AsyncClient, path: str, method: str
) -> None:
    for body in (
        ASKED,
        {"return_logprobs_in_base64": True},
        {"custom_params": ASKED},
        {"sampling_params": {"custom_params": ASKED}},
        {"options": ASKED},
        {"extra_body": ASKED},
    ):
        answer = await client.request(method, path, json={"prompt": "x", **body})
        assert answer.status_code == 400, body
        assert "send the request to /generate" in answer.text
    for count in (0, 3, [1, None]):
        answer = await client.request(method, path, json={"prompt": "x", "resumed_tokens": count})
        assert answer.status_code == 400
        assert f"resumed_tokens: {path} cannot resume an answer" in answer.text
    nothing = ({"top_logprobs_p": None}, {"top_logprobs_p": 0}, {"resumed_tokens": None})
    for body in ({"prompt": "top_logprobs_p"}, *nothing, []):
        sent = json.dumps(body).encode()
        answer = await client.request(
            method, path, content=sent, headers={"content-type": "application/json"}
        )
        assert answer.json() == {"bytes": len(sent)}


async def test_each_family_of_routes_gets_its_own_shape(client: httpx.AsyncClient) -> None:
    async def refusal(path: str) -> Any:
        return (await client.post(path, json=ASKED)).json()

    assert (await refusal("/v1/messages"))["error"]["type"] == "invalid_request_error"
    assert (await refusal("/v1/responses"))["code"] == 400
    assert isinstance((await refusal("/api/chat"))["error"], str)


async def test_a_form_that_asks_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/audio/transcriptions", data=ASKED, files={"file": b"RIFF"})
    assert answer.status_code == 400


async def test_vertex_takes_the_fields_among_its_parameters_alone(client: httpx.AsyncClient) -> None:
    instances = [{"text": "x"}]
    resumed = {"resumed_tokens": 1}
    for good in (ASKED, {"sampling_params": {"custom_params": ASKED}}, resumed):
        answer = await client.post("/vertex_generate", json={"instances": instances, "parameters": good})
        assert answer.status_code == 200
    for bad in (
        {"instances": [{"text": "x", **ASKED}]},
        {"instances": instances, **ASKED},
        {"instances": instances, "parameters": {"sampling_params": ASKED}},
        {"instances": instances, **resumed},
        {"instances": instances, "parameters": {"sampling_params": {"custom_params": resumed}}},
    ):
        answer = await client.post("/vertex_generate", json=bad)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        rb'{"prompt": "x", "top_logprobs\u005fp": 0.9}',
        rb'{"prompt": "x", "custom_params": {"top\u005flogprobs_p": 0.9}}',
        b'{"prompt": "x", "top_logprobs_p": 0.9, "junk": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    ],
    ids=["escaped", "escaped in custom_params", "deep"],
)
@pytest.mark.parametrize("path", ["/v1/responses", "/api/generate", "/vertex_generate"])
async def test_however_it_is_written(client: httpx.AsyncClient, path: str, body: bytes) -> None:
    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    kept = await client.post(path, content=rb'{"prompt": "\u4f60\u597d"}')
    assert kept.status_code == 200


@pytest.mark.filterwarnings("ignore")  # SGLang warns if it is imported without an accelerator
@pytest.mark.parametrize("path", sorted(guard.OPENAI))
async def test_openais_routes_refuse_where_the_patch_set_does_not_hold(
    client: httpx.AsyncClient, path: str
) -> None:
    assert Capabilities.of(None).problems  # no hook is in place in this process
    answer = await client.post(path, json={"prompt": "x", **ASKED})
    assert answer.status_code == 400
    assert answer.json()["param"] == "top_logprobs_p"
    assert "not served here" in answer.json()["message"]
    assert (await client.post(path, json={"prompt": "top_logprobs_p"})).status_code == 200


async def _openai(body: Any, *, taken: bool) -> tuple[list[Any], list[Any]]:
    """Return what the handler of `/v1/completions` finds, and the statuses that were sent."""
    found: list[Any] = []
    statuses: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = current_call.get()
        assert call is not None
        found.append((call.fields, call.is_served, (await receive())["body"]))
        if taken:
            call.fields = None
            call.samples.append(SimpleNamespace(is_written=True, record=None))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
    await Guard(app, http_process())(scope, receive, send)
    return found, [status for status in statuses if status]


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpProcess, "capabilities", Capabilities((), "", "", "", ""))


@pytest.mark.usefixtures("holds")
@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b'{"top_logprobs_p": 0.9, "prompt": "x"}', ASKED),
        (rb'{"top_logprobs\u005fp": 0.9}', ASKED),
        (b'{"custom_params": {"top_logprobs_p": 0.9}}', {}),
        # An invalid value still requests sets. Its field is checked later.
        (b'{"top_logprobs_source": ""}', None),
        (b'{"top_logprobs_p": []}', None),
        (b'{"top_logprobs_p": {}}', None),
        (b'{"top_logprobs_p": [0.9, null], "return_logprobs_in_base64": false}', None),
    ],
)
async def test_openais_routes_are_handed_the_fields(body: bytes, fields: Any) -> None:
    found, statuses = await _openai(body, taken=True)
    expected = json.loads(body) if fields is None else fields
    assert found == [(expected, True, body)]
    assert statuses == [200]


@pytest.mark.usefixtures("holds")
async def test_an_answer_without_the_sets_is_never_a_200() -> None:
    assert (await _openai(json.dumps(ASKED).encode(), taken=False))[1] == [500]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})

    async def receive() -> Any:
        return {"type": "http.request", "body": b'{"resumed_tokens": 0, "text": "a"}'}

    async def send(message: Any) -> None: ...

    with pytest.raises(RuntimeError, match="made without them"):
        await Guard(app, http_process())(
            {"type": "http", "method": "POST", "path": "/generate"}, receive, send
        )


@pytest.mark.usefixtures("holds")
@pytest.mark.parametrize(
    "body",
    [
        {"return_logprobs_in_base64": True},
        {"custom_params": {"return_logprobs_in_base64": True}},
        {"sampling_params": ASKED},
        {"extra_body": ASKED},
        {**ASKED, "options": ASKED},
    ],
)
async def test_openais_routes_refuse_what_they_do_not_look_at(body: Any) -> None:
    found, statuses = await _openai(json.dumps(body).encode(), taken=True)
    assert (found, statuses) == ([], [400])


@pytest.mark.usefixtures("holds")
async def test_a_chat_that_sglang_would_render_as_the_users_is_refused() -> None:
    user, assistant = ({"role": role, "content": "a"} for role in ("user", "assistant"))
    for messages, fields, status in (
        ([user], {}, 200),
        ([user, assistant, user], {}, 200),
        ([user, assistant], {"continue_final_message": True}, 200),
        ([user, assistant], {}, 400),
        ([assistant], {"continue_final_message": False}, 400),
    ):
        body = {"messages": messages, **fields, **ASKED}
        assert (await _openai(json.dumps(body).encode(), taken=True))[1] == [status]


@pytest.mark.usefixtures("holds")
async def test_openais_routes_know_that_nobody_asked() -> None:
    for body in (b'{"prompt": "x"}', b'{"top_logprobs_p": 0, "return_logprobs_in_base64": false}'):
        found, statuses = await _openai(body, taken=False)
        assert found == [(None, False, body)]
        assert statuses == [200]


async def test_what_generate_does_not_look_at_is_named(client: httpx.AsyncClient) -> None:
    for place in ("custom_params", "extra_body", "options"):
        answer = await client.post("/generate", json={"text": "a", place: ASKED})
        assert answer.status_code == 400
        sentence = f"{place}.top_logprobs_p: /generate ignores the field there; expected it at"
        assert answer.json()["error"].startswith(sentence)
    inside = {"sampling_params": {"custom_params": {"resumed_tokens": 1}}}
    answer = await client.post("/generate", json={"input_ids": [1], **inside})
    sentence = "resumed_tokens: /generate ignores the field there; expected it at the top level"
    assert answer.json()["error"].endswith(sentence)
    text = '{"custom_params": ' * 2000 + json.dumps(ASKED) + "}" * 2000
    answer = await client.post("/generate", content=text)
    assert answer.json() == {"error": "a body nested too deep to be read"}


def test_an_application_that_serves_before_the_plugin_is_loaded_is_guarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def echo(request: Request) -> JSONResponse:
        return JSONResponse({})

    echo.__module__ = HTTP_SERVER
    app, process = Starlette(routes=[Route("/v1/score", echo, methods=["POST"])]), http_process()
    client = TestClient(app)
    assert client.post("/v1/score", json=ASKED).status_code == 200
    build = app.build_middleware_stack
    monkeypatch.setattr(app, "build_middleware_stack", lambda: guard.guard(process, lambda _: build(), app))
    monkeypatch.setitem(sys.modules, HTTP_SERVER, SimpleNamespace(app=app))
    note_server_args(process, None, None, SimpleNamespace())
    assert client.post("/v1/score", json=ASKED).status_code == 400


async def test_code_behind_a_refused_route_knows() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = current_call.get()
        seen.append(call and call.is_served)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Any) -> None: ...

    for path in ("/v1/completions", "/generate", "/update_weights_from_tensor"):
        await Guard(app, http_process())({"type": "http", "method": "POST", "path": path}, receive, send)
    assert seen == [False, True, None]


def test_grpc_refuses() -> None:
    for asking in (ASKED, {"sampling_params": {"custom_params": ASKED}}):
        with pytest.raises(InvalidInputError, match="gRPC cannot return candidate sets"):
            guard.refuse_grpc(None, req_type="generate", req_dict={"text": "x", **asking})
        with pytest.raises(InvalidInputError, match="gRPC cannot return candidate sets"):
            guard.refuse_grpc_openai(None, "chat", False, json.dumps(asking).encode(), None)
    with pytest.raises(InvalidInputError, match="gRPC cannot resume an answer"):
        guard.refuse_grpc(None, req_type="generate", req_dict={"input_ids": [1], "resumed_tokens": 1})
    guard.refuse_grpc(None, req_type="generate", req_dict={"text": "top_logprobs_p"})
    guard.refuse_grpc_openai(None, "chat", False, b'{"prompt": "top_logprobs_p"}', None)


async def _serve(app: Callable[..., Awaitable[None]], send: Callable[[Any], Awaitable[None]]) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    await Guard(app, http_process())({"type": "http", "method": "POST", "path": "/generate"}, receive, send)


async def test_a_large_answer_goes_out_in_pieces_and_is_held_until_then() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = current_call.get()
        assert call is not None
        call.count_in(limits)
        call.add(7)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * (3 << 20), "more_body": False})

    async def send(message: Any) -> None:
        sent.append((len(message.get("body", b"")), message.get("more_body"), limits.total))

    limits = InFlight(100)
    await _serve(app, send)
    assert sent[1:] == [
        (1 << 20, True, 7),
        (1 << 20, True, 7),
        (1 << 20, True, 7),
        (0, False, 7),
    ]
    assert limits.total == 0


def test_a_stalled_reader_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run it with SGLang's own server and event loop."""
    monkeypatch.setattr(guard, "_READER_TIMEOUT_MS", 300)

    async def answer(request: Request) -> Response:
        call = current_call.get()
        assert call is not None
        call.count_in(InFlight(100))
        call.add(7)
        return Response(b"x" * (64 << 20))

    answer.__module__ = HTTP_SERVER
    app = Starlette(routes=[Route("/generate", answer, methods=["POST"])])
    build = app.build_middleware_stack
    monkeypatch.setattr(app, "build_middleware_stack", lambda: guard.guard(process, lambda _: build(), app))
    process = http_process()
    server = uvicorn.Server(uvicorn.Config(app, port=0, loop="uvloop", log_level=logging.CRITICAL + 1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started)
        address = server.servers[0].sockets[0].getsockname()
        with socket.create_connection(address) as reader:
            reader.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
            wait_for(lambda: server.server_state.connections)
            wait_for(lambda: not server.server_state.connections)
    finally:
        server.should_exit = True
        thread.join(20)
    assert not thread.is_alive()
    assert process.is_guarded


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("path", sorted(guard.OPENAI))
async def test_openais_routes_do_not_pass_a_resumed_answer_over(client: httpx.AsyncClient, path: str) -> None:
    for place in ("", "custom_params", "extra_body"):
        body = {"resumed_tokens": 0}
        answer = await client.post(path, json={"prompt": "x", **({place: body} if place else body)})
        assert answer.status_code == 400
        assert answer.json()["param"].endswith("resumed_tokens")


# -- bodies of `/generate`, and `GET /server_info` -------------------------------------------------------

# The body names a field of ours without requesting sets, because the plugin does not hold in this process.
NAMED = {"text": "x", "top_logprobs_p": 0, "return_logprobs_in_base64": True}


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
    if (call := current_call.get()) is not None:
        call.requests = None  # as SGLang's request takes them
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
def served() -> TestClient:
    manager = SimpleNamespace(
        server_args=SimpleNamespace(),
        model_config=SimpleNamespace(vocab_size=512),
        tokenizer=Tokenizer(),
        preferred_sampling_params={"min_new_tokens": 5},
        sampling_params_class=SamplingParams,
        is_pause=False,
    )
    routes = [
        Route("/generate", _generate, methods=["POST", "PUT"]),
        Route("/encode", _echo, methods=["POST"]),
        Route("/server_info", _server_info),
        Route("/get_server_info", _server_info),
    ]
    process = http_process()
    process.manager = manager
    return TestClient(Starlette(routes=routes, middleware=[Middleware(Guard, process)]))


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
    served: TestClient, method: str, body: dict[str, Any], problem: str
) -> None:
    escaped = json.dumps(body).replace("top_logprobs_p", "top\\u005flogprobs_p")
    for text in (json.dumps(body), escaped):
        answer = served.request(method, "/generate", content=text)
        assert answer.status_code == 400
        assert answer.json()["error"].startswith(problem)


@pytest.mark.parametrize(
    "body",
    [
        b'{"text": "hello"}',
        b'{"text": "\\u00e9"}',
        b"not JSON, with top_logprobs_p",
        b"",
        b'["top_logprobs_p"]',
        b'{"text": "' + b"x" * 3_000_000 + b'"}',
        b'{"text": "x", "sampling_params": {"temperature": -1}}',
        b'{"text": "x", "top_logprobs_p": 0, "sampling_params": {"top_p": 0.5}}',
        b'{"text": "x", "top_logprobs_p": 0, "sampling_params": null}',
    ],
    ids=["plain", "escape", "no JSON", "empty", "list", "large", "unasked", "parameters", "none"],
)
def test_all_else_reaches_the_route_as_it_came(served: TestClient, body: bytes) -> None:
    assert served.post("/generate", content=body).content == body


@pytest.mark.parametrize("named", [True, False])
def test_an_error_in_a_stream_says_that_it_is_the_requests(served: TestClient, named: bool) -> None:
    body = {**(NAMED if named else {}), "text": "x", "stream": True}
    came = served.put("/generate", json=body).content.split(b"\n\n")
    sent = b"".join(EVENTS).split(b"\n\n")
    if named:
        assert json.loads(came[1].removeprefix(b"data: ")) == {
            "error": {"message": "too long: é", "code": 400}
        }
        assert json.loads(came[2].removeprefix(b"data: ")) == {"error": {"message": "busy", "code": 503}}
        del came[1:3], sent[1:3]
    assert came == sent


@pytest.mark.filterwarnings("ignore")  # SGLang warns if it is imported without an accelerator
@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info_has_word_of_the_patch_set(served: TestClient, path: str) -> None:
    info = served.get(path).json()
    assert info["version"] == "0.5.15.post1"
    assert info[KEY]["active"] is False  # no hook is in place here
    assert info[KEY]["problems"]


def test_an_error_of_server_info_stays_what_it_is(served: TestClient) -> None:
    answer = served.get("/server_info?wrong=1")
    assert answer.status_code == 503
    assert answer.json() == {"error": "starting"}
    assert answer.headers["x-mine"] == "kept"
