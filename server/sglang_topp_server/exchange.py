"""Exchange: one `POST /rollouts` or `/scores`, from its headers to the last byte of its answer.

It is the response object of the route, and does its own reading and sending: a place in flight is held
from when the body is there until the answer is out, and a caller that hangs up is heard at any moment
between. (Starlette's StreamingResponse leaves the generator of a broken stream to the garbage collector.)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
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
from sglang_topp_server.body import Bodies, HungUpError
from sglang_topp_server.connection import Connection, connection_of
from sglang_topp_server.engine import Engine, FailedPrompt
from sglang_topp_server.flight import Flight
from sglang_topp_server.forms import Form, Lines, accepted_form, encode
from sglang_topp_server.held import Held, Share, num_bytes_of
from sglang_topp_server.limits import Limits
from sglang_topp_server.metrics import Metrics
from sglang_topp_server.pieces import Record, in_pieces
from sglang_topp_server.problems import answer_of, as_known_error, headers_of, status_of
from sglang_topp_server.schema import SampleBody
from sglang_topp_server.work import Work, place_of

__all__ = ["Exchange"]

# A body this long takes milliseconds to check; the other connections should not wait for that.
_OFF_LOOP_BYTES = 1 << 18

_log = logging.getLogger(__name__)


class Exchange(Response):
    """The whole of one request.

    Args:
        work: what is asked for.
        engine: makes the samples.
        limits: what is accepted.
        bodies: reads its body.
        flight: where it takes a place.
        held: where what waits for its caller is counted.
        metrics: where it is counted.
    """

    def __init__(
        self,
        work: Work,
        engine: Engine,
        limits: Limits,
        bodies: Bodies,
        flight: Flight,
        held: Held,
        metrics: Metrics,
    ) -> None:
        super().__init__()
        self._work = work
        self._engine, self._limits, self._metrics = engine, limits, metrics
        self._bodies, self._flight, self._held = bodies, flight, held
        self._connection: Connection | None = None
        self._form: Form = Lines()
        self._is_started = self._is_stream = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        start = time.monotonic()
        self._connection = connection_of(scope)
        self._form = accepted_form(Headers(scope=scope), self._work.media_type)
        is_admitted = False
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                # Before a byte of the body is read, and again when it is there.
                self._flight.require_place()
                request = await self._read(Headers(scope=scope), receive)
                with self._flight:
                    model = await self._engine.require_ready()
                    # A check of millions of ids takes milliseconds.
                    takes_grammars = self._engine.status.takes_grammars
                    await asyncio.to_thread(self._work.check, request, model, takes_grammars)
                    is_admitted = True
                    outcome = await self._answer(request, receive, send)
            error: SglangToppError | None = None
        except HungUpError:
            error, outcome = None, self._hung_up()
        except TimeoutError:
            error = RequestTimeoutError(
                f"it took longer than this server's limit of {self._limits.timeout_s:g} s"
            )
        except asyncio.CancelledError:
            error = ServerError("the sidecar is stopping", status=503)
        except Exception as cause:
            error = as_known_error(cause)
            if status_of(error) == 500:
                _log.exception("a request failed in the sidecar itself")
        if error is not None:
            outcome = "failed" if is_admitted else "slow" if status_of(error) == 408 else "rejected"
            self._metrics.count_error(error)
        self._metrics.requests.labels(outcome).inc()
        if error is not None:
            await self._send_error(send, error)
        if is_admitted or not isinstance(error, OverloadedError):
            self._metrics.request_seconds.observe(time.monotonic() - start)

    async def _read(self, headers: Headers, receive: Receive) -> SampleBody:
        async with self._bodies.read(headers, receive) as body:
            if len(body) < _OFF_LOOP_BYTES:
                return self._work.parse(body, self._limits)
            return await asyncio.to_thread(self._work.parse, body, self._limits)

    async def _answer(self, request: SampleBody, receive: Receive, send: Send) -> str:
        """Returns the outcome that is counted."""
        answer = self._answer_stream if request.stream else self._answer_whole
        with self._held.share() as share:
            work = asyncio.create_task(answer(request, share, send))
            # The body has been read: what comes next is the end of the connection.
            hang_up = asyncio.ensure_future(receive())
            try:
                ends: set[asyncio.Future[Any]] = {work, hang_up, share.excess}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if share.excess.done():
                    raise share.excess.result()
                if not work.done():
                    raise HungUpError
                return work.result()
            finally:
                work.cancel()
                hang_up.cancel()
                await asyncio.wait({work, hang_up})
                if not work.cancelled():
                    work.exception()

    def _hung_up(self) -> str:
        """The outcome where the connection is gone."""
        if self._connection is None or self._connection.why_cut_off is None:
            return "aborted"
        _log.info("a caller's connection was closed: %s", self._connection.why_cut_off)
        return "slow"

    async def _answer_whole(self, request: SampleBody, share: Share, send: Send) -> str:
        """One JSON, in the order of the request: every sample, or an error."""
        records: dict[tuple[int, int], Record] = {}
        async with self._own_time_limit(request):
            async with aclosing(self._engine.samples(request, share)) as samples:
                async for sample in samples:
                    if isinstance(sample, FailedPrompt):
                        raise sample.error
                    records[place_of(sample)] = Record(sample)
                    self._metrics.count_sample(sample)
                    del sample
                    # Samples that finish together must not keep the loop from everything else meanwhile.
                    await asyncio.sleep(0)
            expected = [(one.prompt_index, at) for one in request.wanted for at in one.samples]
            if sorted(records) != expected:
                raise WireError(self._work.name, f"got {len(records)}, expected {len(expected)}")
            opening = f'{{"{self._work.name}":['.encode()
            frame = len(opening + b"]}") + len(records) - 1
            await self._start(send, "application/json", length=frame + sum(map(len, records.values())))
            await self._send_chunks(send, _whole(opening, records, expected))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "ok"

    async def _answer_stream(self, request: SampleBody, share: Share, send: Send) -> str:
        """A message each, in the form that the caller accepts. The status waits for the first sample: where
        no prompt succeeds, it is that of the first failure; where one has, failures are messages."""
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
                    await self._start(send, self._form.media_type)
                    for failure in failures:
                        await self._send_failure(send, failure)
                sample, num_bytes = self._form.sample(item), num_bytes_of(item)
                self._metrics.count_sample(item)
                del item
                await self._send_chunks(send, sample)
                del sample
                share.remove(num_bytes)
                num_sent += 1
            if not self._is_started:
                raise failures[0].error
            await self._send_message(send, {"done": True, self._work.name: num_sent})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        return "partial" if failures else "ok"

    @asynccontextmanager
    async def _own_time_limit(self, request: SampleBody) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(request.timeout_s):
                yield
        except TimeoutError:
            raise RequestTimeoutError(
                f"timeout_s: {request.timeout_s} s passed before every {self._work.one} finished"
            ) from None

    async def _start(self, send: Send, media_type: str, length: int | None = None) -> None:
        headers = [(b"content-type", media_type.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        self._is_started, self._is_stream = True, length is None
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _send_chunks(self, send: Send, chunks: Iterable[bytes]) -> None:
        """Each piece waits until the reader has all but the last one."""
        for piece in in_pieces(chunks):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            # A reader that is never behind would keep the loop from everything else.
            await asyncio.sleep(0)

    async def _send_message(self, send: Send, answer: dict[str, Any]) -> None:
        await send({"type": "http.response.body", "body": self._form.other(answer), "more_body": True})

    async def _send_failure(self, send: Send, failed: FailedPrompt) -> None:
        self._metrics.count_error(failed.error)
        await self._send_message(send, {**answer_of(failed.error), self._work.index: failed.prompt_index})

    async def _send_error(self, send: Send, error: SglangToppError) -> None:
        """The error as the answer, or as the last message of a stream, which without its end mark does not
        pass as complete. A JSON that has begun can only be cut off, and so can a stream whose reader is
        behind: it would not take the message either."""
        if self._is_started:
            if self._connection is None:
                if not self._is_stream:
                    raise error  # which makes any server close the connection
            elif not self._is_stream or self._connection.is_behind:
                self._connection.cut_off(str(error))
                await self._connection.closed.wait()
                return
            await self._send_message(send, answer_of(error))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        body = encode(answer_of(error))
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            **headers_of(error),
        }
        if status_of(error) == 408:
            headers["connection"] = "close"
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status_of(error), "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _whole(
    opening: bytes, records: dict[tuple[int, int], Record], order: Iterable[tuple[int, int]]
) -> Iterable[bytes]:
    """The whole JSON; each record is let go of once it is out."""
    for at in order:
        yield opening
        yield from records.pop(at)
        opening = b","
    yield b"]}"
