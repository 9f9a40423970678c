"""When a call is sent again, and how long to wait before."""

from __future__ import annotations

import random

from sglang_topp.errors import (
    OverloadedError,
    RequestTimeoutError,
    ServerError,
    SglangToppError,
    TransportError,
)

__all__ = ["delay_s", "is_refusal", "is_retryable"]

_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 8.0
_MAX_RETRY_AFTER_S = 60.0


def is_retryable(error: SglangToppError) -> bool:
    """Whether another attempt may succeed: no whole answer, 429, 5xx; not the caller's own time limit."""
    if isinstance(error, RequestTimeoutError):
        return False
    return isinstance(error, TransportError | OverloadedError | ServerError)


def is_refusal(error: SglangToppError) -> bool:
    """Whether the server is there and takes no request now: 429, 503."""
    return isinstance(error, OverloadedError) or (isinstance(error, ServerError) and error.status == 503)


def delay_s(retry: int, error: SglangToppError) -> float:
    """Seconds to wait before retry number `retry`, from 1.

    A 429's Retry-After where it has one (at most a minute, with up to a quarter on top, so that
    a crowd does not come back at once); else 0.5, 1, 2, 4, 8, 8, … seconds, less up to a half.
    """
    if isinstance(error, OverloadedError) and error.retry_after_s is not None:
        return min(error.retry_after_s, _MAX_RETRY_AFTER_S) * random.uniform(1.0, 1.25)
    # Beyond that it is the longest anyway; after hours it would be no float any more.
    doublings = min(retry - 1, 16)
    return min(_FIRST_DELAY_S * 2.0**doublings, _MAX_DELAY_S) * random.uniform(0.5, 1.0)
