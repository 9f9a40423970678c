"""Trace context: send the W3C headers `traceparent` and `tracestate` with the client's HTTP requests."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["forward_trace", "trace_headers"]

_PARENT, _STATE = "traceparent", "tracestate"
# The format of `traceparent` (https://www.w3.org/TR/trace-context/). Later versions of the W3C format may
# append fields, so this regular expression accepts more fields at the end.
_PARENT_VALUE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_MAX_STATE_CHARS = 512

_forwarded: ContextVar[Mapping[str, str] | None] = ContextVar("forwarded_trace", default=None)


@contextmanager
def forward_trace(headers: Mapping[str, str]) -> Iterator[None]:
    """Add the trace context from `headers` to every request of this task and its child tasks.

    If `headers` has no valid `traceparent`, requests get neither `traceparent` nor `tracestate`.

    Args:
        headers: headers to take the trace context from, such as those of a request that a sidecar received.
            The header names must be lowercase, unless the mapping ignores the case of its keys.
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


def trace_headers() -> Mapping[str, str]:
    """Return the trace headers to send with a request of the current task.

    The headers come from `forward_trace`, or from OpenTelemetry's current span if `forward_trace` is not
    active.
    """
    if (forwarded := _forwarded.get()) is not None:
        return forwarded
    # A program that uses OpenTelemetry has already imported `opentelemetry`. In any other program, importing
    # `opentelemetry` would only cost time.
    if "opentelemetry" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    current: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(current)
    return current
