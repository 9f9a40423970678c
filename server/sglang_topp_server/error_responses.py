"""Map exceptions to HTTP error responses: a status and the body ``{"error": {"type", "message", ...}}``.

`type` names the exception's class in `sglang_topp.errors`, so that the client can raise the same class.
`message` states the cause of the error. If the engine refused the request, `message` quotes the engine.

=====  ========================================================================================
400    `InvalidInputError`, `BadRequestError`: the sidecar or the engine refuses the request
401    `AuthenticationError`: no key, or a wrong key
408    `BadRequestError`: the body arrived too slowly
413    `BadRequestError`: the body has too many bytes or samples, a text in the body is too
       long, or the answer would be too large
429    `OverloadedError`, with Retry-After: too many requests at once, too many bytes of
       answers that callers have not read yet, or a 429 from the engine
500    `ServerError`: a bug in the sidecar
502    `TransportError`: the engine is gone; `ServerError`: the engine failed; `WireError`: the
       engine's answer cannot be decoded; `RolloutError`: the engine gave up on a sample
503    `PatchError`, `MissingCandidateSetsError`: the engine's SGLang is not patched
503    `ServerError`, with Retry-After: the sidecar is stopping, the engine is not ready, or
       the engine itself answers 503, for example after a weight push during the request
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
)
from sglang_topp_client.wire.error_json import error_to_json

# The caller's request is at fault if the engine's BadRequestError has one of the following statuses, or no
# status (None).
_ABOUT_THE_REQUEST = (None, 400, 413, 422)


def from_engine_error(error: SglangToppError) -> SglangToppError:
    """Translate an engine's error into the error that the sidecar's caller gets."""
    if isinstance(error, AuthenticationError):
        message = f"the engine refused the sidecar's own key (SGLANG_TOPP_ENGINE_API_KEY): {error}"
    elif isinstance(error, BadRequestError) and error.status in _ABOUT_THE_REQUEST:
        status = 413 if error.status == 413 else 400
        return BadRequestError(str(error), status=status, body=error.body)
    elif isinstance(error, RolloutError):
        return type(error)(str(error), status=502, body=error.body)
    elif isinstance(error, OverloadedError):
        return OverloadedError(
            f"the engine is at its limit: {error}", body=error.body, retry_after_s=error.retry_after_s
        )
    elif isinstance(error, ServerError) and error.status == 503:
        return ServerError(f"the engine refuses the request for now: {error}", status=503, body=error.body)
    elif isinstance(error, ResponseError):
        message = f"the engine failed: {error}"
    elif isinstance(error, TransportError):
        return type(error)(f"the engine does not answer, or its answer broke off: {error}")
    else:
        return error
    return ServerError(message, status=502, body=error.body)


def as_sglang_topp_error(error: BaseException) -> SglangToppError:
    """Return an SglangToppError unchanged, and any other exception as a ServerError with status 500."""
    if isinstance(error, SglangToppError):
        return error
    failed = ServerError(f"the sidecar failed: {type(error).__name__}: {error}", status=500)
    failed.__cause__ = error
    return failed


def http_status(error: SglangToppError) -> int:
    """Return the HTTP status of an error, according to the table in the module docstring."""
    match error:
        case InvalidInputError():
            return 400
        case MissingCandidateSetsError() | PatchError():
            return 503
        case RequestTimeoutError():
            return 504
        case ResponseError(status=int(status)):
            return status
        case _:
            return 502


def error_headers(error: SglangToppError) -> dict[str, str]:
    """Return the response headers of an error."""
    if http_status(error) == 408:
        return {"Connection": "close"}
    if isinstance(error, OverloadedError):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s or 1)))}
    if isinstance(error, ServerError) and error.status == 503:
        return {"Retry-After": "1"}
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def error_body(error: SglangToppError) -> dict[str, Any]:
    """Return the JSON object that reports an error, as a response's body or as a stream's message."""
    answer = error_to_json(error)
    answer["error"]["status"] = http_status(error)
    return answer
