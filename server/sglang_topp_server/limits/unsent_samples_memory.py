"""MemoryLimit: limit the total memory of finished samples that are not sent yet.

The engine never waits for a slow caller. The sidecar takes each finished sample from the engine at once, and
keeps the sample in memory until the caller reads it. A request without `stream` holds all of its samples
until the last one has finished. If all requests together hold more memory than the limit, the request that
holds the most memory ends with an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_topp.errors import BadRequestError, OverloadedError, SglangToppError
from sglang_topp.malloc_trim import LARGE_BYTES, HeapTrimmer
from sglang_topp_client import Rollout, Score
from sglang_topp_server.metrics import Metrics

__all__ = ["MemoryLimit", "MemoryShare", "num_bytes_of"]

_BYTES_PER_CANDIDATE = 8
# The approximate number of bytes that a token takes: its log-prob, plus its id as text in the answer's JSON.
_BYTES_PER_TOKEN = 12


def num_bytes_of(sample: Rollout | Score) -> int:
    """Estimate how many bytes of memory a sample or score takes, to within a few percent."""
    if isinstance(sample, Score):
        num_tokens, num_chars = len(sample.token_ids), 0
    else:
        num_tokens, num_chars = len(sample.prompt_ids) + len(sample.output_ids), len(sample.text)
    num_candidates = 0 if sample.candidates is None else len(sample.candidates.token_ids)
    return num_candidates * _BYTES_PER_CANDIDATE + num_tokens * _BYTES_PER_TOKEN + num_chars


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

    def add(self, sample: Rollout | Score) -> None:
        """Count the memory of a sample that arrived from the engine."""
        self._limit.change(self, num_bytes_of(sample))

    def remove(self, num_bytes: int) -> None:
        """Subtract `num_bytes` from the memory that the request holds."""
        self._limit.change(self, -num_bytes)


class MemoryLimit:
    """The limit on the memory that the unsent samples of all requests take together.

    Args:
        limit: the maximum number of bytes that all requests together may hold.
        metrics: shows the number of bytes that all requests together hold.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit, self._metrics = limit, metrics
        self._num_bytes = self._freed_bytes = 0
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
            share.remove(share.num_bytes)
            share.excess.cancel()

    def change(self, share: MemoryShare, num_bytes: int) -> None:
        """Add `num_bytes`, which may be negative, to the bytes that `share` counts.

        If all requests together then exceed the limit, end the request that holds the most bytes.
        """
        share.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._metrics.held_bytes.set(self._num_bytes)
        self._freed_bytes += max(0, -num_bytes)
        if self._freed_bytes >= LARGE_BYTES:
            self._freed_bytes = 0
            self._trimmer.trim_soon()
        leaving = sum(one.num_bytes for one in self._shares if one.excess.done())
        if num_bytes > 0 and self._num_bytes - leaving > self._limit:
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
            f"{self._num_bytes} bytes of finished samples wait for their callers, {share.num_bytes} of them"
            f" for this one, the most; expected at most {self._limit} in all; use stream, read faster, or"
            " send the request again later",
            retry_after_s=1.0,
        )
