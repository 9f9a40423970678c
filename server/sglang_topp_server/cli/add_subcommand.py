"""`add_command`: add a subcommand to `sglang-topp`, with examples in the subcommand's help."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Sequence

__all__ = ["add_command"]


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    *,
    examples: Sequence[str],
    details: str = "",
    notes: str = "",
    usage: str | None = None,
) -> argparse.ArgumentParser:
    """Add a subcommand, and return its parser.

    Args:
        commands: the parsers of all subcommands.
        name: the subcommand's name.
        summary: one line for `sglang-topp --help`, and for the subcommand's own help.
        examples: shell commands, for the end of the subcommand's help.
        details: sentences that follow the summary in the subcommand's help.
        notes: sentences that follow the options in the subcommand's help.
        usage: the usage line of the subcommand's help; argparse generates this line if `usage` is None.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    description = f"{summary[0].upper()}{summary[1:]}."
    if details:
        description += f"\n\n{_fill(details)}"
    if notes:
        notes = f"{_fill(notes)}\n\n"
    return commands.add_parser(
        name,
        help=summary,
        usage=usage,
        description=description,
        epilog=f"{notes}examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _fill(text: str) -> str:
    """Wrap text to the terminal's width, because `RawDescriptionHelpFormatter` does not wrap text."""
    return textwrap.fill(text, shutil.get_terminal_size().columns - 2)
