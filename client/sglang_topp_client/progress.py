"""Progress: the line on stderr that counts the finished samples of a call."""

from __future__ import annotations

import math
import sys
import time

FIRST_S = 2.0
"""A call that did not ask for the line shows it only if it takes longer than this many seconds."""
_NEXT_S = 0.2


class Progress:
    """A line on the terminal with the number of finished samples. `run.py` decides who gets one.

    Args:
        total: the number of samples in the call.
        of: the plural noun that names the samples in the line, such as "rollouts".
        first_s: seconds before the line appears.
    """

    def __init__(self, total: int, *, of: str = "rollouts", first_s: float = 0.0) -> None:
        self._total, self._of = total, of
        self._num_done = self._num_tokens = 0
        self._start = time.monotonic()
        self._next = self._start + first_s
        self._has_written = False

    def add(self, num_tokens: int) -> None:
        """Count one more sample with `num_tokens` tokens."""
        self._num_done += 1
        self._num_tokens += num_tokens
        if (now := time.monotonic()) >= self._next:
            self._next = now + _NEXT_S
            self._write()

    def close(self) -> None:
        """End the line."""
        if self._has_written:
            self._write(end="\n")

    def _write(self, end: str = "") -> None:
        elapsed_s = max(time.monotonic() - self._start, 1e-6)
        try:
            sys.stderr.write(
                f"\r{self._of} {self._num_done}/{self._total}  {elapsed_s:.0f} s "
                f" {self._num_tokens / elapsed_s:.0f} tokens/s {end}"
            )
            sys.stderr.flush()
            self._has_written = True
        except Exception:
            # The write fails if the terminal was closed. The client then continues without a progress line.
            self._next, self._has_written = math.inf, False
