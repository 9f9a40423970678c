"""Progress: count finished samples, and show a progress line on stderr during long batches."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

__all__ = ["Progress"]

_FIRST_AFTER_S = 2.0
_EVERY_S = 0.2


class Progress:
    """A progress line with the number of finished samples, shown if stderr is a terminal.

    Args:
        total: the number of samples in the batch.
        show: whether to show the line. If `show` is None and the program has not set up logging, the line
            appears once the batch has taken two seconds. If `show` is None and the program has set up
            logging, no line appears, because the line would mix with the log messages.
        of: the plural noun that names the samples in the line, such as "rollouts".
    """

    def __init__(self, total: int, show: bool | None, *, of: str = "rollouts") -> None:
        self._total, self._of = total, of
        self._num_done = self._num_tokens = 0
        self._start = time.monotonic()
        is_wanted = not logging.getLogger(__name__).hasHandlers() if show is None else show
        self._is_on = is_wanted and _is_terminal()
        self._next = self._start + (0.0 if show else _FIRST_AFTER_S)
        self._has_written = False

    def __enter__(self) -> Progress:
        return self

    def add(self, num_tokens: int) -> None:
        """Count one more sample with `num_tokens` tokens."""
        self._num_done += 1
        self._num_tokens += num_tokens
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
                f"\r{self._of} {self._num_done}/{self._total}  {elapsed_s:.0f} s "
                f" {self._num_tokens / elapsed_s:.0f} tokens/s {end}"
            )
            sys.stderr.flush()
        except Exception:
            # The write fails if the terminal was closed. The client then continues without a progress line.
            self._is_on = False
        self._has_written = True


def _is_terminal() -> bool:
    """Return whether stderr is a terminal. The program may have replaced stderr with any object."""
    try:
        return sys.stderr.isatty()
    except Exception:
        return False
