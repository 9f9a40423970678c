"""`pip install sglang-topp` without extras installs the client, and nothing large."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.matrix.releases import RELEASES, Release
from tests.packaging.environments import NAME, UV, run

HEAVY = {"torch", "sglang", "fastapi", "transformers", "triton", "pydantic", "uvicorn"}


@pytest.fixture(scope="module")
def base_install(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an empty environment's executables, with the built wheel installed into it."""
    folder = tmp_path_factory.mktemp("base")
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "env")
    run(UV, "pip", "install", "--quiet", "--python", folder / "env" / "bin" / "python", wheel)
    return folder / "env" / "bin"


def test_it_brings_nothing_heavy(base_install: Path) -> None:
    listing = run(UV, "pip", "list", "--format", "json", "--python", base_install / "python")
    names = {package["name"] for package in json.loads(listing.stdout)}
    assert {"sglang-topp", "numpy", "pybase64", "aiohttp"} <= names
    assert not names & HEAVY
    # aiohttp comes with nine small packages. SGLang brings all of them too, and msgspec, which comes alone.
    assert len(names) <= 15


def test_the_client_imports_and_decodes(base_install: Path) -> None:
    program = """
import sys
import sglang_topp, sglang_topp_client
from sglang_topp import CandidateSets
from sglang_topp import formats
sets = CandidateSets([3, 1, 5], [-0.5, -1.5, -0.1], [0, 2, 3], [1, 5])
assert formats.unpack_base64(formats.pack_base64(sets)) == sets
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
        (["view", "rollouts.parquet"], "data"),
        (["generate", "--url", "http://127.0.0.1:1", "--prompt", "a", "--out", "run"], "data"),
    ):
        ended = run(base_install / "sglang-topp", *arguments, check=False)
        assert ended.returncode == 2
        assert f"sglang-topp[{extra}" in ended.stderr or f",{extra}]" in ended.stderr


def installed_beside(release: Release, folder: Path) -> Path:
    """The Python of an environment with only the metadata of a release's packages.

    An installer sees their names and versions, from the release's lock, and the torch that its SGLang needs.
    """
    run(UV, "venv", "--quiet", "--python", sys.executable, folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", release.lock.read_text(), re.MULTILINE))
    for name, version in pins.items():
        information = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        information.mkdir()
        needs = f"Requires-Dist: torch=={pins['torch']}\n" if name == "sglang" else ""
        (information / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        (information / "RECORD").write_text("")
        (information / "INSTALLER").write_text("uv\n")
    return folder / "bin" / "python"


@pytest.mark.parametrize("version", ["0.5.12", "0.5.15.post1", "0.5.20"])
@pytest.mark.parametrize("extra", ["", "[sglang]", "[sglang,server,torch,data]"])
def test_an_environment_with_sglang_gets_our_package_and_nothing_else(
    wheel: Path, tmp_path: Path, version: str, extra: str
) -> None:
    python = installed_beside(RELEASES[version], tmp_path / "env")
    ours = f"{NAME}{extra} @ {wheel.as_uri()}"
    told = run(UV, "pip", "install", "--dry-run", "--python", python, ours).stderr
    changes = [line.strip() for line in told.splitlines() if line.lstrip().startswith(("+ ", "- ", "~ "))]
    assert [line.split("==")[0].split(" @ ")[0] for line in changes] == [f"+ {NAME}"], told


def test_an_sglang_that_is_not_served_would_be_changed(wheel: Path, tmp_path: Path) -> None:
    """This shows that the test above can fail. Without the extra, nothing changes either."""
    python = installed_beside(RELEASES["0.5.12"], tmp_path / "env")
    (information,) = (tmp_path / "env").glob("lib/python*/site-packages/sglang-0.5.12.dist-info")
    metadata = (information / "METADATA").read_text()
    (information / "METADATA").write_text(metadata.replace("Version: 0.5.12", "Version: 0.5.11"))
    information.rename(information.with_name("sglang-0.5.11.dist-info"))
    look = (UV, "pip", "install", "--dry-run", "--python", python)
    with_extra = run(*look, f"{NAME}[sglang] @ {wheel.as_uri()}")
    assert "- sglang==0.5.11" in with_extra.stderr
    assert "- torch==" in with_extra.stderr
    without = run(*look, f"{NAME} @ {wheel.as_uri()}")
    assert " - " not in without.stderr
