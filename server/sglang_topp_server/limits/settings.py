"""The limits of one sidecar on requests and memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIN_BYTES_PER_S", "Limits"]

MIN_BYTES_PER_S = 1 << 16
"""The minimum rate, in bytes per second, at which a request body must arrive.

A request body may fall behind a schedule of this rate by at most `Limits.max_stall_s` seconds."""


@dataclass(frozen=True)
class Limits:
    """The limits of one sidecar on requests and memory. The time limit of a request is its caller's alone.

    Attributes:
        max_in_flight: maximum number of requests in flight. Further requests get a 429. A request is in
            flight from the last byte of its body to the last byte of its answer.
        max_samples: maximum number of samples per rollout request, over all prompts. Also the maximum number
            of sequences per score request.
        max_body_bytes: maximum bytes of one request body. The sidecar reserves memory for each body larger
            than 64 KiB: at most four times `max_body_bytes` for all bodies together. A body that needs more
            memory than is free must wait.
        max_stall_s: maximum seconds by which a request body may fall behind a schedule of 64 KiB/s. A request
            whose body falls further behind gets a 408. If a caller leaves its answer unread for `max_stall_s`
            seconds, the kernel resets the connection (on Linux only).
        max_held_bytes: maximum bytes of finished samples that are not sent yet, over all requests. If all
            requests together exceed this maximum, the request that holds the most bytes ends with an error.
    """

    max_in_flight: int = 1024
    max_samples: int = 8192
    max_body_bytes: int = 64 * 2**20
    max_stall_s: float = 30.0
    max_held_bytes: int = 4 * 2**30
