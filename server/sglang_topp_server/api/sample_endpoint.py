"""SampleEndpoint: serve one `POST /rollouts` or `POST /scores` request.

The route returns a `SampleEndpoint` as its Starlette response. When Starlette calls this response, the
response reads the request body, runs the request, and sends the answer. So the response knows exactly how
long the request is in flight, and notices if the caller disconnects while the engine generates. Starlette's
StreamingResponse would leave the generator of a broken stream open until the generator is garbage-collected.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sglang_topp.errors import (
    OverloadedError,
    RequestTimeoutError,
    ServerError,
    SglangToppError,
    WireError,
)
from sglang_topp_client import Rollout, Score
from sglang_topp_client.wire.records import MEDIA_TYPES
from sglang_topp_server.api.encodings import Encoding, SampleJson, accepted_encoding, rechunk
from sglang_topp_server.api.recent_rollouts import RecentRollouts
from sglang_topp_server.engine import EngineClient, FailedPrompt, Result
from sglang_topp_server.error_responses import as_sglang_topp_error, error_body, error_headers, http_status
from sglang_topp_server.limits import (
    BodyReader,
    ConcurrencyLimit,
    MemoryLimit,
    MemoryShare,
    num_bytes_of,
)
from sglang_topp_server.metrics import Metrics
from sglang_topp_server.requests import SampleCall, parse_rollouts, parse_scores
from sglang_topp_server.settings import Limits

# Parsing a body or encoding a sample of this size or more takes milliseconds. A thread does this work, so
# that the event loop can serve other connections.
_OFF_LOOP_BYTES = 1 << 18
_LAST_MESSAGE_TIMEOUT_S = 1.0
# The format of `traceparent` (https://www.w3.org/TR/trace-context/). Later versions of the W3C format may
# append fields, so this regular expression accepts more fields at the end.
_TRACE_PARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_MAX_TRACE_STATE_CHARS = 512

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndpointSpec:
    """How one route differs from the other.

    Attributes:
        name: the JSON field that holds the list of results if the answer is not a stream. In a stream's last
            message, the field holds the number of results.
        result_noun: the singular noun for a result, in error messages.
        index_field: in a stream's error message, the field that holds the index of the failed prompt.
        media_type: the media type of a stream that consists of binary frames.
        parse: a function that parses a request body.
    """

    name: str
    result_noun: str
    index_field: str
    media_type: str
    parse: Callable[[bytes | bytearray, Limits], SampleCall]


ROLLOUTS = EndpointSpec("rollouts", "sample", "prompt_index", MEDIA_TYPES[Rollout], parse_rollouts)
SCORES = EndpointSpec("scores", "sequence", "sequence_index", MEDIA_TYPES[Score], parse_scores)


class Shared:
    """The engine, the limits, and the metrics that all requests of one sidecar share.

    Args:
        engine: generates the samples.
        limits: the request limits.
        num_recent: how many finished rollouts are kept for `GET /view`.
    """

    def __init__(self, engine: EngineClient, limits: Limits, num_recent: int) -> None:
        self.engine, self.limits = engine, limits
        self.metrics = Metrics()
        self.metrics.engine_ready.set_function(lambda: engine.status.phase == "ready")
        self.bodies = BodyReader(limits)
        self.concurrency = ConcurrencyLimit(limits.max_in_flight, self.metrics)
        self.memory = MemoryLimit(limits.max_held_bytes, self.metrics)
        self.recent = RecentRollouts(num_recent)


class SampleEndpoint(Response):
    """The response object that reads and answers one request of `POST /rollouts` or `POST /scores`."""

    def __init__(self, spec: EndpointSpec, shared: Shared) -> None:
        super().__init__()
        self._spec, self._shared, self._metrics = spec, shared, shared.metrics
        self._encoding: Encoding = Encoding()
        self._is_started = self._is_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request. This is the ASGI entry point."""
        start = time.monotonic()
        headers, shared = Headers(scope=scope), self._shared
        self._encoding = accepted_encoding(headers, self._spec.media_type)
        is_admitted = False
        try:
            # Refuse the request before its body is read if the limit is reached; `admit` checks again.
            shared.concurrency.require_place()
            request = await self._read(Request(scope, receive))
            with shared.concurrency.admit(sum(len(one.samples) for one in request.wanted)):
                model = await shared.engine.require_ready()
                # Check the request in a thread, because checking millions of token ids takes
                # milliseconds.
                survives_grammars = shared.engine.status.survives_grammars
                await asyncio.to_thread(request.check, model, survives_grammars)
                is_admitted = True
                outcome = await self._answer(request, _trace_of(headers), receive, send)
            error: SglangToppError | None = None
        except ClientDisconnect:
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
        if error is not None and self._is_stream:
            await self._end_stream(send, error)
        elif error is not None and not self._is_started:
            answer = JSONResponse(error_body(error), http_status(error), error_headers(error))
            await answer(scope, receive, send)
        # A JSON answer that has begun cannot report an error, because its status is already sent. It stays
        # incomplete, and uvicorn closes the connection.
        if is_admitted or not isinstance(error, OverloadedError):
            self._metrics.request_seconds.observe(time.monotonic() - start)

    async def _read(self, request: Request) -> SampleCall:
        async with self._shared.bodies.read(request) as body:
            if len(body) < _OFF_LOOP_BYTES:
                return self._spec.parse(body, self._shared.limits)
            return await asyncio.to_thread(self._spec.parse, body, self._shared.limits)

    async def _answer(self, request: SampleCall, trace: dict[str, str], receive: Receive, send: Send) -> str:
        """Answer the request, and return the outcome for the metrics."""
        finished: asyncio.Queue[Result | None] = asyncio.Queue()
        with self._shared.memory.share() as share:
            task = asyncio.create_task(self._in_time(request, share, finished, send))
            collecting = asyncio.create_task(self._shared.engine.collect(request, share, trace, finished))
            # After the body, the caller's disconnect is the only ASGI message that can still arrive.
            disconnect = asyncio.ensure_future(receive())
            try:
                ends: set[asyncio.Future[Any]] = {task, disconnect, share.excess}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if share.excess.done():
                    raise share.excess.result()
                if not task.done():
                    raise ClientDisconnect
                return task.result()
            finally:
                for each in (task, collecting, disconnect):
                    each.cancel()
                await asyncio.wait({task, collecting, disconnect})
                if not task.cancelled():
                    task.exception()

    async def _in_time(
        self, request: SampleCall, share: MemoryShare, finished: asyncio.Queue[Result | None], send: Send
    ) -> str:
        """Send the answer. The caller's time limit covers its last byte."""
        try:
            async with asyncio.timeout(request.body.timeout_s) as limit:
                if request.body.stream:
                    return await self._answer_stream(share, finished, send)
                return await self._answer_whole(request, finished, send)
        except TimeoutError:
            if not limit.expired():  # an error of the engine's, not this limit
                raise
            raise RequestTimeoutError(
                f"timeout_s: {request.body.timeout_s} s passed before every {self._spec.result_noun} finished"
            ) from None

    async def _answer_whole(
        self, request: SampleCall, finished: asyncio.Queue[Result | None], send: Send
    ) -> str:
        """Send all samples as one JSON object, in the order of the prompts. Raise a failed prompt's error."""
        records: dict[tuple[int, int], SampleJson] = {}
        while (sample := await finished.get()) is not None:
            if isinstance(sample, FailedPrompt):
                raise sample.error
            records[_place_of(sample)] = SampleJson(sample)
            self._count(sample)
            del sample
            # Let other tasks run after each sample, so that many samples that finish together do not
            # block the event loop.
            await asyncio.sleep(0)
        expected = [(one.prompt_index, at) for one in request.wanted for at in one.samples]
        if sorted(records) != expected:
            raise WireError(self._spec.name, f"got {len(records)}, expected {len(expected)}")
        opening = f'{{"{self._spec.name}":['.encode()
        length = len(opening + b"]}") + len(records) - 1 + sum(map(len, records.values()))
        await self._start(send, "application/json", [(b"content-length", str(length).encode())])
        await self._send(send, _whole(opening, records, expected))
        await _end(send)
        return "ok"

    async def _answer_stream(
        self, share: MemoryShare, finished: asyncio.Queue[Result | None], send: Send
    ) -> str:
        """Send one message per sample, in the encoding that the caller accepts.

        The response starts with status 200 when the first sample finishes. A stream that has started carries
        one error message for each failed prompt. If no sample finishes, the prompt that fails first
        determines the response's status.
        """
        failures: list[FailedPrompt] = []
        num_sent = 0
        while (item := await finished.get()) is not None:
            if isinstance(item, FailedPrompt):
                failures.append(item)
                if self._is_stream:
                    await self._send_failure(send, item)
                continue
            if not self._is_stream:
                self._is_stream = True
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
            await self._send(send, sample)
            del sample
            share.change(-num_bytes)
            num_sent += 1
        if not self._is_stream:
            raise failures[0].error
        await self._send(send, [self._encoding.message({"done": True, self._spec.name: num_sent})])
        await _end(send)
        return "partial" if failures else "ok"

    def _count(self, sample: Rollout | Score) -> None:
        self._metrics.count_sample(sample)
        self._shared.recent.add(sample)

    async def _start(self, send: Send, media_type: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._is_started = True
        headers = [(b"content-type", media_type.encode()), *headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send(self, send: Send, chunks: Iterable[bytes]) -> None:
        """Send the bytes of `chunks`. If the caller reads slowly, at most one chunk waits in memory."""
        for chunk in rechunk(chunks):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            # If the caller reads fast, `send` returns at once. Let other tasks run after each chunk, so that
            # this loop does not block the event loop.
            await asyncio.sleep(0)

    async def _send_failure(self, send: Send, failed: FailedPrompt) -> None:
        self._metrics.count_error(failed.error)
        body = {**error_body(failed.error), self._spec.index_field: failed.prompt_index}
        await self._send(send, [self._encoding.message(body)])

    async def _end_stream(self, send: Send, error: SglangToppError) -> None:
        """Send an error as the last message of a stream.

        If the caller has stopped reading, the stream ends without this message. Clients still notice the
        failure, because they reject a stream that lacks its last message.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_MESSAGE_TIMEOUT_S):
                await self._send(send, [self._encoding.message(error_body(error))])
                await _end(send)


async def _end(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _place_of(sample: Rollout | Score) -> tuple[int, int]:
    """Return the index of a sample's prompt, and the sample's index among that prompt's samples."""
    if isinstance(sample, Score):
        return sample.sequence_index, 0
    return sample.prompt_index, sample.sample_index


def _whole(
    opening: bytes, records: dict[tuple[int, int], SampleJson], order: Iterable[tuple[int, int]]
) -> Iterable[bytes]:
    """Yield the answer's JSON in chunks, with records in `order`. Free each record after its last chunk."""
    for at in order:
        yield opening
        yield from records.pop(at)
        opening = b","
    yield b"]}"


def _trace_of(headers: Headers) -> dict[str, str]:
    """Return the caller's W3C trace context, for the engine; empty without a valid `traceparent`."""
    parent, state = headers.get("traceparent", ""), headers.get("tracestate", "")
    if not _TRACE_PARENT.fullmatch(parent):
        return {}
    is_valid = state and state.isascii() and state.isprintable() and len(state) <= _MAX_TRACE_STATE_CHARS
    return {"traceparent": parent} | ({"tracestate": state} if is_valid else {})
