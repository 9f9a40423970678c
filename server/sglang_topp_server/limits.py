"""Limits: what one sidecar accepts."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """What one sidecar accepts.

    Attributes:
        max_in_flight: requests between their headers and their last byte; one more gets a 429.
        max_samples: samples of one request, prompts times `n`.
        max_body_bytes: bytes of one request body, counted as they arrive.
        timeout_s: seconds that one request may take, from its headers to the last byte of its answer.
    """

    max_in_flight: int = 1024
    max_samples: int = 8192
    max_body_bytes: int = 64 * 2**20
    timeout_s: float = 3600.0
