"""The contents of the wheel and of the source distribution that `make dist` builds."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

from tests.packaging.environments import ROOT, run

PACKAGES = (
    "sglang_topp",
    "client/sglang_topp_client",
    "server/sglang_topp_server",
    "patches/sglang_topp_patches",
    "integrations/sglang_topp_integrations",
)


def names_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_file_of_the_packages_and_no_other(wheel: Path) -> None:
    expected = set()
    for package in map(Path, PACKAGES):
        for name in run("git", "ls-files", package, cwd=ROOT).stdout.splitlines():
            expected.add(str(Path(name).relative_to(package.parent)))
    names = names_of(wheel)
    information = {name for name in names if ".dist-info/" in name}
    assert names - information == expected
    assert {name.partition(".dist-info/")[2] for name in information} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


def test_the_source_distribution_builds_the_same_wheel(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    wheel, source = distributions
    # Python's own `extractall` takes `filter` from 3.11.4 on, and warns without it from 3.12 on.
    run("tar", "-xf", source, "-C", tmp_path)
    (unpacked,) = tmp_path.iterdir()
    top = {path.name for path in unpacked.iterdir()}
    assert top == {
        *{package.partition("/")[0] for package in PACKAGES},
        "examples",
        *(
            "LICENSE",
            "README.md",
            "CHANGELOG.md",
            "CONTRIBUTING.md",
            "pyproject.toml",
            "PKG-INFO",
            ".gitignore",
        ),
    }
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", cwd=unpacked)
    (rebuilt,) = (unpacked / "dist").glob("*.whl")
    assert rebuilt.name == wheel.name
    assert rebuilt.read_bytes() == wheel.read_bytes()


def test_the_changelog_has_a_section_of_the_version(wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    assert f"\n## {version}" in (ROOT / "CHANGELOG.md").read_text()
