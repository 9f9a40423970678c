"""Runs test files in a new process, with or without Triton's interpreter.

Triton reads `TRITON_INTERPRET` when it is imported, so one process cannot run both.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["run_in_subprocess"]


def run_in_subprocess(*files: Path, interpret: bool) -> None:
    """Run the tests in `files`. Fails unless all of them pass and none is skipped."""
    pytest.importorskip("triton", reason="torch brings Triton on Linux only")
    environment = os.environ | {"TRITON_INTERPRET": "1" if interpret else "0"}
    if interpret:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    if interpret:
        command += ["-p", "tests.faster_interpreter"]
    done = subprocess.run(
        command,
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
