"""What SGLang's HTTP server has no function for before 0.5.22: a 400 for bad input to /generate before a
stream begins, and word of the patch set in GET /server_info."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_topp_patches import request, routes, server_info
from sglang_topp_patches.payload import FIELDS

__all__ = ["Additions", "install"]

_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_EVENT = b"data: "
_ERROR_EVENT = b'data: {"error":'
_SERVER_INFO = ("/server_info", "/get_server_info")


class Additions:
    """ASGI middleware, behind authentication."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in _SERVER_INFO and scope["method"] == "GET":
            return await self._add_status(scope, receive, send)
        if path == "/generate" and scope["method"] in ("POST", "PUT"):
            body, receive = await routes.read_body(receive)
            if _names_our_fields(body):
                if error := _problem(body, _manager()):
                    return await JSONResponse({"error": error}, 400)(scope, receive, send)
                send = _with_code(send)
        await self._app(scope, receive, send)

    async def _add_status(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: list[Message] = []

        async def keep(message: Message) -> None:
            messages.append(message)

        await self._app(scope, receive, keep)
        start, *parts = messages
        body = b"".join(part.get("body", b"") for part in parts)
        if start["status"] == 200:
            content = server_info.add_status(json.loads(body), _manager().server_args, None)
            return await JSONResponse(content)(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        await Response(body, start["status"], headers)(scope, receive, send)


def install(result: None, self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `TokenizerManager.__init__`: put `Additions` before the routes of SGLang's HTTP server,
    in a process that has it."""
    module = sys.modules.get(_HTTP_SERVER)
    if module is None or module.app.middleware_stack is not None:
        return
    if not any(middleware.cls is Additions for middleware in module.app.user_middleware):
        module.app.user_middleware.append(Middleware(Additions))


def _manager() -> Any:
    return sys.modules[_HTTP_SERVER]._global_state.tokenizer_manager


def _names_our_fields(body: bytes) -> bool:
    """Whether it may; a name may be written with escapes. The others are SGLang's alone."""
    return b"\\u" in body or any(field.encode() in body for field in FIELDS)


def _problem(body: bytes, manager: Any) -> str | None:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return request.check_body(None, parsed) or _sampling_problem(parsed, manager)


def _sampling_problem(body: Any, manager: Any) -> str | None:
    """What SGLang's own checks say. It makes them later, and in a stream says what they find without a
    status, or breaks off."""
    from sglang.srt.sampling.sampling_params import SamplingParams

    given = body.get("sampling_params") if isinstance(body, Mapping) else None
    for params in given if isinstance(given, list) else [given]:
        if isinstance(params, Mapping):
            try:
                checked = SamplingParams(**{**(manager.preferred_sampling_params or {}), **params})
                checked.normalize(manager.tokenizer)
                checked.verify(manager.model_config.vocab_size)
            except Exception as error:  # of any kind: `stop_regex` has its own, `stop` may be anything
                return f"sampling_params: {error}"
    return None


def _with_code(send: Send) -> Send:
    """0.5.12 writes into a stream what is wrong with its request, and not that this is a 400."""

    async def send_on(message: Message) -> None:
        event = message.get("body", b"")
        if event.startswith(_ERROR_EVENT):
            report = json.loads(event.removeprefix(_EVENT))
            if isinstance(report["error"], dict):
                report["error"].setdefault("code", 400)
                message = {**message, "body": _EVENT + json.dumps(report).encode() + b"\n\n"}
        await send(message)

    return send_on
