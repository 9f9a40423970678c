"""The temporary environment of one SGLang release: 10 GB, removed after the run."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.matrix.releases import FOLDER, Release

__all__ = ["JOURNALS", "ROOT", "UV", "environment", "pin"]

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
JOURNALS = ROOT / ".matrix"  # outcomes of interrupted runs
_ENVIRONMENT = JOURNALS / "environment"
_EXTRAS = ("torch", "server", "sglang", "data")


@contextlib.contextmanager
def environment(release: Release) -> Iterator[Path]:
    """Create an environment with the locked packages of a release and this checkout.

    Yields the folder of its executables, and removes the environment at the end of the `with` block.

    Raises:
        subprocess.CalledProcessError: uv failed; its message is on stderr.
    """
    shutil.rmtree(_ENVIRONMENT, ignore_errors=True)
    try:
        _uv("venv", "--quiet", "--python", release.python, _ENVIRONMENT)
        executables = _ENVIRONMENT / "bin"
        into = ("--quiet", "--python", executables / "python")
        # `--no-deps`: the lock is complete, and overrides contradict the requirements of some packages.
        _uv("pip", "install", *into, "--no-deps", "--require-hashes", "--requirements", release.lock)
        _uv("pip", "install", *into, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        yield executables
    finally:
        shutil.rmtree(_ENVIRONMENT, ignore_errors=True)


def pin(release: Release) -> None:
    """Write the release's lock file: the newest compatible packages, with hashes, from wheels only.

    The lock names no package index, so it installs from the configured one, and needs no compiler.
    """
    FOLDER.mkdir(exist_ok=True)
    extras = [word for extra in _EXTRAS for word in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        options: list[str | Path] = []
        constraints = (f"sglang=={release.version}", *release.constraints)
        for option, lines in (("--constraint", constraints), ("--override", release.overrides)):
            options += [option, _write_lines(Path(folder) / f"{option}.txt", lines)]
        _uv(
            *("pip", "compile", "pyproject.toml", *extras, "--group", "matrix", *options),
            *("--python-version", release.python, "--generate-hashes", "--no-emit-index-url", "--no-header"),
            *(
                "--only-binary",
                ":all:",
                "--no-annotate",
                "--quiet",
                "--upgrade",
                "--output-file",
                release.lock,
            ),
        )


def _write_lines(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def _uv(*arguments: str | Path) -> None:
    subprocess.run([UV, *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
