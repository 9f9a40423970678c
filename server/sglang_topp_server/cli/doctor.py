"""`sglang-topp doctor`: check the installed SGLang. The checks are in `sglang_topp_patches.doctor`."""

from __future__ import annotations

import argparse
from importlib.util import find_spec

from sglang_topp_server.cli.common import FAILED, USAGE, Commands, add_command, fail

__all__ = ["add_parsers"]


def add_parsers(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "doctor",
        "check that the installed SGLang returns candidate sets",
        _run,
        details="The exit status is 0 if it does, and 1 otherwise.",
        examples=[
            "sglang-topp doctor",
            "SGLANG_PLATFORM=sglang_topp_cpu sglang-topp doctor   # on a CPU, SGLang before 0.5.14",
        ],
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="list every function that is hooked or called, and the limits",
    )


def _run(args: argparse.Namespace) -> int:
    if find_spec("sglang") is None:
        return fail(
            "SGLang is not installed, so there is nothing to check: pip install 'sglang-topp[sglang]'", USAGE
        )
    from sglang_topp_patches.doctor import report

    is_whole, lines = report(args.verbose)
    print("\n".join(lines))
    return 0 if is_whole else FAILED
