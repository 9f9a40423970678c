"""`sglang-topp demo`: runs `examples/rollout_loop.py`, which the wheel carries beside this file."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

__all__ = ["main"]

_NAME = "rollout_loop.py"


def main() -> int:
    """Run the example; returns its exit status."""
    here = Path(__file__)
    installed = here.with_name(_NAME)
    path = installed if installed.exists() else here.parents[2] / "examples" / _NAME
    sys.argv = [_NAME]  # its own arguments, of which there are none here
    return int(runpy.run_path(str(path))["main"]())
