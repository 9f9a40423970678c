"""Middleware that checks requests and reports the plugin's status, for SGLang before 0.5.22.

The middleware checks each body for `/generate` that may contain a field of the plugin. If the body is
invalid, the middleware answers with a 400 before a stream begins. The middleware also adds the plugin's
status to `GET /server_info`.

SGLang 0.5.22 and later need no middleware. They have a function that checks a body and a function that
answers `GET /server_info`. Hooks wrap these two functions instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_topp.engine_contract import RESUMED
from sglang_topp_patches.hooks import before
from sglang_topp_patches.http import process_state, request_fields, route_policy
from sglang_topp_patches.http.process_state import HTTP_SERVER, HttpProcess
from sglang_topp_patches.request import FIELDS

__all__ = ["OlderReleaseMiddleware", "install"]

_EVENT = b"data: "
_ERROR_EVENT = b'data: {"error":'
_SERVER_INFO = ("/server_info", "/get_server_info")


class OlderReleaseMiddleware:
    """ASGI middleware for SGLang before 0.5.22. The middleware runs after authentication."""

    def __init__(self, app: ASGIApp, process: HttpProcess) -> None:
        self._app, self._process = app, process

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection: report the plugin's status, refuse the request, or call the app."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in _SERVER_INFO and scope["method"] == "GET":
            return await self._add_status(scope, receive, send)
        if path == "/generate" and scope["method"] in ("POST", "PUT"):
            body, receive = await route_policy.read_body(receive)
            if _names_our_fields(body):
                if error := _problem(self._process, body, _manager()):
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
            content = process_state.add_status(self._process, json.loads(body), _manager().server_args, None)
            return await JSONResponse(content)(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        await Response(body, start["status"], headers)(scope, receive, send)


@before("fastapi.applications.FastAPI.build_middleware_stack", until="0.5.22", always=True, state=HttpProcess)
def install(process: HttpProcess, app: Any) -> None:
    """Install `OlderReleaseMiddleware` behind `Guard`."""
    if any(middleware.cls is route_policy.Guard for middleware in app.user_middleware):
        app.user_middleware.append(Middleware(OlderReleaseMiddleware, process))


def _manager() -> Any:
    return sys.modules[HTTP_SERVER]._global_state.tokenizer_manager


def _names_our_fields(body: bytes) -> bool:
    """Return whether a request body may contain a field of the plugin.

    Return True for any body with a Unicode escape, because the escape can hide a field's name. If this
    function returns False, the middleware passes the body on to SGLang without a check.
    """
    names = (*FIELDS, RESUMED, request_fields.PROMPT_IDS)
    return b"\\u" in body or any(name.encode() in body for name in names)


def _problem(process: HttpProcess, body: bytes, manager: Any) -> str | None:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return request_fields.check_body(process, None, parsed) or _sampling_problem(parsed, manager)


def _sampling_problem(body: Any, manager: Any) -> str | None:
    """Return the problem that SGLang's own checks of `sampling_params` find, or None.

    SGLang itself checks `sampling_params` later. If the answer is streamed, SGLang then reports invalid
    sampling parameters without an HTTP error status, or closes the connection.
    """
    from sglang.srt.sampling.sampling_params import SamplingParams

    given = body.get("sampling_params") if isinstance(body, Mapping) else None
    for params in given if isinstance(given, list) else [given]:
        if isinstance(params, Mapping):
            try:
                checked = SamplingParams(**{**(manager.preferred_sampling_params or {}), **params})
                checked.normalize(manager.tokenizer)
                checked.verify(manager.model_config.vocab_size)
            except Exception as error:  # an invalid `stop_regex` or `stop` may raise any error
                return f"sampling_params: {error}"
    return None


def _with_code(send: Send) -> Send:
    """Wrap `send` in a function that adds the code 400 to each error event without a code.

    SGLang 0.5.12 sends no code when it reports a bad request in a stream.
    """

    async def send_on(message: Message) -> None:
        event = message.get("body", b"")
        if event.startswith(_ERROR_EVENT):
            report = json.loads(event.removeprefix(_EVENT))
            if isinstance(report["error"], dict):
                report["error"].setdefault("code", 400)
                message = {**message, "body": _EVENT + json.dumps(report).encode() + b"\n\n"}
        await send(message)

    return send_on
