"""SampleEndpoint: serve one `POST /rollouts` or `POST /scores` request.

The route returns a `SampleEndpoint` as its Starlette response. When Starlette calls this response, the
response reads the request body, runs the request, and sends the answer. So the response knows exactly how
long the request is in flight, and notices if the caller disconnects while the engine generates. Starlette's
StreamingResponse would leave the generator of a broken stream open until the generator is garbage-collected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang_topp.errors import (
    OverloadedError,
    RequestTimeoutError,
    ServerError,
    SglangToppError,
    WireError,
)
from sglang_topp_client import Rollout, Score
from sglang_topp_server.api.encodings import (
    Encoding,
    JsonLines,
    SampleJson,
    accepted_encoding,
    encode,
    rechunk,
)
from sglang_topp_server.api.recent_rollouts import RecentRollouts
from sglang_topp_server.api.sample_endpoint_spec import EndpointSpec, place_of
from sglang_topp_server.engine.client import EngineClient, FailedPrompt
from sglang_topp_server.engine.trace_context import forward_trace
from sglang_topp_server.error_responses import as_sglang_topp_error, error_body, error_headers, http_status
from sglang_topp_server.limits import (
    BodyReader,
    ConcurrencyLimit,
    DisconnectedError,
    MemoryLimit,
    MemoryShare,
    num_bytes_of,
)
from sglang_topp_server.metrics import Metrics
from sglang_topp_server.schemas.requests import SampleCall
from sglang_topp_server.settings import Limits

__all__ = ["SampleEndpoint"]

# Parsing a body or encoding a sample of this size or more takes milliseconds. A thread does this work, so
# that the event loop can serve other connections.
_OFF_LOOP_BYTES = 1 << 18
_LAST_MESSAGE_TIMEOUT_S = 1.0

_log = logging.getLogger(__name__)


class SampleEndpoint(Response):
    """The response object that reads and answers one request of `POST /rollouts` or `POST /scores`.

    Args:
        spec: the route's body parser, request check, JSON field names, and media type.
        engine: generates the samples.
        limits: the request limits.
        bodies: reads the request's body.
        concurrency: limits the samples in flight.
        memory: limits the memory of finished samples that are not sent yet.
        metrics: counts the request.
        recent: keeps the finished rollouts for `GET /view`; None if `GET /view` is off.
    """

    def __init__(
        self,
        spec: EndpointSpec,
        engine: EngineClient,
        limits: Limits,
        bodies: BodyReader,
        concurrency: ConcurrencyLimit,
        memory: MemoryLimit,
        metrics: Metrics,
        recent: RecentRollouts | None = None,
    ) -> None:
        super().__init__()
        self._spec = spec
        self._engine, self._limits, self._metrics = engine, limits, metrics
        self._bodies, self._concurrency, self._memory = bodies, concurrency, memory
        self._recent = recent
        self._encoding: Encoding = JsonLines()
        self._is_started = self._is_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request. This is the ASGI entry point."""
        with forward_trace(Headers(scope=scope)):
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = time.monotonic()
        self._encoding = accepted_encoding(Headers(scope=scope), self._spec.media_type)
        is_admitted = False
        try:
            # Refuse the request before its body is read if the limit is reached; `admit` checks again.
            self._concurrency.require_place()
            request = await self._read(Headers(scope=scope), receive)
            with self._concurrency.admit(sum(len(one.samples) for one in request.wanted)):
                model = await self._engine.require_ready()
                # Check the request in a thread, because checking millions of token ids takes
                # milliseconds.
                survives_grammars = self._engine.status.survives_grammars
                await asyncio.to_thread(self._spec.check, request, model, survives_grammars)
                is_admitted = True
                outcome = await self._answer(request, receive, send)
            error: SglangToppError | None = None
        except DisconnectedError:
            error, outcome = None, "aborted"
        except asyncio.CancelledError:
            error = ServerError("the sidecar is stopping", status=503)
        except Exception as cause:
            error = as_sglang_topp_error(cause)
            if http_status(error) == 500:
                _log.exception("a request failed in the sidecar itself")
        if error is not None:
            outcome = "failed" if is_admitted else "slow" if http_status(error) == 408 else "rejected"
            self._metrics.count_error(error)
        self._metrics.requests.labels(outcome).inc()
        if error is not None:
            await self._send_error(send, error)
        if is_admitted or not isinstance(error, OverloadedError):
            self._metrics.request_seconds.observe(time.monotonic() - start)

    async def _read(self, headers: Headers, receive: Receive) -> SampleCall[Any]:
        async with self._bodies.read(headers, receive) as body:
            if len(body) < _OFF_LOOP_BYTES:
                return self._spec.parse(body, self._limits)
            return await asyncio.to_thread(self._spec.parse, body, self._limits)

    async def _answer(self, request: SampleCall[Any], receive: Receive, send: Send) -> str:
        """Answer the request, and return the outcome for the metrics."""
        answer = self._answer_stream if request.body.stream else self._answer_whole
        with self._memory.share() as share:
            task = asyncio.create_task(answer(request, share, send))
            # After the body, the caller's disconnect is the only ASGI message that can still arrive.
            disconnect = asyncio.ensure_future(receive())
            try:
                ends: set[asyncio.Future[Any]] = {task, disconnect, share.excess}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if share.excess.done():
                    raise share.excess.result()
                if not task.done():
                    raise DisconnectedError
                return task.result()
            finally:
                task.cancel()
                disconnect.cancel()
                await asyncio.wait({task, disconnect})
                if not task.cancelled():
                    task.exception()

    async def _answer_whole(self, request: SampleCall[Any], share: MemoryShare, send: Send) -> str:
        """Send all samples as one JSON object, in the order of the prompts. Raise a failed prompt's error."""
        records: dict[tuple[int, int], SampleJson] = {}
        async with self._own_time_limit(request):
            async with aclosing(self._engine.samples(request, share)) as samples:
                async for sample in samples:
                    if isinstance(sample, FailedPrompt):
                        raise sample.error
                    records[place_of(sample)] = SampleJson(sample)
                    self._count(sample)
                    del sample
                    # Let other tasks run after each sample, so that many samples that finish together do not
                    # block the event loop.
                    await asyncio.sleep(0)
            expected = [(one.prompt_index, at) for one in request.wanted for at in one.samples]
            if sorted(records) != expected:
                raise WireError(self._spec.name, f"got {len(records)}, expected {len(expected)}")
            opening = f'{{"{self._spec.name}":['.encode()
            frame = len(opening + b"]}") + len(records) - 1
            await self._start(send, "application/json", length=frame + sum(map(len, records.values())))
            await self._send_chunks(send, _whole(opening, records, expected))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "ok"

    async def _answer_stream(self, request: SampleCall[Any], share: MemoryShare, send: Send) -> str:
        """Send one message per sample, in the encoding that the caller accepts.

        The response starts with status 200 when the first sample finishes. A stream that has started carries
        one error message for each failed prompt. If no sample finishes, the prompt that fails first
        determines the response's status.
        """
        failures: list[FailedPrompt] = []
        num_sent = 0
        async with self._own_time_limit(request), aclosing(self._engine.samples(request, share)) as items:
            async for item in items:
                if isinstance(item, FailedPrompt):
                    failures.append(item)
                    if self._is_started:
                        await self._send_failure(send, item)
                    continue
                if not self._is_started:
                    await self._start(send, self._encoding.media_type)
                    for failure in failures:
                        await self._send_failure(send, failure)
                num_bytes = num_bytes_of(item)
                if num_bytes < _OFF_LOOP_BYTES:
                    sample = self._encoding.sample(item)
                else:
                    sample = await asyncio.to_thread(self._encoding.sample, item)
                self._count(item)
                del item
                await self._send_chunks(send, sample)
                del sample
                share.remove(num_bytes)
                num_sent += 1
            if not self._is_started:
                raise failures[0].error
            await self._send_message(send, {"done": True, self._spec.name: num_sent})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "partial" if failures else "ok"

    def _count(self, sample: Rollout | Score) -> None:
        self._metrics.count_sample(sample)
        if self._recent is not None:
            self._recent.add(sample)

    @asynccontextmanager
    async def _own_time_limit(self, request: SampleCall[Any]) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(request.body.timeout_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():  # an error of the engine's, not this limit
                raise
            raise RequestTimeoutError(
                f"timeout_s: {request.body.timeout_s} s passed before every {self._spec.result_noun} finished"
            ) from None

    async def _start(self, send: Send, media_type: str, length: int | None = None) -> None:
        headers = [(b"content-type", media_type.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        self._is_started, self._is_stream = True, length is None
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_chunks(self, send: Send, chunks: Iterable[bytes]) -> None:
        """Send the bytes of `chunks`. If the caller reads slowly, at most one chunk waits in memory."""
        for chunk in rechunk(chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            # If the caller reads fast, `send` returns at once. Let other tasks run after each chunk, so that
            # this loop does not block the event loop.
            await asyncio.sleep(0)

    async def _send_message(self, send: Send, answer: dict[str, Any]) -> None:
        await send({"type": "http.response.body", "body": self._encoding.message(answer), "more_body": True})

    async def _send_failure(self, send: Send, failed: FailedPrompt) -> None:
        self._metrics.count_error(failed.error)
        await self._send_message(
            send, {**error_body(failed.error), self._spec.index_field: failed.prompt_index}
        )

    async def _send_error(self, send: Send, error: SglangToppError) -> None:
        """Send the error as the response, or as the last message of a stream that has started.

        If the sidecar cannot send the last message in time, the stream ends without one. Clients still notice
        the failure, because they reject a stream that lacks its last message. A JSON response that has begun
        cannot report an error, because its status is already sent. If a JSON response fails after it has
        begun, it stays incomplete, and uvicorn closes the connection.
        """
        if self._is_started:
            if self._is_stream:
                # Limit the time for sending the error, because the caller may have stopped reading.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_MESSAGE_TIMEOUT_S):
                        await self._send_message(send, error_body(error))
                        await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        body = encode(error_body(error))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **error_headers(error),
        }
        if http_status(error) == 408:
            headers["connection"] = "close"
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": http_status(error), "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _whole(
    opening: bytes, records: dict[tuple[int, int], SampleJson], order: Iterable[tuple[int, int]]
) -> Iterable[bytes]:
    """Yield the answer's JSON in chunks, with records in `order`. Free each record after its last chunk."""
    for at in order:
        yield opening
        yield from records.pop(at)
        opening = b","
    yield b"]}"
