"""The sidecar's FastAPI app: the API key, all routes, their OpenAPI schemas, and error handlers."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_topp.errors import AuthenticationError, BadRequestError, ServerError, SglangToppError
from sglang_topp_server.api.sample_endpoint import (
    NDJSON,
    ROLLOUTS,
    SCORES,
    EndpointSpec,
    SampleEndpoint,
    Shared,
)
from sglang_topp_server.engine import EngineClient
from sglang_topp_server.error_responses import as_sglang_topp_error, error_body, error_headers, http_status
from sglang_topp_server.metrics import Metrics
from sglang_topp_server.openapi import (
    AbortAnswer,
    EngineInfo,
    ErrorAnswer,
    Info,
    ModelInfo,
    PatchInfo,
    RolloutsAnswer,
    ScoresAnswer,
    body_schema,
)
from sglang_topp_server.requests import AbortBody, RolloutsBody, ScoresBody, parse_abort
from sglang_topp_server.settings import Limits
from sglang_topp_server.view.build_page import content_security_policy, page_of_rollouts

_ABORTS_TIMEOUT_S = 5.0
# Load balancers probe these paths, and often cannot send a key.
_PUBLIC_PATHS = frozenset({"/healthz", "/readyz"})


def create_app(
    engine: EngineClient,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    view: int = 0,
) -> FastAPI:
    """Return the sidecar's app for one engine.

    Args:
        engine: the engine's client. The app polls the engine with this client, in the event loop that serves
            the app. At shutdown, the app closes the client.
        limits: the request limits; `Limits()` if None.
        api_key: the bearer key that callers must send (except on `/healthz` and `/readyz`); None if callers
            need no key.
        view: how many recent rollouts `GET /view` shows; 0 turns the route off.
    """
    shared = Shared(engine, limits or Limits(), view)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        watch = asyncio.create_task(engine.watch())
        yield
        watch.cancel()
        # uvicorn cancels requests after its shutdown grace period, but does not wait until they have ended.
        # A canceled request ends only after the engine has aborted its samples. So wait until all requests
        # have ended.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORTS_TIMEOUT_S):
                while shared.concurrency.num_samples:
                    await asyncio.sleep(0.05)
        await engine.close()

    app = FastAPI(
        title="sglang-topp",
        version=version("sglang-topp"),
        lifespan=lifespan,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
    )
    app.add_middleware(SampleRoutes, shared=shared)
    app.add_middleware(ApiKeyMiddleware, key=api_key, metrics=shared.metrics)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(SglangToppError, _known_error)
    app.add_exception_handler(Exception, _known_error)

    @app.post(
        "/rollouts",
        response_model=None,
        responses={200: {"model": RolloutsAnswer, "content": _streams(ROLLOUTS, "RolloutRecord")}},
        openapi_extra=body_schema(RolloutsBody),
    )
    async def rollouts() -> Response:
        """Generate samples with their candidate sets.

        Without `stream`, the answer is one JSON object. With `stream`, the answer has one message per sample,
        sent when the sample finishes. The last message is `{"done": true, "rollouts": N}`. A message is a
        line of JSON, or a binary frame if `Accept` names the media type of frames. If the caller disconnects,
        the sidecar aborts the unfinished samples.
        """
        raise HTTPException(404)  # `SampleRoutes` answers this path; FastAPI also matches it with a line feed

    @app.post(
        "/scores",
        response_model=None,
        responses={200: {"model": ScoresAnswer, "content": _streams(SCORES, "ScoreRecord")}},
        openapi_extra=body_schema(ScoresBody),
    )
    async def scores() -> Response:
        """Return the log-probs and candidate sets of given sequences.

        Without `stream`, the answer is one JSON object. With `stream`, the answer has one message per
        sequence, and the sidecar encodes each message as in `POST /rollouts`. The last message is
        `{"done": true, "scores": N}`. If the caller disconnects, the sidecar aborts the request.
        """
        raise HTTPException(404)  # `SampleRoutes` answers this path; FastAPI also matches it with a line feed

    @app.post("/abort", openapi_extra=body_schema(AbortBody))
    async def abort(request: Request) -> AbortAnswer:
        """Abort one request by its id, or all requests in the engine.

        The field `on_abort` of an aborted request decides what the caller of that request receives. The
        sidecar answers `POST /abort` after the aborted requests have stopped.
        """
        try:
            async with shared.bodies.read(request) as body:
                order = parse_abort(body)
        except ClientDisconnect:
            raise BadRequestError("the body: the connection closed before its end", status=400) from None
        return AbortAnswer(aborted=await engine.abort(order.request_id))

    _add_status_routes(app, shared)
    if view:
        _add_view(app, shared)
    return app


class SampleRoutes:
    """A middleware that answers `POST /rollouts` and `POST /scores`, of which FastAPI only has the OpenAPI.

    FastAPI's own routing would take an eighth of the sidecar's processor time per sample of 32 tokens.

    Args:
        app: the wrapped app.
        shared: what the requests share.
    """

    def __init__(self, app: ASGIApp, *, shared: Shared) -> None:
        self._app, self._shared = app, shared
        self._specs = {f"/{spec.name}": spec for spec in (ROLLOUTS, SCORES)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it to the app. This is the ASGI entry point."""
        spec = self._specs.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        app = self._app if spec is None else SampleEndpoint(spec, self._shared)
        await app(scope, receive, send)


class ApiKeyMiddleware:
    """A middleware that answers 401 unless a request has the header `Authorization: Bearer <key>`.

    The key is checked before any byte of the body is read. The middleware implements ASGI directly, because
    Starlette's `BaseHTTPMiddleware` would run the route in a separate task, which would not notice that the
    caller disconnects.

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
        if scope["type"] != "http" or self._key is None or scope["path"] in _PUBLIC_PATHS:
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
        self._metrics.requests.labels("rejected").inc()
        self._metrics.count_error(error)
        await JSONResponse(error_body(error), 401, error_headers(error))(scope, receive, send)


def _add_status_routes(app: FastAPI, shared: Shared) -> None:
    """Add the routes that report on the sidecar: health, readiness, `/info`, and metrics."""
    engine = shared.engine

    @app.head("/healthz", include_in_schema=False)
    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Return 200 as long as the sidecar's process runs."""
        return {"status": "ok"}

    @app.head("/readyz", include_in_schema=False)
    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Return 200 while the engine answers and its sglang-topp plugin is active."""
        status = engine.status
        if status.phase != "ready":
            raise ServerError(status.reason, status=503)
        return {"status": "ok"}

    @app.get("/info")
    async def info() -> Info:
        """Describe the engine, its plugin, and this sidecar's limits."""
        status = engine.status
        return Info(
            version=app.version,
            ready=status.phase == "ready",
            reason=status.reason,
            engine=EngineInfo(
                model_path=status.model_path,
                sglang_version=status.sglang_version,
                weight_version=await engine.weight_version(),
                model=None if status.model is None else ModelInfo.model_validate(status.model),
            ),
            patch=PatchInfo(
                active=status.is_patched,
                version=status.patch.get("version"),
                seams=status.patch.get("seams"),
                problems=status.problems,
            ),
            limits=shared.limits,
        )

    @app.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """Return the metrics in Prometheus's text format."""
        return Response(generate_latest(shared.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_view(app: FastAPI, shared: Shared) -> None:
    one_page_at_a_time = asyncio.Lock()

    @app.get("/view", response_class=HTMLResponse)
    async def show_recent() -> Response:
        """Return an HTML page of recent rollouts, like the page that `sglang-topp view` writes."""
        async with one_page_at_a_time:
            rollouts = list(shared.recent)
            if not rollouts:
                raise BadRequestError("GET /view: no rollout was served yet", status=404)
            chunks = page_of_rollouts(rollouts, f"the last {len(rollouts)} rollouts")
            page = await asyncio.to_thread(b"".join, chunks)
        headers = {"content-security-policy": content_security_policy(), "cache-control": "no-store"}
        return HTMLResponse(page, headers=headers)


def _streams(spec: EndpointSpec, record: str) -> dict[str, Any]:
    """Return the OpenAPI description of a streamed answer's media types."""
    return {
        NDJSON: {"schema": {"type": "string", "description": f"With stream: a {record} on each line."}},
        spec.media_type: {"schema": {"type": "string", "format": "binary"}},
    }


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer a request that Starlette rejects, for example because of an unknown path or method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    known = BadRequestError(message, status=error.status_code)
    return JSONResponse(error_body(known), error.status_code, headers=error.headers)


async def _known_error(request: Request, error: Exception) -> Response:
    known = as_sglang_topp_error(error)
    return JSONResponse(error_body(known), http_status(known), error_headers(known))
