"""The exceptions that the packages of sglang-topp raise.

The class tree, with a second base class in parentheses::

    SglangToppError
    ├── InvalidInputError (ValueError)         an argument or a request field is wrong
    │   └── InvalidCandidateSetsError          the arrays do not form candidate sets
    ├── WireError (ValueError)                 a payload cannot be decoded exactly; `.field` names the key
    │   ├── MissingCandidateSetsError          the response lacks the requested sets
    │   └── SampledTokenMissingError           a set does not contain its sampled token
    ├── PatchError                             the plugin does not fit the engine's SGLang
    └── RequestError                           a request to a server failed
        ├── TransportError                     no complete answer: refused, reset, or cut off
        │   └── RequestTimeoutError (TimeoutError)  the caller's own time limit expired
        ├── WeightPushError                    engines may have different weights; `.weight_versions`
        └── ResponseError                      the server answered with an error; `.status`, `.body`
            ├── BadRequestError                4xx except 401, 403, and 429: do not retry
            ├── AuthenticationError            401, 403
            ├── OverloadedError                429; `.retry_after_s`
            ├── ServerError                    5xx
            └── RolloutError                   the engine ended one sample with an error
                └── AbortedError               an abort, a pause, or a weight update ended the sample

Every error message gives the value that was received and the values that are accepted. If the caller can fix
the problem, the message says how.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

__all__ = [
    "AbortedError",
    "AuthenticationError",
    "BadRequestError",
    "InvalidCandidateSetsError",
    "InvalidInputError",
    "MissingCandidateSetsError",
    "OverloadedError",
    "PatchError",
    "RequestError",
    "RequestTimeoutError",
    "ResponseError",
    "RolloutError",
    "SampledTokenMissingError",
    "ServerError",
    "SglangToppError",
    "TransportError",
    "WeightPushError",
    "WireError",
]


class SglangToppError(Exception):
    """The base class of every exception that sglang-topp raises on purpose.

    Attributes:
        prompt_index: the index of the prompt that failed, if a call with `return_exceptions` returns the
            error. None if the whole call ended.
    """

    prompt_index: int | None = None


class InvalidInputError(SglangToppError, ValueError):
    """An argument or a request field is wrong. A call that raises this error has no effect."""


class _FieldError(ValueError):
    """An error of one field of a larger value."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class InvalidCandidateSetsError(InvalidInputError, _FieldError):
    """The arrays break a rule of `CandidateSets`, such as a rule on dtypes or on the order of candidates.

    Attributes:
        field: the name of the invalid array in `CandidateSets`.
        problem: the error message without the field's name.
    """


class WireError(SglangToppError, _FieldError):
    """A payload cannot be decoded exactly.

    Attributes:
        field: the invalid key of the payload.
        problem: the error message without the field's name.
    """


class MissingCandidateSetsError(WireError):
    """The response lacks requested candidate sets, for all positions or for some."""


class SampledTokenMissingError(WireError):
    """A candidate set does not contain the token that was sampled at its position."""


class PatchError(SglangToppError):
    """The plugin does not fit the engine's SGLang: a function is missing, changed, or not patched."""


class RequestError(SglangToppError):
    """A request to a server failed."""


class TransportError(RequestError):
    """No complete answer arrived: the connection was refused, reset, or cut off."""


class RequestTimeoutError(TransportError, TimeoutError):
    """The caller's time limit expired before the answer was complete."""


class WeightPushError(RequestError):
    """A weight push failed on at least one engine.

    Attributes:
        weight_versions: maps each engine's URL to its weight version, or to None if the version is unknown.
    """

    def __init__(self, message: str, *, weight_versions: Mapping[str, str | None] | None = None) -> None:
        super().__init__(message)
        self.weight_versions = dict(weight_versions or {})


class ResponseError(RequestError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status of the error. If the server sends the error inside a stream or an answer with
            status 200, `status` is the status in the error's JSON, or None if the JSON has no status.
        body: the server's message, truncated to a readable length.
    """

    def __init__(self, message: str, *, status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class BadRequestError(ResponseError):
    """The request itself is wrong (a 4xx other than 401, 403, and 429). A retry would fail too."""


class AuthenticationError(ResponseError):
    """The API key is missing, wrong, or lacks permission (401, 403)."""


class OverloadedError(ResponseError):
    """The server refused the request, because a limit of the server is reached (429).

    Attributes:
        retry_after_s: the server's Retry-After header in seconds, or None.
    """

    def __init__(
        self, message: str, *, status: int | None = 429, body: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, status=status, body=body)
        self.retry_after_s = retry_after_s


class ServerError(ResponseError):
    """The server failed (5xx)."""


class RolloutError(ResponseError):
    """The engine aborted one sample, or ended the sample with an error."""


class AbortedError(RolloutError):
    """The engine aborted one sample, because of the client's `abort`, a pause, or a weight update."""


def describe(value: object) -> str:
    """Return an abbreviated `repr` of any value, for an error message."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"  # `repr` may fail on huge integers
    try:
        return _ABBREVIATED.repr(value)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__}"  # `repr` fails on huge integers and deep nesting


_ABBREVIATED = reprlib.Repr()
_ABBREVIATED.maxstring = _ABBREVIATED.maxother = 60
