"""Flight: how many requests are in flight, and how many there may be."""

from __future__ import annotations

from sglang_topp.errors import OverloadedError
from sglang_topp_server.metrics import Metrics

__all__ = ["Flight"]

_RETRY_AFTER_S = 1.0


class Flight:
    """A context that every request is in from the last byte of its body to that of its answer.

    Args:
        limit: how many may be in it at once.
        metrics: where the number is shown.

    Raises:
        OverloadedError: on entry and by `require_place`, where there is no place left.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit, self._metrics = limit, metrics
        self._count = 0

    def __len__(self) -> int:
        """How many are in flight."""
        return self._count

    def require_place(self) -> None:
        """Return where there is a place now; none is taken."""
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
