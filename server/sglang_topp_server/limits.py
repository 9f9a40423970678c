"""The limits of one sidecar: on request bodies, samples in flight, and the memory of answers.

The engine never waits for a slow caller. The sidecar takes each finished sample from it at once, and keeps
the sample in memory until the caller reads it. A request without `stream` holds all of its samples until the
last one has finished. If all requests together hold more than `MemoryLimit` allows, the one that holds the
most ends with an error.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext

from starlette.requests import Request

from sglang_topp.errors import BadRequestError, OverloadedError, SglangToppError, TransportError
from sglang_topp.malloc_trim import LARGE_BYTES, HeapTrimmer
from sglang_topp_client import Rollout, Score
from sglang_topp_server.settings import Limits

# uvicorn buffers this many bytes of any body anyway, so smaller bodies need no place.
_LARGE_BYTES = 1 << 16
_MAX_LARGE_BODIES = 4


class BodyReader:
    """The reader of all request bodies of one server.

    At most four bodies that are, or may become, larger than 64 KiB are in memory at once. Others wait for a
    place in their order of arrival. Slow callers cannot keep the places, because each body must arrive within
    `Limits.io_timeout_s`.

    Args:
        limits: the maximum size and time of a body.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(_MAX_LARGE_BODIES)

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """Yield the whole body, which keeps its place until the `async with` block ends.

        Raises:
            BadRequestError: the body exceeds `max_body_bytes` (413), or takes too long (408).
            ClientDisconnect: the caller disconnected.
        """
        most = self._limits.max_body_bytes
        length = int(request.headers.get("content-length", most))
        if length > most:
            raise _too_long(str(length), most)
        async with nullcontext() if length <= _LARGE_BYTES else self._places:
            yield await self._receive(request, length)

    async def _receive(self, request: Request, max_bytes: int) -> bytearray:
        body, timeout_s = bytearray(), self._limits.io_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                async for part in request.stream():
                    body += part
                    if len(body) > max_bytes:  # chunks may follow a small Content-Length
                        raise _too_long("more", max_bytes)
        except TimeoutError:
            raise BadRequestError(
                f"the body: got {len(body)} bytes in {timeout_s:g} s, expected the whole body in this time",
                status=408,
            ) from None
        return body


def _too_long(got: str, max_bytes: int) -> BadRequestError:
    return BadRequestError(f"the body: got {got} bytes, expected at most {max_bytes}", status=413)


class ConcurrencyLimit:
    """A limit on the samples in flight, over all requests.

    A sample is in flight from the last byte of its request's body to the last byte of the answer.

    Args:
        limit: the number of samples in flight from which on requests are refused.

    Attributes:
        num_samples: the number of samples in flight.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_samples = 0

    def require_place(self) -> None:
        """Raise OverloadedError if the limit is reached."""
        if self.num_samples >= self._limit:
            raise OverloadedError(
                f"{self.num_samples} samples are in flight, expected fewer than {self._limit}; send the"
                " request again later"
            )

    @contextmanager
    def admit(self, num_samples: int) -> Iterator[None]:
        """Count a request's samples as in flight, or raise OverloadedError if the limit is reached before.

        A request below the limit is admitted with all of its samples, so that a large one is never starved.
        """
        self.require_place()
        self.num_samples += num_samples
        try:
            yield
        finally:
            self.num_samples -= num_samples


_BYTES_PER_CANDIDATE = 8
# The approximate number of bytes that a token takes: its log-prob, plus its id as text in the answer's JSON.
_BYTES_PER_TOKEN = 12


def num_bytes_of(sample: Rollout | Score) -> int:
    """Estimate how many bytes of memory a sample or score takes, to within a few percent."""
    if isinstance(sample, Score):
        num_tokens, num_others = len(sample.token_ids), 0
    else:
        num_tokens = len(sample.prompt_ids) + len(sample.output_ids)
        num_others = len(sample.text) + sum(one.values.nbytes for one in sample.token_fields.values())
    num_candidates = 0 if sample.candidates is None else len(sample.candidates.token_ids)
    return num_candidates * _BYTES_PER_CANDIDATE + num_tokens * _BYTES_PER_TOKEN + num_others


class MemoryShare:
    """Counter of the memory that one request's samples take. The constructor needs a running event loop.

    Attributes:
        num_bytes: the number of bytes that the request's samples take.
        excess: a future for the error that ends this request. `MemoryLimit` sets the error if all requests
            together exceed the limit and this request holds the most bytes.
    """

    def __init__(self, limit: MemoryLimit) -> None:
        self._limit = limit
        self.num_bytes = 0
        self.excess: asyncio.Future[SglangToppError] = asyncio.get_running_loop().create_future()

    def change(self, num_bytes: int) -> None:
        """Add `num_bytes`, which may be negative, to the memory that the request holds."""
        self._limit.change(self, num_bytes)


class MemoryLimit:
    """The limit on the memory that the unsent samples of all requests take together.

    Args:
        limit: the maximum number of bytes that all requests together may hold.

    Attributes:
        num_bytes: the number of bytes that all requests together hold.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.num_bytes = self._freed_bytes = 0
        self._trimmer = HeapTrimmer()
        self._shares: set[MemoryShare] = set()

    @contextmanager
    def share(self) -> Iterator[MemoryShare]:
        """Yield a new request's `MemoryShare`.

        When the `with` block ends, the share's bytes are subtracted from the total of all requests.
        """
        share = MemoryShare(self)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.discard(share)
            share.change(-share.num_bytes)
            share.excess.cancel()

    def change(self, share: MemoryShare, num_bytes: int) -> None:
        """Add `num_bytes`, which may be negative, to the bytes that `share` counts.

        If all requests together then exceed the limit, end the request that holds the most bytes.
        """
        share.num_bytes += num_bytes
        self.num_bytes += num_bytes
        self._freed_bytes += max(0, -num_bytes)
        if self._freed_bytes >= LARGE_BYTES:
            self._freed_bytes = 0
            self._trimmer.trim_soon()
        if num_bytes <= 0 or self.num_bytes <= self._limit:
            return
        leaving = sum(one.num_bytes for one in self._shares if one.excess.done())
        if self.num_bytes - leaving > self._limit:
            most = max((one for one in self._shares if not one.excess.done()), key=lambda one: one.num_bytes)
            most.excess.set_result(self._error(most))

    def _error(self, share: MemoryShare) -> SglangToppError:
        if share.num_bytes > self._limit:
            return BadRequestError(
                f"rollouts: got {share.num_bytes} bytes of finished samples that wait for one answer,"
                f" expected at most {self._limit}; use stream, send several requests, or read faster",
                status=413,
            )
        return OverloadedError(
            f"{self.num_bytes} bytes of finished samples wait for their callers, {share.num_bytes} of them"
            f" for this one, the most; expected at most {self._limit} in all; use stream, read faster, or"
            " send the request again later"
        )


_MAX_RECENT_BYTES = 2**28


class RecentRollouts(deque[Rollout]):
    """The most recently served rollouts, for `GET /view`: at most `count`, and at most 256 MiB in total."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count, self._num_bytes = count, 0

    def add(self, sample: Rollout | Score) -> None:
        """Keep `sample` if it is a rollout, and drop the oldest rollouts that no longer fit."""
        if isinstance(sample, Rollout):
            self.append(sample)
            self._num_bytes += num_bytes_of(sample)
            while len(self) > self._count or self._num_bytes > _MAX_RECENT_BYTES:
                self._num_bytes -= num_bytes_of(self.popleft())


LONG_BYTES = 1 << 20
"""The length, in bytes, above which one of the engine's lines counts as long."""

_STALL_S = 60.0


class LongMessageSlots:
    """A limit on the number of the engine's long lines that are read at once.

    The engine sends each finished sample as one line, which holds all of its candidate sets and can be
    decoded only after its last byte. `MemoryLimit` counts a sample only then. So once more than `LONG_BYTES`
    of a line have arrived, the sidecar reads on only while the line holds one of a few slots. The unread part
    of a line that waits stays on the engine. A line in a slot of which nothing arrives for a minute fails the
    call, because it would block the others.

    Args:
        num_slots: the number of slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._slots = asyncio.Semaphore(num_slots)

    async def throttle(self, body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Yield the parts of an answer as they arrive, and wait for a slot inside of each long line."""
        num_bytes = 0
        async with AsyncExitStack() as slot:
            while True:
                try:
                    async with asyncio.timeout(_STALL_S if num_bytes > LONG_BYTES else None):
                        data = await anext(body, b"")
                except TimeoutError:
                    raise TransportError(f"nothing arrived for {_STALL_S:g} s inside a line") from None
                if not data:
                    return
                yield data
                if end := data.rfind(b"\n") + 1:  # the reader has taken the line
                    await slot.aclose()
                    num_bytes = -end
                was_long = num_bytes > LONG_BYTES
                num_bytes += len(data)
                if num_bytes > LONG_BYTES and not was_long:
                    await slot.enter_async_context(self._slots)
