"""Every exception as the answer that it becomes: a status, and ``{"error": {"type", "message", ...}}``.

`type` is the exception's class in `sglang_topp.errors`, so that the client can raise the same one; the
message is a sentence that holds the cause, the engine's own words where it was the engine that refused.

=====  ========================================================================================
400    `InvalidInputError`, `BadRequestError`: the request, or what the engine says about it
401    `AuthenticationError`: no key, or another than this server's
408    `BadRequestError`: the body came too slowly
413    `BadRequestError`: too many bytes, too many samples, or too much for one answer
429    `OverloadedError`, with Retry-After: too many requests, bodies, or bytes that wait for callers
500    `ServerError`: a fault of the sidecar itself
502    `TransportError`, `ServerError`, `WireError`, `RolloutError`: the engine is gone, failed, answered
       what cannot be decoded, or gave up on a sample
503    `PatchError`, `MissingCandidateSetsError`, `ServerError`: not ready, or not patched
504    `RequestTimeoutError`
=====  ========================================================================================
"""

from __future__ import annotations

import math
from typing import Any

from sglang_topp.errors import (
    AuthenticationError,
    BadRequestError,
    InvalidInputError,
    MissingCandidateSetsError,
    OverloadedError,
    PatchError,
    RequestTimeoutError,
    ResponseError,
    RolloutError,
    ServerError,
    SglangToppError,
    TransportError,
    WireError,
)
from sglang_topp_client.record import error_to_record

__all__ = ["answer_of", "as_known_error", "headers_of", "status_of", "upstream_error"]

# None: reported inside the engine's stream, after its status.
_ABOUT_THE_REQUEST = (None, 400, 413, 422)


def upstream_error(error: SglangToppError) -> SglangToppError:
    """What the engine's error is to the sidecar's caller, whose request and key were another's."""
    if isinstance(error, AuthenticationError):
        message = f"the engine refused the sidecar's own key (SGLANG_TOPP_ENGINE_API_KEY): {error}"
    elif isinstance(error, BadRequestError) and error.status in _ABOUT_THE_REQUEST:
        status = 413 if error.status == 413 else 400
        return BadRequestError(str(error), status=status, body=error.body)
    elif isinstance(error, RolloutError):
        return RolloutError(str(error), status=502, body=error.body)
    elif isinstance(error, OverloadedError):
        return OverloadedError(
            f"the engine is at its limit: {error}", body=error.body, retry_after_s=error.retry_after_s
        )
    elif isinstance(error, ResponseError):
        message = f"the engine failed: {error}"
    elif isinstance(error, TransportError):
        return type(error)(f"the engine does not answer, or broke off: {error}")
    else:
        return error
    return ServerError(message, status=502, body=error.body)


def as_known_error(error: BaseException) -> SglangToppError:
    """The error itself, or, where nobody raised it on purpose, a ServerError that says what it was."""
    if isinstance(error, SglangToppError):
        return error
    return ServerError(f"the sidecar failed: {type(error).__name__}: {error}", status=500)


def status_of(error: SglangToppError) -> int:
    """The HTTP status that answers it; the table is at the head of this file."""
    match error:
        case InvalidInputError():
            return 400
        case MissingCandidateSetsError() | PatchError():
            return 503
        case WireError():
            return 502
        case RequestTimeoutError():
            return 504
        case TransportError():
            return 502
        case ResponseError(status=int(status)):
            return status
        case _:
            return 502


def headers_of(error: SglangToppError) -> dict[str, str]:
    """The response headers that go with it."""
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s or 1)))}
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def answer_of(error: SglangToppError) -> dict[str, Any]:
    """The body, or the line of a stream: there `status` is what the HTTP status can no longer say."""
    answer = error_to_record(error)
    answer["error"]["status"] = status_of(error)
    return answer
