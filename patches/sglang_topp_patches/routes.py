"""Every route of SGLang's HTTP server: where candidate sets are served and answers are resumed, and that no
other drops the wish.

SGLang's models pass over fields that they do not know. `Guard` stands before the routes: one that cannot
answer with candidate sets refuses a body that asks for them, instead of answering without. It also holds
the account of a call that is served (`budget`) until its answer has been sent.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_topp.errors import InvalidInputError
from sglang_topp.resumable import RESUMED
from sglang_topp_patches.budget import in_flight
from sglang_topp_patches.payload import BASE64, FIELDS
from sglang_topp_patches.seams import status

__all__ = [
    "NO_PROMPT",
    "OPENAI",
    "REFUSED",
    "SERVED",
    "Call",
    "Guard",
    "current_call",
    "guard",
    "guard_served_app",
    "misplaced",
    "path_without_sets",
    "read_body",
    "refusals",
    "refuse_grpc",
    "refuse_grpc_openai",
]

_CONTAINERS = ("sampling_params", "custom_params", "extra_body", "options", "parameters", "instances")
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_GENERATE = "/generate"
_VERTEX = os.environ.get("AIP_PREDICT_ROUTE", "/vertex_generate")

OPENAI = frozenset({"/v1/completions", "/v1/chat/completions", "/invocations"})
"""Routes in OpenAI's form that answer with candidate sets, in `sglext`."""

SERVED: Mapping[str, tuple[str, ...]] = {
    _GENERATE: ("", "sampling_params.custom_params."),
    _VERTEX: ("parameters.", "parameters.sampling_params.custom_params."),
    **dict.fromkeys(OPENAI, ("", "custom_params.")),
}
"""Routes that answer with candidate sets, and where in the body they take the fields."""

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
"""Routes that take text and answer without sets: a body that asks for them gets a 400."""

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
        # Gone since 0.5.19.
        *("/weight_version", "/get_weight_version", "/get_load", "/clear_hicache_storage_backend"),
        *("/start_profile", "/stop_profile", "/set_trace_level", "/start_expert_distribution_record"),
        *("/stop_expert_distribution_record", "/dump_expert_distribution_record"),
        os.environ.get("SGLANG_OLLAMA_TAGS_ROUTE", "/api/tags"),
        os.environ.get("SGLANG_OLLAMA_SHOW_ROUTE", "/api/show"),
    }
)
"""Routes that take no prompt: there is nothing there to ask sets for, and their bodies are not looked at."""

_ASKING = (*FIELDS, RESUMED)
_TOO_DEEP = "a body nested too deep to be read"
# A reader who does not take a piece within this time is gone, or holds others up.
_PIECE_BYTES = 1 << 20
_PIECE_TIMEOUT_S = 120.0

current_call: ContextVar[Call | None] = ContextVar("sglang_topp_call", default=None)
"""The HTTP call that this code works for."""

path_without_sets: ContextVar[str] = ContextVar("sglang_topp_path_without_sets", default="")
"""The route that this code works for, where that is one whose answer has no room for sets."""


class Call:
    """One call of a served route: what its samples hold, until the answer has been sent.

    Attributes:
        path: the route.
        account: of all its samples.
        problem: why it was ended; empty while it was not.
        fields: of a call in OpenAI's form, which has no place for them further on: ours at its body's top
            level, until `openai_api` takes them; else None.
    """

    def __init__(self, path: str = _GENERATE, fields: Mapping[str, Any] | None = None) -> None:
        self.path = path
        self.problem = ""
        self.fields = fields
        self.account = in_flight().open(self._end)
        self._at_end: list[Callable[[], None]] = []

    def at_end(self, let_go: Callable[[], None]) -> None:
        """Have `let_go` called where this call is ended before its time."""
        self._at_end.append(let_go)

    def close(self) -> None:
        """The answer has been sent, or nobody takes it. Left referring to each other, its samples and it
        would wait for the collector, which seldom runs in a server."""
        self._at_end.clear()
        self.account.close()

    def _end(self, reason: str) -> None:
        self.problem = reason
        while self._at_end:
            self._at_end.pop()()


class Guard:
    """ASGI middleware, the innermost one: behind authentication and decompression, before the routes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT"):
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == _GENERATE:
            # Its own contract check names what is wrong; a body of megabytes is parsed there, once.
            return await self._serve(Call(path), scope, receive, send)
        if path in NO_PROMPT:
            return await self._app(scope, receive, send)
        body, receive = await read_body(receive)
        asked = _asked_at(body)
        if unserved := [place for place in asked if not _is_served(path, place)]:
            place = unserved[0]
            return await _refusal(path, _cannot(path, place), place)(scope, receive, send)
        if path in OPENAI and asked:
            if problem := _openai_problem(asked):
                return await _refusal(path, f"{asked[0]}: {problem}", asked[0])(scope, receive, send)
            return await self._serve(Call(path, _top_level(body)), scope, receive, send)
        if path in SERVED and path not in OPENAI:
            return await self._serve(Call(path), scope, receive, send)
        token = path_without_sets.set(path)
        try:
            await self._app(scope, receive, send)
        finally:
            path_without_sets.reset(token)

    async def _serve(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        token = current_call.set(call)
        try:
            await self._app(scope, receive, _in_pieces(send, call))
        finally:
            current_call.reset(token)
            call.close()


def refuse_grpc(self: Any, *, req_dict: Mapping[str, Any], **kwargs: Any) -> None:
    """BEFORE hook on `RuntimeHandle.submit_request`: SGLang's gRPC messages have no room for sets."""
    for place in _places(req_dict, ""):
        raise InvalidInputError(_cannot("gRPC", place))


def refuse_grpc_openai(self: Any, serving_key: str, streaming: bool, json_body: bytes, *args: Any) -> None:
    """BEFORE hook on `RuntimeHandle._submit_openai`, the OpenAI routes over gRPC."""
    for place in _asked_at(json_body):
        raise InvalidInputError(_cannot("gRPC", place))


def guard(app: Any) -> None:
    """Put `Guard` before the routes of SGLang's application; it must not have begun to serve."""
    if not _is_guarded(app):
        app.user_middleware.append(Middleware(Guard))


def guard_served_app() -> None:
    """`guard` for the application of SGLang's HTTP server, in a process that has it."""
    if (module := sys.modules.get(_HTTP_SERVER)) is not None and module.app.middleware_stack is None:
        guard(module.app)


def refusals() -> tuple[str, ...]:
    """Why sets are not served by this process: its other routes would pass the wish over."""
    module = sys.modules.get(_HTTP_SERVER)
    if module is None or _is_guarded(module.app):
        return ()
    return ("SGLang's HTTP server began to serve before its routes could be guarded",)


def _is_guarded(app: Any) -> bool:
    return any(middleware.cls is Guard for middleware in app.user_middleware)


def _is_served(path: str, place: str) -> bool:
    prefixes = SERVED.get(path, ())
    if place.endswith(RESUMED):
        return path not in OPENAI and place in [f"{prefix}{RESUMED}" for prefix in prefixes[:1]]
    return any(place == f"{prefix}{field}" for prefix in prefixes for field in FIELDS)


def _cannot(path: str, place: str) -> str:
    what = "go on with an answer" if place.endswith(RESUMED) else "return candidate sets"
    return f"{place}: {path} cannot {what}; send the request to /generate"


async def read_body(receive: Receive) -> tuple[bytes, Receive]:
    """The whole body, and a `receive` that gives it out again and then goes on."""
    messages: list[Message] = []
    while True:
        messages.append(await receive())
        if messages[-1]["type"] != "http.request" or not messages[-1].get("more_body", False):
            break
    body = b"".join(message.get("body", b"") for message in messages)
    messages.reverse()

    async def again() -> Message:
        return messages.pop() if messages else await receive()

    return body, again


def misplaced(body: Any) -> str | None:
    """What is wrong with a wish that stands where `/generate` does not look; None where none does.

    SGLang's Vertex route makes its own request, and has it checked with its own body.
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
    return f"{place}: {path} does not look there; expected at the top level{inside}"


def _asked_at(body: bytes) -> list[str]:
    """The places in a body, dotted, that ask for sets or go on with an answer."""
    # A name may be written with escapes.
    if b"\\u" not in body and not any(field.encode() in body for field in _ASKING):
        return []
    try:
        return list(_places(json.loads(body), ""))
    except RecursionError:
        return [_TOO_DEEP]
    except ValueError:
        # No JSON: a form (audio), or what the route itself refuses.
        return [field for field in _ASKING if b'name="%s"' % field.encode() in body]


def _places(value: Any, prefix: str) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _places(item, prefix)
    elif isinstance(value, dict):
        yield from (f"{prefix}{field}" for field in FIELDS if value.get(field) not in (None, False, 0))
        if value.get(RESUMED) is not None:  # 0 asks for something
            yield f"{prefix}{RESUMED}"
        for name in _CONTAINERS:
            if isinstance(value.get(name), dict | list):
                yield from _places(value[name], f"{prefix}{name}.")


def _top_level(body: bytes) -> dict[str, Any]:
    """Our fields at the top level of a body that `_asked_at` has found some in."""
    parsed = json.loads(body)
    return {field: parsed[field] for field in FIELDS if field in parsed}


def _openai_problem(asked: list[str]) -> str:
    """Why a call in OpenAI's form cannot be answered with sets, or nothing."""
    if problems := status().problems:
        return f"candidate sets are not served here: {'; '.join(problems)}"
    if all(place.endswith(BASE64) for place in asked):
        return "says how candidate sets are packed, and none are asked for; ask for them too, or leave it out"
    return ""


def _refusal(path: str, message: str, place: str) -> Response:
    """A 400 in the shape of the route's family."""
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


def _in_pieces(send: Send, call: Call) -> Send:
    """`send` for a call that may hold sets: a large body goes out piece by piece, each once the reader has
    taken the one before, and a reader that takes none is cut off."""

    async def paced(message: Message) -> None:
        body = message.get("body", b"")
        if message["type"] == "http.response.start" and message["status"] < 400 and call.fields is not None:
            raise RuntimeError("the answer to a request for candidate sets was made without them")
        if message["type"] != "http.response.body" or not call.account.candidates:
            return await send(message)
        for start in range(0, max(len(body), 1), _PIECE_BYTES):
            end = start + _PIECE_BYTES
            more = message.get("more_body", False) or end < len(body)
            piece = {"type": message["type"], "body": body[start:end], "more_body": more}
            try:
                async with asyncio.timeout(_PIECE_TIMEOUT_S):
                    await send(piece)
            except TimeoutError:
                call.account.end(f"the reader took nothing for {_PIECE_TIMEOUT_S:g} s")
                raise ConnectionError(call.problem) from None

    return paced
