"""The exception that ends an HTTP call with an error status."""

from __future__ import annotations

from http import HTTPStatus

__all__ = ["CallEndedError"]


class CallEndedError(ValueError):
    """An error that ends an HTTP call with the given status.

    SGLang turns a `CallEndedError`, which is a ValueError, into an error response with the status
    `status_code`. In a stream, SGLang sends an error event with the code `status_code`.

    Attributes:
        status_code: the HTTP status of the answer.
    """

    def __init__(self, problem: str, status_code: int = HTTPStatus.TOO_MANY_REQUESTS) -> None:
        super().__init__(problem)
        self.status_code = status_code
