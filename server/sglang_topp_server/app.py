"""The sidecar's routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from sglang_topp.errors import BadRequestError, ServerError, SglangToppError
from sglang_topp_server.body import Bodies, HungUpError
from sglang_topp_server.engine import Engine
from sglang_topp_server.exchange import Exchange
from sglang_topp_server.flight import Flight
from sglang_topp_server.forms import NDJSON
from sglang_topp_server.guard import RequireKey
from sglang_topp_server.held import Held
from sglang_topp_server.limits import Limits
from sglang_topp_server.metrics import Families, Metrics
from sglang_topp_server.problems import answer_of, as_known_error, headers_of, status_of
from sglang_topp_server.schema import (
    AbortAnswer,
    AbortRequest,
    EngineInfo,
    ErrorAnswer,
    Info,
    LimitsInfo,
    ModelInfo,
    PatchInfo,
    RolloutRequest,
    RolloutsAnswer,
    parse_abort,
)
from sglang_topp_server.score_schema import ScoreBody, ScoresAnswer
from sglang_topp_server.work import ROLLOUTS, SCORES, Work

__all__ = ["Siblings", "create_app"]

_ABORTS_TIMEOUT_S = 5.0


class Siblings(Protocol):
    """Other processes that serve at the same address, before the same engine."""

    async def abort(self, request_id: str | None) -> bool:
        """`Engine.abort_here` in each of them; whether one had it."""

    async def families(self) -> list[Families]:
        """`Metrics.families` of each."""


def create_app(
    engine: Engine,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    metrics: Metrics | None = None,
    siblings: Siblings | None = None,
) -> FastAPI:
    """The sidecar before one engine.

    Args:
        engine: used, watched and closed by the app, within the event loop that serves it.
        limits: what is accepted; the defaults where None.
        api_key: the bearer key that callers need (not on `/healthz` and `/readyz`); None needs none.
        metrics: where it counts; None makes some.
        siblings: what else serves the same callers; None where nothing does.
    """
    limits = limits or Limits()
    metrics = metrics or Metrics()
    # Whoever is asked for what all processes count does not ask here.
    metrics.engine_ready.set_function(lambda: engine.status.phase == "ready")
    flight = Flight(limits.max_in_flight, metrics)
    bodies, held = Bodies(limits), Held(limits.max_held_bytes, metrics)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        watch = asyncio.create_task(engine.watch())
        yield
        watch.cancel()
        # uvicorn cancels what its grace left over and does not wait: the aborts are on their way.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORTS_TIMEOUT_S):
                while len(flight):
                    await asyncio.sleep(0.05)
        await engine.close()

    app = FastAPI(
        title="sglang-topp",
        version=version("sglang-topp"),
        lifespan=lifespan,
        redirect_slashes=False,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
    )
    app.add_middleware(RequireKey, key=api_key, metrics=metrics)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(SglangToppError, _known_error)
    app.add_exception_handler(Exception, _known_error)

    @app.post(
        "/rollouts",
        response_model=None,
        responses={200: {"model": RolloutsAnswer, "content": _streams(ROLLOUTS, "RolloutRecord")}},
        openapi_extra=_body(RolloutRequest),
    )
    async def rollouts() -> Response:
        """Samples with their candidate sets: one JSON, or, with `stream`, one message each as they finish,
        and last `{"done": true, "rollouts": N}`. Messages are lines, or frames where `Accept` names that
        media type. Hanging up aborts them."""
        return Exchange(ROLLOUTS, engine, limits, bodies, flight, held, metrics)

    @app.post(
        "/scores",
        response_model=None,
        responses={200: {"model": ScoresAnswer, "content": _streams(SCORES, "ScoreRecord")}},
        openapi_extra=_body(ScoreBody),
    )
    async def scores() -> Response:
        """The log-probs and candidate sets of given sequences: one JSON, or, with `stream`, one message each,
        as for rollouts, and last `{"done": true, "scores": N}`. Hanging up aborts them."""
        return Exchange(SCORES, engine, limits, bodies, flight, held, metrics)

    @app.post("/abort", openapi_extra=_body(AbortRequest))
    async def abort(request: Request) -> AbortAnswer:
        """Stops a request of `POST /rollouts` in the engine, or all that the engine has. What becomes of each
        sample is what its request says (`on_abort`). Answers once they have stopped."""
        try:
            async with bodies.read(request.headers, request.receive) as body:
                order = parse_abort(body)
        except HungUpError:
            raise BadRequestError("the body: the connection ended before it", status=400) from None
        orders = [engine.abort_here(order.request_id)]
        if siblings is not None:
            orders.append(siblings.abort(order.request_id))
        if not any(await asyncio.gather(*orders)):
            await engine.abort(order.request_id)
        return AbortAnswer()

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """200 while the process lives."""
        return {"status": "ok"}

    @app.get("/readyz")
    async def readyz() -> dict[str, str]:
        """200 while the engine answers and is patched."""
        status = engine.status
        if status.phase != "ready":
            raise ServerError(status.reason, status=503)
        return {"status": "ok"}

    @app.get("/info")
    async def info() -> Info:
        """Who serves here, with what, and how much it takes."""
        status = engine.status
        return Info(
            version=app.version,
            ready=status.phase == "ready",
            reason=status.reason,
            engine=EngineInfo(
                model_path=status.model_path,
                sglang_version=status.sglang_version,
                weight_version=status.weight_version,
                model=None if status.model is None else ModelInfo.of(status.model),
            ),
            patch=PatchInfo(
                active=status.is_patched,
                version=status.patch.get("version"),
                seams=status.patch.get("seams"),
                problems=status.problems,
            ),
            limits=LimitsInfo.of(limits),
        )

    @app.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """For Prometheus."""
        others = [] if siblings is None else await siblings.families()
        return Response(metrics.text(others), media_type=CONTENT_TYPE_LATEST)

    return app


def _streams(work: Work, record: str) -> dict[str, Any]:
    """The forms of a stream, for the OpenAPI page."""
    return {
        NDJSON: {"schema": {"type": "string", "description": f"With stream: a {record} on each line."}},
        work.media_type: {"schema": {"type": "string", "format": "binary"}},
    }


def _body(kind: type[BaseModel]) -> dict[str, Any]:
    """The body that a route takes, for the OpenAPI page."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette itself refuses: no such path, no such method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    known = BadRequestError(message, status=error.status_code)
    return JSONResponse(answer_of(known), error.status_code, headers=error.headers)


async def _known_error(request: Request, error: Exception) -> Response:
    known = as_known_error(error)
    return JSONResponse(answer_of(known), status_of(known), headers_of(known))
