"""Guard SGLang's HTTP routes: parse the plugin's fields, and refuse them where no sets can be returned.

SGLang ignores fields that it does not know, so a route that the plugin does not serve would answer without
the sets. FastAPI builds the schema of `/generate` when SGLang's HTTP server is imported, which may be before
plugins are loaded, and drops the fields, too. So `Guard` reads them from the raw bodies, before the routes.
After a stream has begun with status 200, an error can no longer change the status. So it also checks them
before.

`Guard` knows when an answer has been sent. Until then, the HTTP process counts the answer's candidates
against the limit on candidates in flight (`memory`).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.hooks import around, before
from sglang_topp_patches.http import checkpoint_tensors, openai, request_fields
from sglang_topp_patches.http.process_state import HTTP_SERVER, Call, HttpProcess, current_call
from sglang_topp_patches.request import BASE64, FIELDS, NUCLEUS
from sglang_topp_patches.set_buffer import KEY

_CONTAINERS = ("sampling_params", "custom_params", "extra_body", "options", "parameters", "instances")
_GENERATE = "/generate"
_VERTEX = os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate")

OPENAI = frozenset({"/v1/completions", "/v1/chat/completions", "/invocations"})
"""The OpenAI routes that return candidate sets, in the answer's `sglext`."""

SERVED: Mapping[str, tuple[str, ...]] = {
    _GENERATE: ("", "sampling_params.custom_params."),
    _VERTEX: ("parameters.", "parameters.sampling_params.custom_params."),
    **dict.fromkeys(OPENAI, ("", "custom_params.")),
}
"""The routes that return candidate sets.

Each value lists the places in the body at which the route accepts the plugin's fields. `Guard` answers a
request with our fields on any other route with a 400, also on a route that a new release brings."""

_OF_WEIGHTS = ("/update_weights_from_tensor", "/load_lora_adapter_from_tensors")
"""Routes whose bodies hold weights. They are too large to be read twice, and ask for no answer."""

_ASKING = (*FIELDS, RESUMED)
_SERVER_INFO = ("/server_info", "/get_server_info")
_TOO_DEEP = "a body nested too deep to be read"
# `Guard` sends a large answer in pieces, each after the kernel has taken the last one. The kernel resets the
# connection of a client that takes nothing for this long.
_PIECE_BYTES = 1 << 20
_READER_TIMEOUT_MS = 120_000
_TRANSPORT = "sglang_topp_transport"
_EVENT, _ERROR_EVENT = b"data: ", b'data: {"error":'


class Guard:
    """The innermost ASGI middleware. It runs before the routes, after authentication and decompression."""

    def __init__(self, app: ASGIApp, process: HttpProcess) -> None:
        self._app, self._process = app, process

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection: serve, refuse, or pass on the request."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path in _SERVER_INFO:
            send = openai.rewriting(send, self._add_report)
        if path in (*_SERVER_INFO, *_OF_WEIGHTS, "") or scope["method"] not in ("POST", "PUT"):
            return await self._app(scope, receive, send)
        body = await _read(receive)
        if body is None:  # the client disconnected
            return await self._app(scope, receive, send)
        try:
            call, body = self._call(path, body)
        except InvalidInputError as error:
            return await _refusal(path, str(error))(scope, receive, send)
        if call.is_served:
            _limit_stalls(scope.get(_TRANSPORT))
            send = _in_pieces(send, call)
        if call.is_openai:
            send = openai.adding_sets(send, call)
        token = current_call.set(call)
        try:
            await self._app(scope, _again(body, receive), send)
        finally:
            current_call.reset(token)
            call.close()

    def _call(self, path: str, body: bytes) -> tuple[Call, bytes]:
        """Parse the plugin's fields in a body. Return the call, and the body for SGLang's route.

        Raises:
            InvalidInputError: a field is invalid, or cannot be served here.
        """
        plain = Call(path, is_served=path in SERVED and path not in OPENAI)
        if not _may_name_fields(body):
            return plain, body
        try:
            parsed = json.loads(body)
            asked = [*_places(parsed, "")]
        except RecursionError:
            raise InvalidInputError(_TOO_DEEP) from None
        except ValueError:
            # A body that is not JSON may be form data for an audio route. All other routes refuse such a
            # body.
            parsed, asked = None, [field for field in _ASKING if b'name="%s"' % field.encode() in body]
        for place in asked:
            if not _is_served(path, place):
                raise InvalidInputError(_cannot(path, place))
        if not isinstance(parsed, dict):
            return plain, body
        if path == _GENERATE:
            return Call(path, requests=request_fields.parse_body(self._process, parsed) or None), body
        if not asked:
            return plain, body
        if path in OPENAI:
            if problem := _openai_problem(asked, self._process.capabilities.sets, parsed):
                raise InvalidInputError(f"{asked[0]}: {problem}")
            fields = {field: parsed[field] for field in FIELDS if field in parsed}
            return Call(path, fields=fields, is_openai=True), body
        # SGLang passes the `parameters` of a Vertex body on as keywords, which must not have our fields.
        parameters = parsed.get("parameters") or {}
        fields = {field: parameters.pop(field) for field in _ASKING if field in parameters}
        return Call(path, fields=fields), json.dumps(parsed).encode()

    def _add_report(self, content: dict[str, Any]) -> Response:
        """Add the plugin to `GET /server_info`: whether it is active, its problems, and its memory use."""
        return JSONResponse({**content, KEY: self._process.report(content["internal_states"])})


@before("sglang.srt.entrypoints.grpc_bridge.RuntimeHandle.submit_request", since="0.5.14", always=True)
def refuse_grpc(self: Any, *, req_dict: Mapping[str, Any], **kwargs: Any) -> None:
    """Refuse requests for sets over gRPC."""
    for place in _places(req_dict, ""):
        raise InvalidInputError(_cannot("gRPC", place))


@before("sglang.srt.entrypoints.grpc_bridge.RuntimeHandle._submit_openai", since="0.5.14", always=True)
def refuse_grpc_openai(self: Any, serving_key: str, streaming: bool, json_body: bytes, *args: Any) -> None:
    """Refuse requests for sets on OpenAI routes over gRPC."""
    refuse_grpc(self, req_dict=json.loads(json_body))


@around("fastapi.applications.FastAPI.build_middleware_stack", always=True, state=HttpProcess)
def guard(process: HttpProcess, original: Callable[[Any], ASGIApp], app: Any) -> ASGIApp:
    """Install `Guard` in front of SGLang's routes.

    An application builds its middleware when it begins to serve, so it doesn't matter whether SGLang's HTTP
    server or the plugin was loaded first. `process_state.note_server_args` makes an application build it
    again that began to serve before the plugin was loaded.
    """
    is_guarded = any(middleware.cls is Guard for middleware in app.user_middleware)
    if is_guarded or not any(_is_sglangs(route) for route in app.routes):
        return original(app)
    process.is_guarded = True
    checkpoint_tensors.add_route(app, lambda: process.checkpoint)
    app.user_middleware.append(Middleware(Guard, process))
    return _note_transport(original(app))


def _may_name_fields(body: bytes) -> bool:
    """Return whether a body may name a field of the plugin. JSON escapes and UTF-16 can hide a name.

    A regular expression finds all names in one pass, but takes 13 s for 56 MB that nearly name a field again
    and again. These searches take at most 0.3 s.
    """
    return any(name in body for name in _field_names()) or b"\0" in body or b"\\u" in body


@cache
def _field_names() -> tuple[bytes, ...]:
    names = (*_ASKING, request_fields.PROMPT_IDS) if request_fields.adds_prompt_ids() else _ASKING
    return tuple(name.encode() for name in names)


def _is_sglangs(route: Any) -> bool:
    return getattr(getattr(route, "endpoint", None), "__module__", "") == HTTP_SERVER


def _note_transport(app: ASGIApp) -> ASGIApp:
    """Store each connection's transport in the connection's ASGI scope.

    uvicorn's own `send` is a method of an object that has the transport as an attribute. `Guard` cannot
    read the transport, because other middleware has wrapped the `send` that `Guard` gets.
    """

    async def noting(scope: Scope, receive: Receive, send: Send) -> None:
        scope[_TRANSPORT] = getattr(getattr(send, "__self__", None), "transport", None)
        await app(scope, receive, send)

    return noting


def _is_served(path: str, place: str) -> bool:
    prefixes = SERVED.get(path, ())
    if place.endswith(RESUMED):
        return path not in OPENAI and place in [f"{prefix}{RESUMED}" for prefix in prefixes[:1]]
    if place.endswith(NUCLEUS) and path in OPENAI:
        return False  # an OpenAI route cannot renormalize the log-probs in its answer
    return any(place == f"{prefix}{field}" for prefix in prefixes for field in FIELDS)


def _cannot(path: str, place: str) -> str:
    is_resumed = place.endswith(RESUMED)
    if path == _GENERATE:
        inside = "" if is_resumed else " or in sampling_params.custom_params"
        return f"{place}: {path} ignores the field there; expected it at the top level{inside}"
    what = "resume an answer" if is_resumed else "return candidate sets"
    return f"{place}: {path} cannot {what}; send the request to /generate"


async def _read(receive: Receive) -> bytes | None:
    """Return the whole body, or None if the client disconnected."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` function that delivers a body, and then what `receive` delivers."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


def _places(value: Any, prefix: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _places(item, prefix)
    elif isinstance(value, dict):
        yield from (f"{prefix}{field}" for field in FIELDS if value.get(field) not in (None, False, 0))
        # Yield `resumed_tokens` even if it is 0, because 0 asks for an answer that can be resumed later.
        if value.get(RESUMED) is not None:
            yield f"{prefix}{RESUMED}"
        for name in _CONTAINERS:
            if isinstance(value.get(name), dict | list):
                yield from _places(value[name], f"{prefix}{name}.")


def _openai_problem(asked: list[str], problem: str, body: Mapping[str, Any]) -> str:
    """Return the reason if an OpenAI call cannot be answered with sets, and "" otherwise."""
    if problem:
        return f"candidate sets are not served here: {problem}"
    if all(place.endswith(BASE64) for place in asked):
        return "sets the form of candidate sets, and the request asks for none; ask for them, or leave it out"
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    is_assistant = isinstance(last, dict) and last.get("role") == "assistant"
    if is_assistant and not body.get("continue_final_message"):
        return (
            "the chat ends with an assistant turn, which SGLang renders as a user turn; end with a user turn,"
            " or set continue_final_message"
        )
    return ""


def _refusal(path: str, message: str) -> Response:
    """Return a 400 in the route's error format, which is Anthropic's, OpenAI's, or SGLang's."""
    content: dict[str, Any] = {"error": message}
    if path.startswith("/v1/messages"):
        content = {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
    elif path.startswith("/v1/") or path == "/invocations":
        place = message.partition(":")[0]
        content = {
            "object": "error",
            "message": message,
            "type": "BadRequestError",
            "param": place,
            "code": 400,
        }
    return JSONResponse(content, 400)


def _limit_stalls(transport: asyncio.Transport | None) -> None:
    """Make the kernel reset the connection of a client that stops reading. Linux only.

    Args:
        transport: the connection's transport, or None if the server is not uvicorn.
    """
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is None or sys.platform != "linux":
        return
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _READER_TIMEOUT_MS)


def _in_pieces(send: Send, call: Call) -> Send:
    """Return a `send` that splits a large body into pieces.

    Each piece is sent only after the client has taken the one before. An empty piece ends the body, so the
    call's candidates count until the client has taken the whole body. SGLang 0.5.12 sends no
    code if it reports a bad request in a stream, so an answer to a request with our fields gets one.
    """
    is_served, asks = True, call.fields is not None or call.requests is not None

    async def send_in_pieces(message: Message) -> None:
        nonlocal is_served
        body = message.get("body", b"")
        is_stream = False
        if message["type"] == "http.response.start" and message["status"] < 400:
            is_served = False
            # A stream begins before SGLang normalizes its request.
            is_stream = all(name != b"content-length" for name, _ in message["headers"])
        if not is_served and not is_stream:
            if call.fields is not None or call.requests is not None:
                raise RuntimeError("the answer to a request for candidate sets was made without them")
            is_served = True
        if asks and body.startswith(_ERROR_EVENT):
            report = json.loads(body.removeprefix(_EVENT))
            if isinstance(report["error"], dict) and "code" not in report["error"]:
                report["error"]["code"] = 400
                message = {**message, "body": _EVENT + json.dumps(report).encode() + b"\n\n"}
        if message["type"] != "http.response.body" or not call.candidates:
            return await send(message)
        for start in range(0, len(body), _PIECE_BYTES):
            await send({**message, "body": body[start : start + _PIECE_BYTES], "more_body": True})
        if not message.get("more_body", False):
            await send({**message, "body": b""})

    return send_in_pieces
