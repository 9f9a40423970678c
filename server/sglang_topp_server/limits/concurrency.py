"""ConcurrencyLimit: limit how many requests are in flight."""

from __future__ import annotations

from sglang_topp.errors import OverloadedError
from sglang_topp_server.metrics import Metrics

__all__ = ["ConcurrencyLimit"]

_RETRY_AFTER_S = 1.0


class ConcurrencyLimit:
    """A limit on the number of requests in flight. Use this object as a context manager around each request.

    A request is in flight from the last byte of its body to the last byte of its answer.

    Args:
        limit: the maximum number of requests in flight.
        metrics: receives the current number of requests in flight.

    Raises:
        OverloadedError: the number of requests in flight has reached `limit` when the caller enters the
            context or calls `require_place`.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit, self._metrics = limit, metrics
        self._count = 0

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return self._count

    def require_place(self) -> None:
        """Raise OverloadedError if the maximum number of requests is already in flight.

        Unlike `__enter__`, this method does not count a new request.
        """
        if self._count >= self._limit:
            raise OverloadedError(
                f"got one more request, expected at most {self._limit} in flight; send it again later",
                retry_after_s=_RETRY_AFTER_S,
            )

    def __enter__(self) -> None:
        self.require_place()
        self._count += 1
        self._metrics.in_flight.set(self._count)

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        self._metrics.in_flight.set(self._count)
