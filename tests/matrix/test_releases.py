"""The releases that are served, run, pinned and shown are the same ones."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from sglang_topp_patches.releases import RELEASES as SERVED
from tests.matrix.environment import ROOT
from tests.matrix.releases import RELEASES, SHORT_SET, WHOLE_SET, Release, chosen

HASH = r" \\\n    --hash=sha256:[0-9a-f]{64}"


def _extra() -> Requirement:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (requirement,) = extras["sglang"]
    return Requirement(requirement)


def test_all_that_is_served_is_run_the_newest_first() -> None:
    assert set(SERVED) <= set(RELEASES)
    assert list(RELEASES) == sorted(RELEASES, key=Version, reverse=True)
    assert list(SERVED) == sorted(SERVED, key=Version, reverse=True)


def test_the_extra_takes_all_of_them_and_nothing_newer_or_older() -> None:
    versions = [Version(version) for version in RELEASES]
    assert all(_extra().specifier.contains(version) for version in versions)
    assert {str(each) for each in _extra().specifier} == {f">={min(versions)}", f"<={max(versions)}"}


def test_the_environment_of_make_setup_has_the_newest() -> None:
    newest = next(iter(RELEASES))
    assert re.search(
        rf"^sglang=={re.escape(newest)} ", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )


def test_each_python_that_trainers_have_runs_one() -> None:
    assert {release.python for release in RELEASES.values()} == {"3.11", "3.12", "3.13"}


@pytest.mark.parametrize("release", RELEASES.values(), ids=RELEASES)
def test_every_release_is_pinned_with_hashes_and_without_an_index(release: Release) -> None:
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
def test_what_is_run_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert (ROOT / path).exists()
    assert not name or f"def {name}(" in (ROOT / path).read_text()


def test_one_that_is_not_in_the_table_is_named() -> None:
    assert chosen(["0.5.20"]) == [RELEASES["0.5.20"]]
    assert chosen([]) == list(RELEASES.values())
    with pytest.raises(ValueError, match=r"got the releases 0\.4\.0, expected some of 0\.5\.23, 0\.5\.22"):
        chosen(["0.5.20", "0.4.0"])
