"""A progress line on stderr for long batches."""

from __future__ import annotations

import sys
import time
from types import TracebackType

__all__ = ["Progress"]

_FIRST_AFTER_S = 2.0
_EVERY_S = 0.2


class Progress:
    """Counts finished samples; writes one line that it rewrites, where stderr is a terminal.

    Args:
        total: how many samples will finish.
        show: None shows a batch that takes longer than two seconds; True shows every batch; False
            none. Where stderr is no terminal nothing is ever written.
    """

    def __init__(self, total: int, show: bool | None) -> None:
        self._total = total
        self._done = 0
        self._tokens = 0
        self._start = time.monotonic()
        self._is_on = show is not False and sys.stderr is not None and sys.stderr.isatty()
        self._next = self._start + (0.0 if show else _FIRST_AFTER_S)
        self._has_written = False

    def __enter__(self) -> Progress:
        return self

    def add(self, num_tokens: int) -> None:
        """One more sample, of `num_tokens` generated tokens."""
        self._done += 1
        self._tokens += num_tokens
        if self._is_on and time.monotonic() >= self._next:
            self._write()
            self._next = time.monotonic() + _EVERY_S

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._has_written:
            self._write()
            sys.stderr.write("\n")

    def _write(self) -> None:
        elapsed_s = max(time.monotonic() - self._start, 1e-6)
        sys.stderr.write(
            f"\rrollouts {self._done}/{self._total}  {elapsed_s:.0f} s "
            f" {self._tokens / elapsed_s:.0f} tokens/s "
        )
        sys.stderr.flush()
        self._has_written = True
