"""Retry policy: which errors are retried, how often, and after what delay."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sglang_topp.errors import (
    AbortedError,
    OverloadedError,
    RequestTimeoutError,
    ServerError,
    SglangToppError,
    TransportError,
)

_T = TypeVar("_T")

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 8.0
_MAX_RETRY_AFTER_S = 60.0

_log = logging.getLogger(__name__)


class RetryBudget:
    """The number of retries that one call has left, and the delay before the next retry.

    Args:
        max_retries: the maximum number of retries of the call.
        waits_out_refusals: whether the call waits without limit for a server that accepts no request at the
            moment (429, 503). A refused attempt then uses up no retry, because the server works.
        repeats_aborted: whether the client repeats a call that the engine aborted because of an abort
            request, a pause, or a weight update.
    """

    def __init__(
        self, max_retries: int, *, waits_out_refusals: bool = False, repeats_aborted: bool = False
    ) -> None:
        self._num_left = max_retries
        self._waits_out_refusals, self._repeats_aborted = waits_out_refusals, repeats_aborted
        self._num_failures = 0

    def next_delay_s(self, error: SglangToppError, *, has_begun: bool = False) -> float | None:
        """Return the seconds to wait before the next attempt, or None if `error` ends the call.

        Args:
            error: the error of the last attempt.
            has_begun: whether the server had begun to generate. A later refusal counts as a failure: a
                server without the memory for a sample's sets would refuse the sample again.
        """
        is_repeated = self._repeats_aborted and isinstance(error, AbortedError)
        if not is_repeated and not is_retryable(error):
            return None
        # The server accepts no request at the moment.
        is_refusal = isinstance(error, OverloadedError) or getattr(error, "status", None) == 503
        if not is_repeated and not (self._waits_out_refusals and not has_begun and is_refusal):
            if not self._num_left:
                return None
            self._num_left -= 1
        self._num_failures += 1
        return delay_s(self._num_failures, error)


async def retrying(
    attempt: Callable[[], Awaitable[_T]], max_retries: int, *, deadline: float = math.inf
) -> _T:
    """Make a request that may be repeated, and repeat it after a retryable error.

    Args:
        attempt: makes the request.
        max_retries: the maximum number of retries.
        deadline: the time of the event loop after which no retry begins.
    """
    clock = asyncio.get_running_loop().time
    budget = RetryBudget(max_retries)
    while True:
        try:
            return await attempt()
        except SglangToppError as error:
            wait_s = budget.next_delay_s(error)
            if wait_s is None or clock() + wait_s >= deadline:
                raise
            _log.info("a request is retried in %.2f s: %s", wait_s, error)
        await asyncio.sleep(wait_s)


def is_retryable(error: SglangToppError) -> bool:
    """Return whether another attempt may succeed after `error`.

    The result is True if no complete answer arrived, or if the status was 429 or 5xx. But the result is False
    for a `RequestTimeoutError`, because the caller's time limit has expired.
    """
    if isinstance(error, RequestTimeoutError):
        return False
    return isinstance(error, TransportError | OverloadedError | ServerError)


def delay_s(retry: int, error: SglangToppError) -> float:
    """Return the seconds to wait before retry number `retry`, counted from 1.

    If a 429 answer has a Retry-After header, the delay is the header's time plus up to 25 percent. A header's
    time above one minute counts as one minute. The added part is random, so that many clients do not send
    their requests at the same time. In all other cases, the delay is 0.5, 1, 2, 4, 8, 8, … seconds, minus a
    random part of up to 50 percent.
    """
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        return min(error.retry_after_s, _MAX_RETRY_AFTER_S) * random.uniform(1.0, 1.25)
    # After 16 doublings, the delay is far above the maximum. Without the limit of 16, `2.0**doublings` would
    # overflow after hours of retries.
    doublings = min(retry - 1, 16)
    return min(_FIRST_DELAY_S * 2.0**doublings, _MAX_DELAY_S) * random.uniform(0.5, 1.0)
