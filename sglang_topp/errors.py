"""The exceptions of every package in this distribution.

::

    SglangToppError
    ├── InvalidInputError (ValueError)         an argument or a request field is wrong
    │   └── InvalidCandidateSetsError          arrays that are no candidate sets
    ├── WireError (ValueError)                 a payload that cannot be decoded exactly; `.field` names where
    │   ├── MissingCandidateSetsError          the sets that were asked for are not in the response
    │   ├── SampledTokenMissingError           a set does not hold its sampled token
    │   └── TruncatedFileError                 a file of rollouts ends before its end
    ├── PatchError                             the patch set does not hold in this SGLang
    └── RequestError                           a request to a server did not succeed
        ├── TransportError                     no (whole) answer: refused, reset, cut off
        │   └── RequestTimeoutError            the caller's own time limit passed
        └── ResponseError                      an answer that is an error; `.status`, `.body`
            ├── BadRequestError                400, 404, 405, 409, 413, 415, 422: do not send it again
            ├── AuthenticationError            401, 403
            ├── OverloadedError                429; `.retry_after_s`
            ├── ServerError                    5xx
            └── RolloutError                   the engine gave up on one sample (abort, error finish reason)

Every message says what was got, what is expected, and, where there is something to do, what to do.
"""

from __future__ import annotations

__all__ = [
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
    "TruncatedFileError",
    "WireError",
]


class SglangToppError(Exception):
    """Base of every exception that this distribution raises on purpose."""


class InvalidInputError(SglangToppError, ValueError):
    """An argument or a request field is wrong; nothing was done."""


class InvalidCandidateSetsError(InvalidInputError):
    """The arrays do not form candidate sets (shape, dtype, order, range, membership).

    Attributes:
        field: the array that is at fault, by its name in `CandidateSets`.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class WireError(SglangToppError, ValueError):
    """A payload cannot be decoded exactly.

    Attributes:
        field: the key in the payload that is at fault.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(field, problem)
        self.field = field
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


class MissingCandidateSetsError(WireError):
    """The response holds no candidate sets, or none for some position, though they were asked for."""


class SampledTokenMissingError(WireError):
    """A candidate set does not hold the token that was sampled at its position."""


class TruncatedFileError(WireError):
    """A file of rollouts ends before its end: it was cut, or its writer was not closed. What was read of it
    is whole."""


class PatchError(SglangToppError):
    """The patch set does not hold in this SGLang: a seam is missing, changed, or not active."""


class RequestError(SglangToppError):
    """A request to a server did not succeed."""


class TransportError(RequestError):
    """There was no whole answer: the connection was refused, reset or cut off."""


class RequestTimeoutError(TransportError):
    """The time limit that the caller set passed before the answer was whole."""


class ResponseError(RequestError):
    """The server answered with an error.

    Attributes:
        status: the HTTP status, or the one that the server names inside a stream or a 200 answer, or None.
        body: the server's own words, cut to a readable length.
    """

    def __init__(self, message: str, *, status: int | None = None, body: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.body = body

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), dict(self.__dict__))


class BadRequestError(ResponseError):
    """The request itself is wrong (4xx): sending it again would fail again."""


class AuthenticationError(ResponseError):
    """The key is missing, wrong, or not allowed to do this (401, 403)."""


class OverloadedError(ResponseError):
    """The server is at its limit (429).

    Attributes:
        retry_after_s: what the server's Retry-After header asks for, in seconds, or None.
    """

    def __init__(
        self, message: str, *, status: int | None = 429, body: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, status=status, body=body)
        self.retry_after_s = retry_after_s


class ServerError(ResponseError):
    """The server failed (5xx)."""


class RolloutError(ResponseError):
    """The engine gave up on one sample: it was aborted, or finished with an error."""


def _rebuild(cls: type[ResponseError], message: str, state: dict[str, object]) -> ResponseError:
    """Unpickle: keyword-only attributes do not travel through `Exception.args`."""
    error = cls(message)
    error.__dict__.update(state)
    return error
