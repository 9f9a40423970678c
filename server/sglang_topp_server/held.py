"""Held: the bytes of finished samples that wait for their callers, bounded over all requests.

The engine does not wait for a slow reader (its memory is dearer), so what it has finished waits here. A
request that has all its samples in one answer holds them until the last is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from sglang_topp.errors import BadRequestError, OverloadedError, SglangToppError
from sglang_topp_client import Rollout, Score
from sglang_topp_server.metrics import Metrics

__all__ = ["Held", "Share", "num_bytes_of"]

_BYTES_PER_CANDIDATE = 8
# A token id in the JSON of an answer, and its log-prob.
_BYTES_PER_TOKEN = 12


def num_bytes_of(sample: Rollout | Score) -> int:
    """What one sample, or one score, takes while it waits, to within a few per cent."""
    if isinstance(sample, Score):
        num_tokens, num_chars = len(sample.token_ids), 0
    else:
        num_tokens, num_chars = len(sample.prompt_ids) + len(sample.output_ids), len(sample.text)
    num_candidates = 0 if sample.candidates is None else len(sample.candidates.token_ids)
    return num_candidates * _BYTES_PER_CANDIDATE + num_tokens * _BYTES_PER_TOKEN + num_chars


class Share:
    """What one request holds. To be made within an event loop.

    Attributes:
        num_bytes: so many.
        excess: becomes the error that the request is to end with, where it holds the most of too much.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self.num_bytes = 0
        self.excess: asyncio.Future[SglangToppError] = asyncio.get_running_loop().create_future()

    def add(self, sample: Rollout | Score) -> None:
        """A sample that has come from the engine."""
        self._held.change(self, num_bytes_of(sample))

    def remove(self, num_bytes: int) -> None:
        """Bytes that are sent."""
        self._held.change(self, -num_bytes)


class Held:
    """The shares of all requests.

    Args:
        limit: bytes that all of them may hold together.
        metrics: where the number is shown.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit, self._metrics = limit, metrics
        self._num_bytes = 0
        self._shares: set[Share] = set()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """The share of a request, for as long as this context."""
        share = Share(self)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.discard(share)
            share.remove(share.num_bytes)
            share.excess.cancel()

    def change(self, share: Share, num_bytes: int) -> None:
        """More bytes, or fewer, in a share."""
        share.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._metrics.held_bytes.set(self._num_bytes)
        leaving = sum(one.num_bytes for one in self._shares if one.excess.done())
        if num_bytes > 0 and self._num_bytes - leaving > self._limit:
            most = max((one for one in self._shares if not one.excess.done()), key=lambda one: one.num_bytes)
            most.excess.set_result(self._error(most))

    def _error(self, share: Share) -> SglangToppError:
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
