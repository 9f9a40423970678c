"""Limits on requests, time, and memory of one sidecar."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIN_BYTES_PER_S", "Limits"]

MIN_BYTES_PER_S = 1 << 16
"""The minimum rate of a request body, in bytes per second. `Limits.max_stall_s` says how it is applied."""


@dataclass(frozen=True)
class Limits:
    """Limits on requests, time, and memory of one sidecar.

    Attributes:
        max_in_flight: requests at once, from the last byte of the body to the last byte of the answer.
            Further requests get a 429.
        max_samples: samples of one request: prompts times `n`.
        max_body_bytes: bytes of one request body. All bodies above 64 KiB together may hold four times as
            much. Further bodies wait.
        timeout_s: seconds from a request's headers to the last byte of its answer.
        max_stall_s: seconds that a request body may lag behind 64 KiB/s before it gets a 408. Also seconds
            that a caller may leave its answer unread before the kernel resets the connection (Linux).
        max_held_bytes: bytes of finished samples that wait for their callers, for all requests together.
            Beyond this limit, the request that holds the most bytes ends with an error.
    """

    max_in_flight: int = 1024
    max_samples: int = 8192
    max_body_bytes: int = 64 * 2**20
    timeout_s: float = 3600.0
    max_stall_s: float = 30.0
    max_held_bytes: int = 4 * 2**30
