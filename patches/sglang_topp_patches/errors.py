"""Define the exception that ends an HTTP call with a status."""

from __future__ import annotations

from http import HTTPStatus

__all__ = ["CallEndedError"]


class CallEndedError(ValueError):
    """An HTTP call that ends with an error.

    SGLang answers a ValueError with the status that it carries, or, in a stream, with an event that holds it.

    Attributes:
        status_code: the HTTP status.
    """

    def __init__(self, problem: str, status_code: int = HTTPStatus.TOO_MANY_REQUESTS) -> None:
        super().__init__(problem)
        self.status_code = status_code
