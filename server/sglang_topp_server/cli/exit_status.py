"""The exit statuses of `sglang-topp`, and the line that a failed command prints."""

from __future__ import annotations

import sys

__all__ = ["FAILED", "INTERRUPTED", "USAGE", "fail"]

FAILED = 1
"""The command failed."""

USAGE = 2
"""The command could not start: an argument is wrong, or an extra is not installed."""

INTERRUPTED = 130
"""SIGINT ended the command. Shells use the status 128 + 2 for a command that SIGINT (signal 2) ended."""


def fail(message: str, status: int = FAILED) -> int:
    """Print the message to stderr, and return the exit status."""
    print(f"sglang-topp: error: {message}", file=sys.stderr)
    return status
