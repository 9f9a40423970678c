"""Run commands, and make environments that have nothing but what a test installs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

__all__ = ["NAME", "ROOT", "UV", "make_environment", "run"]

NAME = "sglang-topp"
ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"


def run(
    *command: str | Path, check: bool = True, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. With `check`, any other status than 0 fails the test."""
    ended = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, cwd=cwd, env=env
    )
    assert not check or ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def make_environment(folder: Path, *requirements: str) -> Path:
    """Make an environment of these requirements, in the versions of `requirements.lock`.

    `make setup` has put these versions into uv's cache, so that the installation links files in seconds.

    Returns:
        The folder of its executables.
    """
    pins = re.findall(r"^[\w.-]+(?:\[[\w,-]+\])?==[^\s;]+", (ROOT / "requirements.lock").read_text(), re.M)
    constraints = folder.with_suffix(".txt")
    constraints.write_text("\n".join(pins))
    run(UV, "venv", "--quiet", "--python", sys.executable, folder)
    run(UV, "pip", "install", "--quiet", "--python", folder, "--constraint", constraints, *requirements)
    return folder / "bin"
