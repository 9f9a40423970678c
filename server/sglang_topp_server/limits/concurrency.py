"""ConcurrencyLimit: limit how many samples are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sglang_topp.errors import OverloadedError
from sglang_topp_server.metrics import Metrics

__all__ = ["ConcurrencyLimit"]

_RETRY_AFTER_S = 1.0


class ConcurrencyLimit:
    """A limit on the samples in flight, over all requests.

    A sample is in flight from the last byte of its request's body to the last byte of the answer.

    Args:
        limit: the number of samples in flight from which on requests are refused.
        metrics: receives the current number of samples in flight.
    """

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit, self._metrics = limit, metrics
        self._count = 0

    def __len__(self) -> int:
        """Return the number of samples in flight."""
        return self._count

    def require_place(self) -> None:
        """Raise OverloadedError if the limit is reached."""
        if self._count >= self._limit:
            raise OverloadedError(
                f"{self._count} samples are in flight, expected fewer than {self._limit}; send the request"
                " again later",
                retry_after_s=_RETRY_AFTER_S,
            )

    @contextmanager
    def admit(self, num_samples: int) -> Iterator[None]:
        """Count a request's samples as in flight, or raise OverloadedError if the limit is reached before.

        A request below the limit is admitted with all of its samples, so that a large one is never starved.
        """
        self.require_place()
        self._change(num_samples)
        try:
            yield
        finally:
            self._change(-num_samples)

    def _change(self, num_samples: int) -> None:
        self._count += num_samples
        self._metrics.in_flight.set(self._count)
