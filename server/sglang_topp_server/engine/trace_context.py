"""Trace context: forward a caller's W3C headers `traceparent` and `tracestate` to the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["forward_trace", "forwarded_trace"]

_PARENT, _STATE = "traceparent", "tracestate"
# The format of `traceparent` (https://www.w3.org/TR/trace-context/). Later versions of the W3C format may
# append fields, so this regular expression accepts more fields at the end.
_PARENT_VALUE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_MAX_STATE_CHARS = 512

_forwarded: ContextVar[Mapping[str, str]] = ContextVar("forwarded_trace")


@contextmanager
def forward_trace(headers: Mapping[str, str]) -> Iterator[None]:
    """Forward the trace context in `headers` with every sample request of this task and its child tasks.

    Without a valid `traceparent`, nothing is forwarded.

    Args:
        headers: the headers of a caller's request. The mapping ignores the case of its keys.
    """
    parent, state = headers.get(_PARENT, ""), headers.get(_STATE, "")
    forwarded = {}
    if _PARENT_VALUE.fullmatch(parent):
        forwarded[_PARENT] = parent
        if state and state.isascii() and state.isprintable() and len(state) <= _MAX_STATE_CHARS:
            forwarded[_STATE] = state
    token = _forwarded.set(forwarded)
    try:
        yield
    finally:
        _forwarded.reset(token)


def forwarded_trace() -> Mapping[str, str]:
    """Return the trace headers for the engine that `forward_trace` set, and none outside of it."""
    return _forwarded.get({})
