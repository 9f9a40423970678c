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
        of: what finishes, in words.
    """

    def __init__(self, total: int, show: bool | None, *, of: str = "rollouts") -> None:
        self._total, self._of = total, of
        self._done = 0
        self._tokens = 0
        self._start = time.monotonic()
        self._is_on = show is not False and _is_terminal()
        self._next = self._start + (0.0 if show else _FIRST_AFTER_S)
        self._has_written = False

    def __enter__(self) -> Progress:
        return self

    def add(self, num_tokens: int) -> None:
        """One more sample, of `num_tokens` tokens."""
        self._done += 1
        self._tokens += num_tokens
        if self._is_on and time.monotonic() >= self._next:
            self._write()
            self._next = time.monotonic() + _EVERY_S

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._has_written and self._is_on:
            self._write(end="\n")

    def _write(self, end: str = "") -> None:
        elapsed_s = max(time.monotonic() - self._start, 1e-6)
        try:
            sys.stderr.write(
                f"\r{self._of} {self._done}/{self._total}  {elapsed_s:.0f} s "
                f" {self._tokens / elapsed_s:.0f} tokens/s {end}"
            )
            sys.stderr.flush()
        except Exception:
            # Closed, or the terminal is gone: no reason to lose samples.
            self._is_on = False
        self._has_written = True


def _is_terminal() -> bool:
    """Whether stderr is one; what somebody put in its place may be closed, or no file at all."""
    try:
        return sys.stderr.isatty()
    except Exception:
        return False
