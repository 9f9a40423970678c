"""API-key middleware: check the bearer key before any byte of the body is read.

The middleware implements ASGI directly, because Starlette's `BaseHTTPMiddleware` would run the route in a
separate task. A route in a separate task would not notice that the caller disconnects.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_topp.errors import AuthenticationError
from sglang_topp_server.error_responses import error_body, error_headers
from sglang_topp_server.metrics import Metrics

__all__ = ["PUBLIC_PATHS", "ApiKeyMiddleware"]

PUBLIC_PATHS = frozenset({"/healthz", "/readyz"})
"""The paths of the sidecar that need no key.

Load balancers probe these paths, and often cannot send a key."""


class ApiKeyMiddleware:
    """A middleware that answers 401 unless a request has the header `Authorization: Bearer <key>`.

    Args:
        app: the wrapped app.
        key: the key, or None to accept every request.
        metrics: counts the refused requests.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, metrics: Metrics) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request's key, then pass the request to the app. This is the ASGI entry point."""
        if scope["type"] != "http" or self._key is None or scope["path"] in PUBLIC_PATHS:
            return await self._app(scope, receive, send)
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        # Starlette decodes headers as latin-1, so encoding them as latin-1 restores the original bytes.
        sent = token.strip().encode("latin-1")
        if scheme.lower() == "bearer" and hmac.compare_digest(sent, self._key):
            return await self._app(scope, receive, send)
        got = "another key" if sent else "none"
        error = AuthenticationError(
            f"got {got}, expected the header 'Authorization: Bearer <key>' with this server's key", status=401
        )
        self._metrics.count_refusal(error)
        await JSONResponse(error_body(error), 401, error_headers(error))(scope, receive, send)
