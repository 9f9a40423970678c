"""List SGLang's HTTP routes that serve candidate sets, and refuse requests for sets on other routes.

SGLang ignores fields that it does not know, so most routes would answer without the sets. `Guard` runs before
the routes, and refuses a request for sets on a route that cannot return sets. `Guard` does not check routes
that take no prompt. `Guard` also knows when an answer has been sent. Until then, the HTTP process counts the
answer's candidates against the limit on candidates in flight (`memory`).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import InvalidInputError
from sglang_topp.malloc_trim import LARGE_BYTES, HeapTrimmer
from sglang_topp_patches.hooks import around, before
from sglang_topp_patches.http import checkpoint_tensors
from sglang_topp_patches.http.process_state import HTTP_SERVER, HttpProcess
from sglang_topp_patches.memory import InFlight
from sglang_topp_patches.request import BASE64, FIELDS, NUCLEUS, SetsRequest

__all__ = [
    "NO_PROMPT",
    "OPENAI",
    "REFUSED",
    "SERVED",
    "Call",
    "Guard",
    "current_call",
    "guard",
    "misplaced",
    "path_without_sets",
    "read_body",
    "refuse_grpc",
    "refuse_grpc_openai",
]

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

Each value lists the places in the body at which the route accepts the plugin's fields."""

REFUSED = frozenset(
    {
        *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/score", "/v1/decisions"),
        *("/v1/systemone", "/v1/embeddings"),
        *("/v1/classify", "/v1/rerank", "/v1/audio/transcriptions", "/encode", "/classify"),
        *("/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize"),
        os.environ.get("SGLANG_OLLAMA_CHAT_ROUTE", "/api/chat"),
        os.environ.get("SGLANG_OLLAMA_GENERATE_ROUTE", "/api/generate"),
    }
)
"""Routes that take text, token ids, or audio, and never return sets.

`Guard` answers a request for sets on such a route with a 400."""

NO_PROMPT = frozenset(
    {
        *("/", "/docs", "/docs/oauth2-redirect", "/openapi.json", "/redoc", "/metrics", "/ping", "/ready"),
        *(
            "/health",
            "/health_generate",
            "/v1/loads",
            "/v1/realtime",
            "/v1/models",
            "/v1/models/{model:path}",
        ),
        *("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/set_internal_state"),
        *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/abort_request"),
        *("/pause_generation", "/continue_generation", "/open_session", "/close_session", "/flush_cache"),
        *("/parse_function_call", "/separate_reasoning", "/configure_logging", "/dumper/{method}"),
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
        *("/update_weights_from_ipc", "/update_weight_version", "/begin_weight_update", "/end_weight_update"),
        *("/init_weights_update_group", "/destroy_weights_update_group", "/get_weights_by_name"),
        *("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
        *("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info"),
        *("/weights_checker", "/release_memory_occupation", "/resume_memory_occupation", "/slow_down"),
        *("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter", "/freeze_gc"),
        *("/hicache/storage-backend", "/hicache/storage-backend/clear", "/get_hicache_l3_cache_layout"),
        *("/add_external_corpus", "/remove_external_corpus", "/list_external_corpora", "/pd_role_switch"),
        *("/scale_elastic_ep", "/is_scaling_elastic_ep"),
        # SGLang before 0.5.21 also has the following four routes.
        *("/weight_version", "/get_weight_version", "/get_load", "/clear_hicache_storage_backend"),
        *("/start_profile", "/stop_profile", "/set_trace_level", "/start_expert_distribution_record"),
        *("/stop_expert_distribution_record", "/dump_expert_distribution_record"),
        os.environ.get("SGLANG_OLLAMA_TAGS_ROUTE", "/api/tags"),
        os.environ.get("SGLANG_OLLAMA_SHOW_ROUTE", "/api/show"),
    }
)
"""Routes that take no prompt. `Guard` does not check a request to such a route."""

_ASKING = (*FIELDS, RESUMED)
_TOO_DEEP = "a body nested too deep to be read"
# `Guard` sends a large answer in pieces, each after the kernel has taken the last one. The kernel resets the
# connection of a client that takes nothing for this long.
_PIECE_BYTES = 1 << 20
_READER_TIMEOUT_MS = 120_000
_TRANSPORT = "sglang_topp_transport"
_TRIMMER = HeapTrimmer()

current_call: ContextVar[Call | None] = ContextVar("sglang_topp_call", default=None)
"""The HTTP call that the current asyncio task handles, or None."""

path_without_sets: ContextVar[str] = ContextVar("sglang_topp_path_without_sets", default="")
"""The current route's path if this HTTP call cannot return candidate sets, and an empty string otherwise."""


class Call:
    """One HTTP call to a route that serves sets. A `Call` lives until the answer has been sent.

    Attributes:
        path: the route.
        candidates: the number of candidates that the call holds, for all samples together.
        fields: the plugin's fields from a body that no hook sees, of an OpenAI route or the Vertex route.
        requests: what each prompt of a body wants that `request_fields.check_body` has parsed (`/generate`).
            `request_fields.normalize` takes `fields` or `requests`, and leaves None. A call that still has
            one of them when it's answered is an error.
    """

    def __init__(self, path: str = _GENERATE, fields: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.fields = fields
        self.requests: tuple[SetsRequest, ...] | None = None
        self.candidates = 0
        self._in_flight: InFlight | None = None

    def count_in(self, in_flight: InFlight) -> None:
        """Count the call's candidates in `in_flight`, the counter of this process, until `close`."""
        self._in_flight = in_flight

    def add(self, candidates: int) -> None:
        """Count candidates that arrived for the call, or that were freed if the number is negative."""
        if self._in_flight is not None:
            self.candidates += candidates
            self._in_flight.total += candidates

    def close(self) -> None:
        """Stop counting: the answer was sent or has failed. SGLang drops what arrives later."""
        if self._in_flight is not None:
            self._in_flight.total -= self.candidates
            if self.candidates * 8 >= LARGE_BYTES:
                _TRIMMER.trim_soon()
        self._in_flight = None


class Guard:
    """The innermost ASGI middleware. It runs before the routes, after authentication and decompression."""

    def __init__(self, app: ASGIApp, process: HttpProcess) -> None:
        self._app, self._process = app, process

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection: serve, refuse, or pass on the request."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == _GENERATE:
            # `Guard` does not parse the body of `/generate`, because `request_fields` checks the body after
            # SGLang has parsed it.
            return await self._serve(Call(path), scope, receive, send)
        if path in NO_PROMPT:
            return await self._app(scope, receive, send)
        body, receive = await read_body(receive)
        asked = _asked_at(body)
        if unserved := [place for place in asked if not _is_served(path, place)]:
            place = unserved[0]
            return await _refusal(path, _cannot(path, place), place)(scope, receive, send)
        if path in OPENAI and asked:
            parsed = json.loads(body)
            if problem := _openai_problem(asked, self._process.problems(), parsed):
                return await _refusal(path, f"{asked[0]}: {problem}", asked[0])(scope, receive, send)
            given = {field: parsed[field] for field in FIELDS if field in parsed}
            return await self._serve(Call(path, given), scope, receive, send)
        if path in SERVED and path not in OPENAI:
            fields, receive = _take_fields(body, receive) if asked else (None, receive)
            return await self._serve(Call(path, fields), scope, receive, send)
        token = path_without_sets.set(path)
        try:
            await self._app(scope, receive, send)
        finally:
            path_without_sets.reset(token)

    async def _serve(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        token = current_call.set(call)
        _limit_stalls(scope.get(_TRANSPORT))
        try:
            await self._app(scope, receive, _in_pieces(send, call))
        finally:
            current_call.reset(token)
            call.close()


@before("sglang.srt.entrypoints.grpc_bridge.RuntimeHandle.submit_request", since="0.5.14", always=True)
def refuse_grpc(self: Any, *, req_dict: Mapping[str, Any], **kwargs: Any) -> None:
    """Refuse requests for sets over gRPC."""
    for place in _places(req_dict, ""):
        raise InvalidInputError(_cannot("gRPC", place))


@before("sglang.srt.entrypoints.grpc_bridge.RuntimeHandle._submit_openai", since="0.5.14", always=True)
def refuse_grpc_openai(self: Any, serving_key: str, streaming: bool, json_body: bytes, *args: Any) -> None:
    """Refuse requests for sets on OpenAI routes over gRPC."""
    for place in _asked_at(json_body):
        raise InvalidInputError(_cannot("gRPC", place))


@around("fastapi.applications.FastAPI.build_middleware_stack", always=True, state=HttpProcess)
def guard(process: HttpProcess, original: Callable[[Any], ASGIApp], app: Any) -> ASGIApp:
    """Install `Guard` in front of SGLang's routes.

    An application builds its middleware when it begins to serve, so it doesn't matter whether SGLang's HTTP
    server or the plugin was loaded first.
    """
    is_guarded = any(middleware.cls is Guard for middleware in app.user_middleware)
    if is_guarded or not any(_is_sglangs(route) for route in app.routes):
        return original(app)
    process.is_guarded = True
    checkpoint_tensors.add_route(app, lambda: process.checkpoint)
    app.user_middleware.append(Middleware(Guard, process))
    return _note_transport(original(app))


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
    what = "resume an answer" if place.endswith(RESUMED) else "return candidate sets"
    return f"{place}: {path} cannot {what}; send the request to /generate"


async def read_body(receive: Receive) -> tuple[bytes, Receive]:
    """Return the whole body, and an ASGI `receive` function that delivers the body again to a route."""
    messages: list[Message] = []
    while True:
        messages.append(await receive())
        if messages[-1]["type"] != "http.request" or not messages[-1].get("more_body", False):
            break
    body = b"".join(message.get("body", b"") for message in messages)
    is_whole = messages[-1]["type"] == "http.request"
    return body, _again(body, receive) if is_whole else receive


def _again(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` function that delivers a body, and then what `receive` delivers."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return again


def misplaced(body: Any) -> str | None:
    """Return an error message if the current route ignores a field of the plugin in `body`, else None.

    `SERVED` lists the places in the body where each route accepts the plugin's fields. On SGLang's Vertex
    route, `body` is the request that the route builds from the HTTP body.
    """
    call = current_call.get()
    path = _GENERATE if call is None else call.path
    try:
        place = next((place for place in _places(body, "") if not _is_served(path, place)), None)
    except RecursionError:
        return _TOO_DEEP
    if place is None:
        return None
    inside = "" if place.endswith(RESUMED) else " or in sampling_params.custom_params"
    return f"{place}: {path} ignores the field there; expected it at the top level{inside}"


def _asked_at(body: bytes) -> list[str]:
    """Return the dotted paths at which a request body has `resumed_tokens` or a field from `FIELDS`."""
    # JSON escapes (`\u`) can hide a field's name, so a body with escapes is parsed too.
    if b"\\u" not in body and not any(field.encode() in body for field in _ASKING):
        return []
    try:
        return list(_places(json.loads(body), ""))
    except RecursionError:
        return [_TOO_DEEP]
    except ValueError:
        # A body that is not JSON may be form data for an audio route. All other routes refuse such a body.
        return [field for field in _ASKING if b'name="%s"' % field.encode() in body]


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


def _take_fields(body: bytes, receive: Receive) -> tuple[dict[str, Any], Receive]:
    """Take the plugin's fields out of a Vertex body, whose `parameters` SGLang passes on as keywords."""
    parsed = json.loads(body)
    parameters = parsed.get("parameters") or {}
    fields = {field: parameters.pop(field) for field in _ASKING if field in parameters}
    return fields, _again(json.dumps(parsed).encode(), receive)


def _openai_problem(asked: list[str], problems: tuple[str, ...], body: Mapping[str, Any]) -> str:
    """Return the reason if an OpenAI call cannot be answered with sets, and "" otherwise."""
    if problems:
        return f"candidate sets are not served here: {'; '.join(problems)}"
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


def _refusal(path: str, message: str, place: str) -> Response:
    """Return a 400 in the route's error format, which is Anthropic's, OpenAI's, or SGLang's."""
    if path.startswith("/v1/messages"):
        content: dict[str, Any] = {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": message},
        }
    elif path.startswith("/v1/") or path == "/invocations":
        content = {
            "object": "error",
            "message": message,
            "type": "BadRequestError",
            "param": place,
            "code": 400,
        }
    else:
        content = {"error": message}
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
    call's candidates count until the client has taken the whole body.
    """
    is_served = True

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
        if message["type"] != "http.response.body" or not call.candidates:
            return await send(message)
        for start in range(0, len(body), _PIECE_BYTES):
            await send({**message, "body": body[start : start + _PIECE_BYTES], "more_body": True})
        if not message.get("more_body", False):
            await send({**message, "body": b""})

    return send_in_pieces
