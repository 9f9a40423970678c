"""Limits: what one sidecar accepts, and how long and how much it holds for its callers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MIN_BYTES_PER_S", "Limits"]

MIN_BYTES_PER_S = 1 << 16
"""The rate that a caller keeps, sending its body or taking its answer; see `Limits.max_stall_s`."""


@dataclass(frozen=True)
class Limits:
    """What one sidecar accepts, and how long and how much it holds for its callers.

    Attributes:
        max_in_flight: requests between the last byte of their body and that of their answer; one more
            gets a 429. There may be 1,024 more connections than that.
        max_samples: samples of one request, prompts times `n`.
        max_body_bytes: bytes of one request body, counted as they arrive. All bodies that are being read
            hold at most four times as many together, those of up to 64 KiB aside; the next one waits.
        timeout_s: seconds that one request may take, from its headers to the last byte of its answer.
        max_stall_s: seconds that a caller may take for its headers, and may fall behind 64 KiB/s while it
            sends its body or takes its answer; then its connection is closed.
        max_held_bytes: bytes of finished samples that wait for their callers, all together; beyond it
            the request that holds the most ends with an error.
    """

    max_in_flight: int = 1024
    max_samples: int = 8192
    max_body_bytes: int = 64 * 2**20
    timeout_s: float = 3600.0
    max_stall_s: float = 30.0
    max_held_bytes: int = 4 * 2**30
