"""Pace: whether the other end of a connection keeps up."""

from __future__ import annotations

from sglang_topp_server.limits import MIN_BYTES_PER_S

__all__ = ["Pace"]


class Pace:
    """How many seconds one peer may still be waited for.

    Waiting costs its seconds, and each `MIN_BYTES_PER_S` bytes that come or go win one back. So a peer may
    pause, or be slow for a while, but not for long, and a fast start does not pay for a stop.

    Args:
        max_stall_s: how many seconds a peer may be behind.

    Attributes:
        left_s: how many are left; none where it is 0 or less.
    """

    def __init__(self, max_stall_s: float) -> None:
        self._max_stall_s = self.left_s = max_stall_s

    def note(self, waited_s: float, num_bytes: int) -> None:
        """The peer was waited for, and sent or took this many bytes meanwhile."""
        self.left_s = min(self._max_stall_s, self.left_s - waited_s + num_bytes / MIN_BYTES_PER_S)

    def rest(self, seconds: float) -> None:
        """The peer was up to date for so long."""
        self.left_s = min(self._max_stall_s, self.left_s + seconds)
