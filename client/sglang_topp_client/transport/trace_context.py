"""Trace context: forward the W3C headers `traceparent` and `tracestate` with every HTTP request of a call."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["forward_trace", "trace_headers"]

_PARENT, _STATE = "traceparent", "tracestate"
# The format of `traceparent` (https://www.w3.org/TR/trace-context/). Later versions may append fields.
_PARENT_VALUE = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_MAX_STATE_CHARS = 512

_forwarded: ContextVar[Mapping[str, str] | None] = ContextVar("forwarded_trace", default=None)


@contextmanager
def forward_trace(headers: Mapping[str, str]) -> Iterator[None]:
    """Send the trace context in `headers` with every request of this task and its child tasks.

    An invalid `traceparent` is ignored, together with its `tracestate`.

    Args:
        headers: the headers of a received request. The names must be lowercase, or the mapping must ignore
            case.
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
    """Return the trace context of the current task: the forwarded one, or OpenTelemetry's current span."""
    if (forwarded := _forwarded.get()) is not None:
        return forwarded
    # Do not import OpenTelemetry only for this check. A program that uses it has already imported it.
    if "opentelemetry" not in sys.modules:
        return {}
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    current: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(current)
    return current
