"""The limits of one sidecar on requests and memory."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """The limits of one sidecar on requests and memory. The time limit of a request is its caller's alone.

    Attributes:
        max_in_flight: maximum number of requests in flight. Further requests get a 429. A request is in
            flight from the last byte of its body to the last byte of its answer.
        max_samples: maximum number of samples per rollout request, over all prompts. Also the maximum number
            of sequences per score request.
        max_body_bytes: maximum bytes of one request body. At most four bodies of more than 64 KiB are in
            memory at once; others wait.
        io_timeout_s: maximum seconds that a caller may take to send its request body, before it gets a 408.
            Also the maximum seconds for which a caller may leave its answer unread, before the kernel resets
            the connection (Linux only).
        max_held_bytes: maximum bytes of finished samples that are not sent yet, over all requests. If all
            requests together exceed this maximum, the request that holds the most bytes ends with an error.
    """

    max_in_flight: int = 1024
    max_samples: int = 8192
    max_body_bytes: int = 64 * 2**20
    io_timeout_s: float = 60.0
    max_held_bytes: int = 4 * 2**30
