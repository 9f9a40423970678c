"""Every route of SGLang is known, and none ignores a request for sets."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches import releases
from sglang_topp_patches.capabilities import Capabilities
from sglang_topp_patches.http import route_policy
from sglang_topp_patches.http.process_state import HTTP_SERVER, HttpProcess
from sglang_topp_patches.http.request_fields import check_body
from sglang_topp_patches.http.route_policy import Guard, guard
from sglang_topp_patches.memory import InFlight
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


def test_every_route_of_sglang_is_in_the_table() -> None:
    listing = subprocess.run([sys.executable, "-c", LIST_ROUTES], capture_output=True, text=True, check=True)
    paths = set(json.loads(listing.stdout.splitlines()[-1]))
    assert {"/generate", "/v1/loads"} <= paths
    tables = [set(route_policy.SERVED), route_policy.REFUSED, route_policy.NO_PROMPT]
    known = set().union(*tables)
    assert sum(map(len, tables)) == len(known)
    assert paths - known == set(), "a release brought routes: are sets served there, or refused?"
    if releases.installed()[0] == next(iter(releases.RELEASES)):
        # Some routes exist only in some configurations.
        older = {"/weight_version", "/get_weight_version", "/get_load", "/clear_hicache_storage_backend"}
        assert known - paths <= {"/metrics", "/dumper/{method}"} | older


@pytest.fixture
def client() -> httpx.AsyncClient:
    async def echo(request: Request) -> JSONResponse:
        if (call := route_policy.current_call.get()) is not None:
            call.fields = None  # as SGLang's request takes them
        return JSONResponse({"bytes": len(await request.body())})

    app = Starlette(routes=[Route("/{path:path}", echo, methods=["POST", "PUT"])])
    app.user_middleware.append(Middleware(Guard, http_process()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine")


@pytest.mark.parametrize("path", sorted(route_policy.REFUSED | {"/of/another/release"}))
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
@pytest.mark.parametrize("path", sorted(route_policy.OPENAI))
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
        call = route_policy.current_call.get()
        found.append((call and call.fields, route_policy.path_without_sets.get(), (await receive())["body"]))
        if call is not None and taken:
            call.fields = None
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
    monkeypatch.setattr(HttpProcess, "problems", lambda self: ())


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
    assert found == [(expected, "", body)]
    assert statuses == [200]


@pytest.mark.usefixtures("holds")
async def test_an_answer_in_openais_form_without_the_sets_is_never_a_200() -> None:
    with pytest.raises(RuntimeError, match="made without them"):
        await _openai(json.dumps(ASKED).encode(), taken=False)


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
        assert found == [(None, "/v1/completions", body)]
        assert statuses == [200]


def test_what_generate_does_not_look_at_is_named() -> None:
    for place in ("custom_params", "extra_body", "options"):
        sentence = check_body(http_process(), None, {"text": "a", place: ASKED})
        assert sentence is not None
        assert sentence.startswith(
            f"{place}.top_logprobs_p: /generate ignores the field there; expected it at"
        )
    inside = {"sampling_params": {"custom_params": {"resumed_tokens": 1}}}
    sentence = check_body(http_process(), None, {"input_ids": [1], **inside})
    assert sentence is not None
    assert sentence.endswith(
        "resumed_tokens: /generate ignores the field there; expected it at the top level"
    )
    deep: Any = ASKED
    for _ in range(2000):
        deep = {"custom_params": deep}
    assert route_policy.misplaced(deep) == "a body nested too deep to be read"
    for body in (ASKED, {"sampling_params": {"custom_params": ASKED}}, {"resumed_tokens": 0}, {"text": "x"}):
        assert route_policy.misplaced(body) is None


def test_the_vertex_routes_own_body_is_no_misplaced_wish() -> None:
    token = route_policy.current_call.set(route_policy.Call("/vertex_generate"))
    try:
        for fields in (ASKED, {"resumed_tokens": 0}):
            assert (
                check_body(http_process(), None, {"instances": [{"text": "x"}], "parameters": fields}) is None
            )
    finally:
        route_policy.current_call.reset(token)


async def test_code_behind_a_refused_route_knows() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(route_policy.path_without_sets.get())

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    for path in ("/v1/completions", "/generate", "/server_info"):
        await Guard(app, http_process())({"type": "http", "method": "POST", "path": path}, receive, None)
    assert seen == ["/v1/completions", "", ""]


def test_grpc_refuses() -> None:
    for asking in (ASKED, {"sampling_params": {"custom_params": ASKED}}):
        with pytest.raises(InvalidInputError, match="gRPC cannot return candidate sets"):
            route_policy.refuse_grpc(None, req_type="generate", req_dict={"text": "x", **asking})
        with pytest.raises(InvalidInputError, match="gRPC cannot return candidate sets"):
            route_policy.refuse_grpc_openai(None, "chat", False, json.dumps(asking).encode(), None)
    with pytest.raises(InvalidInputError, match="gRPC cannot resume an answer"):
        route_policy.refuse_grpc(None, req_type="generate", req_dict={"input_ids": [1], "resumed_tokens": 1})
    route_policy.refuse_grpc(None, req_type="generate", req_dict={"text": "top_logprobs_p"})
    route_policy.refuse_grpc_openai(None, "chat", False, b'{"prompt": "top_logprobs_p"}', None)


async def _serve(app: Callable[..., Awaitable[None]], send: Callable[[Any], Awaitable[None]]) -> None:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}"}

    await Guard(app, http_process())({"type": "http", "method": "POST", "path": "/generate"}, receive, send)


async def test_a_large_answer_goes_out_in_pieces_and_is_held_until_then() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        call = route_policy.current_call.get()
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
    monkeypatch.setattr(route_policy, "_READER_TIMEOUT_MS", 300)

    async def answer(request: Request) -> Response:
        call = route_policy.current_call.get()
        assert call is not None
        call.count_in(InFlight(100))
        call.add(7)
        return Response(b"x" * (64 << 20))

    answer.__module__ = HTTP_SERVER
    app = Starlette(routes=[Route("/generate", answer, methods=["POST"])])
    build = app.build_middleware_stack
    monkeypatch.setattr(app, "build_middleware_stack", lambda: guard(process, lambda _: build(), app))
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


@pytest.mark.parametrize("path", sorted(route_policy.OPENAI))
async def test_openais_routes_do_not_pass_a_resumed_answer_over(client: httpx.AsyncClient, path: str) -> None:
    for place in ("", "custom_params", "extra_body"):
        body = {"resumed_tokens": 0}
        answer = await client.post(path, json={"prompt": "x", **({place: body} if place else body)})
        assert answer.status_code == 400
        assert answer.json()["param"].endswith("resumed_tokens")
