"""RequireKey: the bearer key, checked before a single byte of the body is read.

Plain ASGI: Starlette's `BaseHTTPMiddleware` would put a task between the server and the route, and the
route would no longer hear that its caller hung up.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_topp.errors import AuthenticationError
from sglang_topp_server.metrics import Metrics
from sglang_topp_server.problems import answer_of, headers_of

__all__ = ["OPEN_PATHS", "RequireKey"]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Paths that need no key: what asks for them (a load balancer) often cannot carry one."""


class RequireKey:
    """Lets a request through that carries `Authorization: Bearer <key>`; others get a 401.

    Args:
        app: what it guards.
        key: the key, or None to let everything through.
        metrics: where refusals are counted.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, metrics: Metrics) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or self._key is None or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        # Starlette decodes headers as latin-1; going back gives the bytes that were sent.
        sent = token.strip().encode("latin-1")
        if scheme.lower() == "bearer" and hmac.compare_digest(sent, self._key):
            return await self._app(scope, receive, send)
        got = "another key" if sent else "none"
        error = AuthenticationError(
            f"got {got}, expected the header 'Authorization: Bearer <key>' with this server's key", status=401
        )
        self._metrics.count_refusal(error)
        await JSONResponse(answer_of(error), 401, headers_of(error))(scope, receive, send)
