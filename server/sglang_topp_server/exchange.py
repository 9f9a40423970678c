"""RolloutExchange: one `POST /rollouts`, from its headers to the last byte of its answer.

It is the response object of the route, and does its own reading and sending: a place in flight is held
from before the body is read until the answer is out, and a caller that hangs up is heard at any moment
between. (Starlette's StreamingResponse leaves the generator of a broken stream to the garbage collector.)
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang_topp.errors import (
    BadRequestError,
    OverloadedError,
    RequestTimeoutError,
    ServerError,
    SglangToppError,
    WireError,
)
from sglang_topp_client.record import to_record
from sglang_topp_server.admission import check_admissible
from sglang_topp_server.engine import Engine, FailedPrompt
from sglang_topp_server.flight import Flight
from sglang_topp_server.limits import Limits
from sglang_topp_server.metrics import Metrics
from sglang_topp_server.problems import answer_of, as_known_error, headers_of, status_of
from sglang_topp_server.schema import RolloutRequest, parse_request

__all__ = ["RolloutExchange"]

# A body this long takes milliseconds to check; the other connections should not wait for that.
_OFF_LOOP_BYTES = 1 << 18

_log = logging.getLogger(__name__)


class _HungUpError(Exception):
    """The caller has closed the connection: there is nobody to answer."""


class RolloutExchange(Response):
    """The whole of one request.

    Args:
        engine: makes the samples.
        limits: what is accepted.
        flight: where it takes a place.
        metrics: where it is counted.
    """

    def __init__(self, engine: Engine, limits: Limits, flight: Flight, metrics: Metrics) -> None:
        super().__init__()
        self._engine, self._limits, self._flight, self._metrics = engine, limits, flight, metrics
        self._is_started = self._is_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        start = time.monotonic()
        try:
            with self._flight:
                outcome = await self._run(Headers(scope=scope), receive, send)
                self._metrics.requests.labels(outcome).inc()
                self._metrics.request_seconds.observe(time.monotonic() - start)
        except OverloadedError as error:
            self._metrics.count_refusal(error)
            await self._send_error(send, error)

    async def _run(self, headers: Headers, receive: Receive, send: Send) -> str:
        """Answer; returns the outcome that is counted."""
        is_admitted = False
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                body = await _read_body(headers, receive, self._limits.max_body_bytes)
                if is_large := len(body) >= _OFF_LOOP_BYTES:
                    request = await asyncio.to_thread(parse_request, body, self._limits)
                else:
                    request = parse_request(body, self._limits)
                del body
                model = await self._engine.require_ready()
                check = partial(
                    check_admissible, request, model, takes_grammars=self._engine.status.takes_grammars
                )
                if is_large:
                    await asyncio.to_thread(check)
                else:
                    check()
                is_admitted = True
                answer = self._answer_lines if request.stream else self._answer_whole
                return await _unless_hung_up(asyncio.create_task(answer(request, send)), receive)
        except _HungUpError:
            return "aborted"
        except TimeoutError:
            error: SglangToppError = RequestTimeoutError(
                f"it took longer than this server's limit of {self._limits.timeout_s:g} s"
            )
        except asyncio.CancelledError:
            error = ServerError("the sidecar is stopping", status=503)
        except Exception as cause:
            error = as_known_error(cause)
            if status_of(error) == 500:
                _log.exception("a request failed in the sidecar itself")
        self._metrics.count_error(error)
        await self._send_error(send, error)
        return "failed" if is_admitted else "rejected"

    async def _answer_whole(self, request: RolloutRequest, send: Send) -> str:
        """One JSON, in the order of the request: every sample, or an error."""
        records: dict[tuple[int, int], bytes] = {}
        async with _own_time_limit(request), aclosing(self._engine.samples(request)) as samples:
            async for sample in samples:
                if isinstance(sample, FailedPrompt):
                    raise sample.error
                records[sample.prompt_index, sample.sample_index] = to_json(to_record(sample)) + b","
                self._metrics.count_sample(sample)
                # Samples that finish together must not keep the loop from everything else meanwhile.
                await asyncio.sleep(0)
        expected = [(one.prompt_index, at) for one in request.wanted for at in one.samples]
        if sorted(records) != expected:
            raise WireError("rollouts", f"got {len(records)} samples, expected {len(expected)}")
        parts = [b'{"rollouts":[', *(records.pop(at) for at in expected)]
        parts[-1] = parts[-1][:-1] + b"]}"
        await self._start(send, "application/json", length=sum(map(len, parts)))
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "ok"

    async def _answer_lines(self, request: RolloutRequest, send: Send) -> str:
        """NDJSON. The status waits for the first sample: where no prompt succeeds, it is that of the first
        failure; where one has, failures are lines."""
        failures: list[FailedPrompt] = []
        num_sent = 0
        async with _own_time_limit(request), aclosing(self._engine.samples(request)) as items:
            async for item in items:
                if isinstance(item, FailedPrompt):
                    failures.append(item)
                    if self._is_started:
                        await self._send_failure(send, item)
                    continue
                if not self._is_started:
                    await self._start(send, "application/x-ndjson")
                    for failure in failures:
                        await self._send_failure(send, failure)
                await self._send_line(send, to_json(to_record(item)))
                self._metrics.count_sample(item)
                num_sent += 1
                await asyncio.sleep(0)
        if not self._is_started:
            raise failures[0].error
        await self._send_line(send, _encode({"done": True, "rollouts": num_sent}))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "partial" if failures else "ok"

    async def _start(self, send: Send, media_type: str, length: int | None = None) -> None:
        headers = [(b"content-type", media_type.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        self._is_started, self._is_stream = True, length is None
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_line(self, send: Send, line: bytes) -> None:
        await send({"type": "http.response.body", "body": line + b"\n", "more_body": True})

    async def _send_failure(self, send: Send, failed: FailedPrompt) -> None:
        self._metrics.count_error(failed.error)
        await self._send_line(send, _encode({**answer_of(failed.error), "prompt_index": failed.prompt_index}))

    async def _send_error(self, send: Send, error: SglangToppError) -> None:
        """The error as the answer, or as the last line of a stream, which without its end mark does not
        pass as complete. A JSON that has begun can only be cut off: raising makes the server do that."""
        if self._is_started:
            if not self._is_stream:
                raise error
            await self._send_line(send, _encode(answer_of(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        body = _encode(answer_of(error))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **headers_of(error),
        }
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status_of(error), "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _read_body(headers: Headers, receive: Receive, max_bytes: int) -> bytes:
    """The whole body, counted as it arrives: a chunked one declares no length.

    Raises:
        BadRequestError: 413, it is longer than `max_bytes`.
    """
    declared = headers.get("content-length", "")
    too_large = BadRequestError(
        f"the body: got {declared or 'more'} bytes, expected at most {max_bytes}", status=413
    )
    if declared.isascii() and declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _HungUpError
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > max_bytes:
            raise too_large
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _unless_hung_up(work: asyncio.Task[str], receive: Receive) -> str:
    """The result of `work`, which is cancelled, and waited for, when the caller hangs up first."""
    # The body has been read: what comes next is the end of the connection.
    hang_up = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({work, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise _HungUpError
        return work.result()
    finally:
        work.cancel()
        hang_up.cancel()
        await asyncio.wait({work, hang_up})
        if not work.cancelled():
            work.exception()


@asynccontextmanager
async def _own_time_limit(request: RolloutRequest) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(request.timeout_s):
            yield
    except TimeoutError:
        raise RequestTimeoutError(
            f"timeout_s: {request.timeout_s} s passed before every sample finished"
        ) from None


def _encode(answer: dict[str, Any]) -> bytes:
    """Small answers, whatever an engine's error may contain. (Records go through `to_json`, which takes a
    tenth of the time over a megabyte of base64.)"""
    return json.dumps(answer, separators=(",", ":")).encode()
