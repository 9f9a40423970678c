"""`sglang-topp doctor`: check every function of the installed SGLang that the patch set depends on.

The checks themselves are in `sglang_topp_patches.doctor`.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from sglang_topp_server.cli.add_subcommand import add_command
from sglang_topp_server.cli.exit_status import FAILED, USAGE, fail

__all__ = ["add_parser"]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "doctor",
        "check every seam of the patch set in the installed SGLang",
        details="It prints one line for each seam. The exit status is 0 if all hold, and 1 otherwise.",
        examples=[
            "sglang-topp doctor",
            "SGLANG_PLATFORM=sglang_topp_cpu sglang-topp doctor   # on a CPU, SGLang before 0.5.14",
        ],
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if find_spec("sglang") is None:
        return fail(
            "SGLang is not installed, so there is nothing to check: pip install 'sglang-topp[sglang]'", USAGE
        )
    from sglang_topp_patches.doctor import report

    is_whole, lines = report()
    print("\n".join(lines))
    return 0 if is_whole else FAILED
