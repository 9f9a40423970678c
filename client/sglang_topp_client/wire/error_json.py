"""JSON codec of errors: the sidecar encodes an exception, and the client raises the same exception.

The JSON form of an exception is `{"error": {"type", "message", "field"?, "status"?}}`, where `type` names an
exception class of `sglang_topp.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_topp import errors
from sglang_topp_client.value_checks import MAX_BODY_CHARS, truncate

_MAX_FIELD_CHARS = 200


def error_to_json(error: errors.SglangToppError) -> dict[str, Any]:
    """Return `{"error": {...}}` for an exception of sglang-topp."""
    body: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, errors.WireError):
        body |= {"message": error.problem, "field": error.field}
    if isinstance(error, errors.ResponseError) and error.status is not None:
        body["status"] = error.status
    return {"error": body}


def error_from_json(body: Any) -> errors.SglangToppError:
    """Return the exception that `error_to_json` encoded, or a `ServerError` if `type` names no known class.

    Args:
        body: the value of the key `error` in the encoded JSON object.
    """
    if not isinstance(body, Mapping):
        words = truncate(body, MAX_BODY_CHARS)
        return errors.ServerError(f"the server reports an error: {words}", status=None, body=words)
    message = truncate(body.get("message", body))
    name, status = body.get("type"), body.get("status")
    kind = getattr(errors, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, errors.SglangToppError)):
        kind = errors.ServerError
    if issubclass(kind, errors.WireError | errors.InvalidCandidateSetsError):
        return kind(truncate(body.get("field", "response"), _MAX_FIELD_CHARS), message)
    if issubclass(kind, errors.ResponseError):
        is_status = type(status) is int and 100 <= status < 600
        return kind(message, status=status if is_status else None, body=truncate(dict(body), MAX_BODY_CHARS))
    return kind(message)


def class_of_status(status: int) -> type[errors.ResponseError]:
    """Return the class of the error that an HTTP status of 400 or more stands for."""
    if status == 429:
        return errors.OverloadedError
    if status in (401, 403):
        return errors.AuthenticationError
    return errors.BadRequestError if status < 500 else errors.ServerError
