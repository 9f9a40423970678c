"""The shared parts of the commands: subcommands with examples, argument types, API keys, and exit statuses.

No command takes an API key as an argument, because process lists show command-line arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from sglang_topp.errors import InvalidInputError

FAILED = 1
"""The command failed."""

USAGE = 2
"""The command could not start: an argument is wrong, or an extra is not installed."""

INTERRUPTED = 130
"""SIGINT ended the command. Shells use the status 128 + 2 for a command that SIGINT (signal 2) ended."""

SIDECAR_KEY = "SGLANG_TOPP_API_KEY"
"""The environment variable that holds the sidecar's API key, which callers must send."""

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def fail(message: str, status: int = FAILED) -> int:
    """Print the message to stderr, and return the exit status."""
    print(f"sglang-topp: error: {message}", file=sys.stderr)
    return status


def read_key(name: str) -> str | None:
    """Return the API key in the environment variable called `name`, or None if the variable is not set.

    Raises:
        InvalidInputError: the key is empty, or begins or ends with white space.
    """
    key = os.environ.get(name)
    if key is not None and not key.strip():
        raise InvalidInputError(f"{name} is set but empty; unset it to require no key")
    if key is not None and key != key.strip():
        raise InvalidInputError(f"{name} begins or ends with white space, which HTTP headers do not carry")
    return key


def port(text: str) -> int:
    """Parse a port from 0 to 65535."""
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError(f"got {text}, expected a port from 0 to 65535")
    return value


def count(text: str, least: int = 1) -> int:
    """Parse an integer of `least` or more."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"got {text}, expected {least} or more")
    return value


def count_or_zero(text: str) -> int:
    """Parse an integer of 0 or more."""
    return count(text, 0)


def seconds(text: str) -> float:
    """Parse a finite number of seconds above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of seconds above 0")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object such as '{{\"seed\": 1}}'")
    return value


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
    *,
    examples: Sequence[str],
    details: str = "",
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Add a subcommand, and return its parser.

    Args:
        commands: the parsers of all subcommands.
        name: the subcommand's name.
        summary: one line for `sglang-topp --help`, and for the subcommand's own help.
        run: runs the subcommand, and returns its exit status.
        examples: shell commands, for the end of the subcommand's help.
        details: sentences that follow the summary in the subcommand's help.
        usage: the usage line of the subcommand's help; argparse generates this line if `usage` is None.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        usage=usage,
        # `RawDescriptionHelpFormatter` keeps the lines of the examples, and wraps no text.
        description=textwrap.fill(
            f"{summary[0].upper()}{summary[1:]}. {details}", shutil.get_terminal_size().columns - 2
        ),
        epilog="\n  ".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser
