"""SampleEndpoint: serve one `POST /rollouts` or `POST /scores` request; Encoding: encode its answer.

`SampleRoutes` (app.py) calls a `SampleEndpoint` as an ASGI app, which reads the request body, runs the
request, and sends the answer. So it knows exactly how long the request is in flight, and notices if the
caller disconnects while the engine generates. Starlette's StreamingResponse would leave the generator of a
broken stream open until the generator is garbage-collected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, TypeVarTuple

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from sglang_topp.errors import (
    OverloadedError,
    RequestTimeoutError,
    ServerError,
    SglangToppError,
    WireError,
)
from sglang_topp_client import Rollout, Score
from sglang_topp_client.transport.http import frame_head
from sglang_topp_client.wire.records import MEDIA_TYPES, to_frame, to_record
from sglang_topp_server.engine import EngineClient, Results
from sglang_topp_server.error_responses import as_sglang_topp_error, error_body, error_headers, http_status
from sglang_topp_server.limits import (
    BodyReader,
    ConcurrencyLimit,
    MemoryLimit,
    MemoryShare,
    RecentRollouts,
    num_bytes_of,
)
from sglang_topp_server.metrics import Metrics
from sglang_topp_server.requests import SampleCall, parse_rollouts, parse_scores
from sglang_topp_server.settings import Limits

NDJSON = "application/x-ndjson"
# Work on a body or a sample of this size or more takes milliseconds. A thread does this work, so that the
# event loop can serve other connections.
_OFF_LOOP_BYTES = 1 << 18
_CHUNK_BYTES = 1 << 16
_LAST_MESSAGE_TIMEOUT_S = 1.0
# A caller's trace context (https://www.w3.org/TR/trace-context/), which the engine continues.
_TRACE_HEADERS = ("traceparent", "tracestate")

_log = logging.getLogger(__name__)
_Arguments = TypeVarTuple("_Arguments")
_Value = TypeVar("_Value")


def to_json(sample: Rollout | Score) -> bytes:
    """Return the JSON record of a finished sample or score, which the client's codecs can decode."""
    return msgspec.json.encode(to_record(sample))


@dataclass(frozen=True)
class Encoding:
    """The encoding of a stream's messages: lines of JSON, or binary frames.

    A frame holds a message's length and then the message: a sample or a score in the binary form of
    `sglang_topp_client`, or JSON.
    """

    media_type: str = NDJSON

    def sample(self, sample: Rollout | Score) -> bytes:
        """Encode a finished sample or score as one message."""
        return self._delimit(to_json(sample) if self.media_type == NDJSON else to_frame(sample))

    def message(self, answer: dict[str, Any]) -> bytes:
        """Encode a message that is not a sample: an error, or the stream's last message."""
        return self._delimit(msgspec.json.encode(answer))

    def _delimit(self, raw: bytes) -> bytes:
        return raw + b"\n" if self.media_type == NDJSON else frame_head(len(raw)) + raw


def accepted_encoding(headers: Headers, framed: str) -> Encoding:
    """Return frames if the `Accept` header names their media type `framed`, and lines of JSON otherwise."""
    accepted = ",".join(headers.getlist("accept")).lower().split(",")
    return Encoding(framed if framed in {one.partition(";")[0].strip() for one in accepted} else NDJSON)


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
        self.bodies = BodyReader(limits)
        self.concurrency = ConcurrencyLimit(limits.max_in_flight)
        self.memory = MemoryLimit(limits.max_held_bytes)
        self.metrics = Metrics()
        self.metrics.engine_ready.set_function(lambda: engine.status.phase == "ready")
        self.metrics.in_flight.set_function(lambda: self.concurrency.num_samples)
        self.metrics.held_bytes.set_function(lambda: self.memory.num_bytes)
        self.recent = RecentRollouts(num_recent)


class SampleEndpoint:
    """The ASGI app that reads and answers one request of `POST /rollouts` or `POST /scores`."""

    def __init__(self, spec: EndpointSpec, shared: Shared) -> None:
        self._spec, self._shared, self._metrics = spec, shared, shared.metrics
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
            async with shared.bodies.read(Request(scope, receive)) as body:
                num_bytes = len(body)
                request = await _off_loop_if_large(num_bytes, self._spec.parse, body, shared.limits)
                del body  # its place is free after this block, so it must not be in memory any more
            with shared.concurrency.admit(sum(len(one.samples) for one in request.wanted)):
                model = await shared.engine.require_ready()
                survives_grammars = shared.engine.status.survives_grammars
                await _off_loop_if_large(num_bytes, request.check, model, survives_grammars)
                is_admitted = True
                trace = {name: headers[name] for name in _TRACE_HEADERS if name in headers}
                outcome = await self._answer(request, trace, receive, send)
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

    async def _answer(self, request: SampleCall, trace: dict[str, str], receive: Receive, send: Send) -> str:
        """Answer the request, and return the outcome for the metrics."""
        finished: Results = asyncio.Queue()
        with self._shared.memory.share() as share:
            if request.body.stream:
                answer = self._answer_stream(share, finished, send)
            else:
                answer = self._answer_whole(request, finished, send)
            task = asyncio.create_task(answer)
            collecting = asyncio.create_task(self._shared.engine.collect(request, share, trace, finished))
            # After the body, the caller's disconnect is the only ASGI message that can still arrive.
            disconnect = asyncio.ensure_future(receive())
            try:
                ends: set[asyncio.Future[Any]] = {task, disconnect, share.excess}
                # The caller's time limit covers the answer's last byte.
                timeout_s = request.body.timeout_s
                await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if share.excess.done():
                    raise share.excess.result()
                if task.done():
                    return task.result()
                if disconnect.done():
                    raise ClientDisconnect
                raise RequestTimeoutError(
                    f"timeout_s: {timeout_s} s passed before every {self._spec.result_noun} finished"
                )
            finally:
                for each in (task, collecting, disconnect):
                    each.cancel()
                await asyncio.wait({task, collecting, disconnect})
                if not task.cancelled():
                    task.exception()

    async def _answer_whole(self, request: SampleCall, finished: Results, send: Send) -> str:
        """Send all samples as one JSON object, in the order of the prompts. Raise a failed prompt's error.

        A sample is encoded only when it is sent, so that memory never holds the whole answer's JSON.
        """
        samples: dict[tuple[int, int], Rollout | Score] = {}
        while (result := await finished.get()) is not None:
            place, sample = result
            if isinstance(sample, SglangToppError):
                raise sample
            samples[place] = sample
            self._count(sample)
            del result, sample
            # Let other tasks run after each sample, so that many samples that finish together do not
            # block the event loop.
            await asyncio.sleep(0)
        expected = [(one.prompt_index, at) for one in request.wanted for at in one.samples]
        if sorted(samples) != expected:
            raise WireError(self._spec.name, f"got {len(samples)}, expected {len(expected)}")
        before = f'{{"{self._spec.name}":['.encode()
        for place in expected:
            sample = samples.pop(place)
            record = await _off_loop_if_large(num_bytes_of(sample), to_json, sample)
            await self._send(send, before + record)
            before = b","
        await self._send(send, b"]}", is_last=True)
        return "ok"

    async def _answer_stream(self, share: MemoryShare, finished: Results, send: Send) -> str:
        """Send one message per sample, in the encoding that the caller accepts.

        The response starts with status 200 when the first sample finishes. A stream that has started carries
        one error message for each failed prompt. If no sample finishes, the prompt that fails first
        determines the response's status.
        """
        failures: list[tuple[int, SglangToppError]] = []
        num_sent = 0
        while (result := await finished.get()) is not None:
            (index, _), sample = result
            if isinstance(sample, SglangToppError):
                failures.append((index, sample))
                if self._is_stream:
                    await self._send_failure(send, index, sample)
                continue
            if not self._is_stream:
                self._is_stream = True
                for failure in failures:
                    await self._send_failure(send, *failure)
            num_bytes = num_bytes_of(sample)
            self._count(sample)
            message = await _off_loop_if_large(num_bytes, self._encoding.sample, sample)
            del result, sample
            await self._send(send, message)
            del message
            share.change(-num_bytes)
            num_sent += 1
        if not self._is_stream:
            raise failures[0][1]
        last = self._encoding.message({"done": True, self._spec.name: num_sent})
        await self._send(send, last, is_last=True)
        return "partial" if failures else "ok"

    def _count(self, sample: Rollout | Score) -> None:
        self._metrics.count_sample(sample)
        self._shared.recent.add(sample)

    async def _send(self, send: Send, raw: bytes, *, is_last: bool = False) -> None:
        """Send a part of the answer in chunks, so that `send` can wait for a caller that reads slowly."""
        if not self._is_started:
            self._is_started = True
            media_type = self._encoding.media_type if self._is_stream else "application/json"
            headers = [(b"content-type", media_type.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, len(raw), _CHUNK_BYTES):
            chunk = raw[start : start + _CHUNK_BYTES]
            has_more = not is_last or start + _CHUNK_BYTES < len(raw)
            await send({"type": "http.response.body", "body": chunk, "more_body": has_more})
            # If the caller reads fast, `send` returns at once. Let other tasks run before the next chunk, so
            # that this loop does not block the event loop. A complete answer must end at once: a time limit
            # would count it as failed.
            if has_more:
                await asyncio.sleep(0)

    async def _send_failure(self, send: Send, index: int, error: SglangToppError) -> None:
        self._metrics.count_error(error)
        body = {**error_body(error), self._spec.index_field: index}
        await self._send(send, self._encoding.message(body))

    async def _end_stream(self, send: Send, error: SglangToppError) -> None:
        """Send an error as the last message of a stream.

        If the caller has stopped reading, the stream ends without this message. Clients still notice the
        failure, because they reject a stream that lacks its last message.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_MESSAGE_TIMEOUT_S):
                await self._send(send, self._encoding.message(error_body(error)), is_last=True)


async def _off_loop_if_large(
    num_bytes: int, function: Callable[[*_Arguments], _Value], *args: *_Arguments
) -> _Value:
    """Call a function that works on `num_bytes`: here, or in a thread if they are many."""
    if num_bytes < _OFF_LOOP_BYTES:
        return function(*args)
    return await asyncio.to_thread(function, *args)
