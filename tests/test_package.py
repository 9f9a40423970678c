"""What `pip install sglang-topp`, without extras, brings: the client, and nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "sglang", "fastapi", "transformers", "triton", "pydantic", "uvicorn"}


UV = Path(sys.executable).parent / "uv"


def run(
    *command: str | Path, check: bool = True, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, cwd=cwd
    )
    assert not check or ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.fixture(scope="module")
def base_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an empty environment's executables, with the built wheel installed into it."""
    folder = tmp_path_factory.mktemp("base")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder, cwd=ROOT)
    (wheel,) = folder.glob("*.whl")
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "env")
    run(UV, "pip", "install", "--quiet", "--python", folder / "env" / "bin" / "python", wheel)
    return folder / "env" / "bin"


@pytest.fixture(autouse=True)
def _outside_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_brings_nothing_heavy(base_install: Path) -> None:
    listing = run(UV, "pip", "list", "--format", "json", "--python", base_install / "python")
    names = {package["name"] for package in json.loads(listing.stdout)}
    assert {"sglang-topp", "numpy", "pybase64", "httpx"} <= names
    assert not names & HEAVY
    assert len(names) <= 12


def test_the_client_imports_and_decodes(base_install: Path) -> None:
    program = """
import sys
import sglang_topp, sglang_topp_client
from sglang_topp import CandidateSets, wire
sets = CandidateSets([3, 1, 5], [-0.5, -1.5, -0.1], [0, 2, 3], [1, 5])
assert wire.unpack_base64(wire.pack_base64(sets)) == sets
sglang_topp_client.RolloutClient("http://127.0.0.1:1")
print(sglang_topp.__file__)
"""
    where = run(base_install / "python", "-c", program).stdout
    assert "site-packages" in where


def test_the_command_says_what_is_missing(base_install: Path) -> None:
    assert "serve" in run(base_install / "sglang-topp", "--help").stdout
    for arguments, extra in (
        (["serve", "--model-path", "m"], "sglang"),
        (["sidecar", "--engine-url", "http://127.0.0.1:1"], "server"),
        (["doctor"], "sglang"),
        (["rollouts", "rollouts.parquet"], "data"),
    ):
        ended = run(base_install / "sglang-topp", *arguments, check=False)
        assert ended.returncode == 2
        assert f"sglang-topp[{extra}" in ended.stderr or f",{extra}]" in ended.stderr
