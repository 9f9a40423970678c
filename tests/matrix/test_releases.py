"""The plugin, the matrix, the lock files, and pyproject.toml list the same releases."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from sglang_topp_patches.releases import RELEASES as SERVED
from tests.matrix.environment import ROOT
from tests.matrix.releases import RELEASES, SHORT_SET, WHOLE_SET, Release, select_releases

HASH = r" \\\n    --hash=sha256:[0-9a-f]{64}"


def _sglang_requirement() -> Requirement:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = extras["sglang"]
    return Requirement(requirement)


def test_supported_releases_are_tested_and_sorted_newest_first() -> None:
    assert set(SERVED) <= set(RELEASES)
    assert list(RELEASES) == sorted(RELEASES, key=Version, reverse=True)
    assert list(SERVED) == sorted(SERVED, key=Version, reverse=True)


def test_sglang_extra_spans_the_oldest_to_the_newest_release() -> None:
    versions = [Version(version) for version in RELEASES]
    assert all(_sglang_requirement().specifier.contains(version) for version in versions)
    assert {str(each) for each in _sglang_requirement().specifier} == {
        f">={min(versions)}",
        f"<={max(versions)}",
    }


def test_requirements_lock_pins_the_newest_release() -> None:
    newest = next(iter(RELEASES))
    assert re.search(
        rf"^sglang=={re.escape(newest)} ", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )


def test_all_python_versions_of_trainers_are_covered() -> None:
    assert {release.python for release in RELEASES.values()} == {"3.11", "3.12", "3.13"}


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_lock_pins_every_package_with_hashes_and_names_no_index(release: Release) -> None:
    lock = release.lock.read_text()
    for line in (f"sglang=={release.version}", "torch==", "pytest==", "hatchling=="):
        assert re.search(rf"^{re.escape(line)}", lock, re.MULTILINE), line
    assert re.fullmatch(rf"(?:[\w.-]+==[\w.+!-]+(?: ; [^\n]+?)?(?:{HASH})+\n)+", lock)
    for requirement in (*release.constraints, *release.overrides):
        wanted = Requirement(requirement)
        pinned = re.search(rf"^{re.escape(wanted.name)}==(\S+)", lock, re.MULTILINE)
        assert pinned is not None
        assert wanted.specifier.contains(pinned[1], prereleases=True)


@pytest.mark.parametrize("test", [*SHORT_SET, *WHOLE_SET])
def test_selected_tests_exist(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name}(" in (ROOT / path).read_text()


def test_unknown_release_is_named_in_the_error() -> None:
    assert select_releases(["0.5.20"]) == [RELEASES["0.5.20"]]
    assert select_releases([]) == list(RELEASES.values())
    with pytest.raises(ValueError, match=r"got the releases 0\.4\.0, expected some of 0\.5\.23, 0\.5\.22"):
        select_releases(["0.5.20", "0.4.0"])
