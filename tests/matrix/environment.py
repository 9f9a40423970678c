"""One environment, for one release at a time: ten gigabytes, which are gone again afterwards."""

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
JOURNALS = ROOT / ".matrix"  # what came out of runs that were ended
_ENVIRONMENT = JOURNALS / "environment"
_EXTRAS = ("torch", "server", "sglang", "tensordict", "data")


@contextlib.contextmanager
def environment(release: Release) -> Iterator[Path]:
    """The folder of executables of an environment with this release, all of it as its lock has it, and this
    checkout; it is removed in the end.

    Raises:
        subprocess.CalledProcessError: uv could not make it; what it said went to stderr.
    """
    shutil.rmtree(_ENVIRONMENT, ignore_errors=True)
    try:
        _uv("venv", "--quiet", "--python", release.python, _ENVIRONMENT)
        executables = _ENVIRONMENT / "bin"
        into = ("--quiet", "--python", executables / "python")
        # The lock has all of it, and with an override other versions than some package asks for.
        _uv("pip", "install", *into, "--no-deps", "--require-hashes", "--requirements", release.lock)
        _uv("pip", "install", *into, "--no-deps", "--no-build-isolation", "--editable", ROOT)
        yield executables
    finally:
        shutil.rmtree(_ENVIRONMENT, ignore_errors=True)


def pin(release: Release) -> None:
    """Write the release's lock anew: the newest of everything that goes with it, with hashes, from wheels.

    It names no package index, so that it installs from whichever one is configured, without a compiler.
    """
    FOLDER.mkdir(exist_ok=True)
    extras = [word for extra in _EXTRAS for word in ("--extra", extra)]
    with tempfile.TemporaryDirectory() as folder:
        given: list[str | Path] = []
        constraints = (f"sglang=={release.version}", *release.constraints)
        for option, lines in (("--constraint", constraints), ("--override", release.overrides)):
            given += [option, _written(Path(folder) / f"{option}.txt", lines)]
        _uv(
            *("pip", "compile", "pyproject.toml", *extras, "--group", "matrix", *given),
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


def _written(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def _uv(*arguments: str | Path) -> None:
    subprocess.run([UV, *arguments], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
