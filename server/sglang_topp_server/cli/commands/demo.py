"""`sglang-topp demo`: run the example `rollout_loop.py`, which serves a small model.

The example prints candidate sets, and importance ratios with and without replay.

The wheel installs a copy of `examples/rollout_loop.py` beside this file.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from sglang_topp_server.cli.add_subcommand import add_command

__all__ = ["add_parser"]

_NAME = "rollout_loop.py"


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "demo",
        "create a small model, serve it, and print candidate sets and importance ratios",
        notes="It takes about two minutes, mostly to start SGLang.",
        examples=["sglang-topp demo"],
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    here = Path(__file__)
    installed = here.with_name(_NAME)
    path = installed if installed.exists() else here.parents[4] / "examples" / _NAME
    sys.argv = [_NAME]  # no arguments
    return int(runpy.run_path(str(path))["main"]())
