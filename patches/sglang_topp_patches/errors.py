"""The exception that ends an HTTP call with an error status."""

from __future__ import annotations

from http import HTTPStatus

__all__ = ["CallEndedError"]


class CallEndedError(ValueError):
    """An error that ends an HTTP call with the given status.

    SGLang answers a ValueError with an error response that has the exception's `status_code`. In a stream,
    SGLang sends an error event with that code.

    Attributes:
        status_code: the HTTP status.
    """

    def __init__(self, problem: str, status_code: int = HTTPStatus.TOO_MANY_REQUESTS) -> None:
        super().__init__(problem)
        self.status_code = status_code
