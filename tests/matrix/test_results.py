"""A run's outcome is read as pytest wrote it, and told as it was."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_topp_patches.releases import RELEASES as SERVED
from tests.matrix import __main__ as matrix
from tests.matrix import results
from tests.matrix.environment import ROOT
from tests.matrix.releases import RELEASES
from tests.matrix.results import Result, Suite

TESTS = """
import pytest

@pytest.fixture
def broken():
    raise RuntimeError("no server")

def test_holds(): pass

def test_fails():
    assert 1 == 2, "one is not two"

def test_never_begins(broken): pass

@pytest.mark.skip(reason="refused on this SGLang: why")
@pytest.mark.parametrize("case", [1, 2])
def test_left_out(case): pass
"""
RESULT = Result(
    release="0.5.20",
    python="3.11.7",
    torch="2.13.0+cu130",
    set="whole",
    code="0" * 16,
    doctor=True,
    tests={"passed": 1234, "failed": 0, "skipped": 5},
    refused={"resumed_tokens": "has no function", "--pp-size": "hands nothing on"},
)


def test_what_pytest_wrote_is_what_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", "."]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 1
    suite = Suite.of(junit)
    assert suite.passed == 1
    assert suite.skipped == {"refused on this SGLang: why": 2}
    assert suite.failures == (
        "test_it::test_fails: AssertionError: one is not two",
        'test_it::test_never_begins: failed on setup with "RuntimeError: no server"',
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    older = replace(RESULT, release="0.5.12", skipped={"why": 5}, failures=("a: b",))
    for each in (older, RESULT):
        assert results.write(each, tmp_path).name == f"{each.release}.json"
    found = results.read(tmp_path)
    assert [each.release for each in found] == ["0.5.20", "0.5.12"]
    assert [each.is_served for each in found] == [True, False]
    assert list(found[1].failures) == ["a: b"]
    assert found[1].skipped == {"why": 5}


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "supported"),
        ({"doctor": False}, "fails"),
        ({"failures": ("a: b",)}, "fails"),
        ({"tests": {"passed": 0, "failed": 0, "skipped": 9}}, "fails"),
    ],
)
def test_nothing_is_supported_that_failed_or_was_not_run(change: dict[str, Any], state: str) -> None:
    assert replace(RESULT, **change).state == state


def test_the_table() -> None:
    failed = replace(RESULT, release="0.5.12", doctor=False, set="short", failures=("a: b",))
    failed = replace(
        failed, refused={"--pp-size": "hands nothing on"}, tests={"passed": 7, "failed": 1, "skipped": 0}
    )
    lines = results.table([RESULT, failed]).splitlines()
    assert lines[2:4] == [
        "| 0.5.20 | 2.13.0 | 3.11 | supported | 1,234 of the whole set | `--pp-size`, `resumed_tokens` |",
        "| 0.5.12 | 2.13.0 | 3.11 | fails | 7 of the short set, 1 failed | `--pp-size` |",
    ]
    assert lines[4].startswith("| any other |")
    assert {line.count("|") for line in lines[:5]} == {7}
    assert lines[5:] == [
        "",
        "- `--pp-size`, 0.5.12 to 0.5.20: hands nothing on.",
        "- `resumed_tokens`, 0.5.20: has no function.",
    ]


def test_the_readme_shows_what_came_out() -> None:
    found = results.read()
    assert results.table(found) in (ROOT / "README.md").read_text(), "see `python -m tests.matrix table`"
    assert all(each.is_served for each in found)


def test_what_is_served_was_run() -> None:
    """`make test` is the newest's run."""
    newest, *others = SERVED
    assert {each.release for each in results.read()} - {newest} == set(others)


def test_a_digest_is_of_the_code_the_packages_and_the_set() -> None:
    newest = RELEASES["0.5.23"]
    assert results.digest(newest) == results.digest(newest)
    assert results.digest(newest) != results.digest(RELEASES["0.5.20"])
    assert results.digest(newest) != results.digest(replace(newest, whole=False))


def test_a_release_with_a_result_of_the_same_code_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = RELEASES["0.5.20"]
    done = replace(RESULT, code=results.digest(release))
    monkeypatch.setattr(results, "read", lambda folder=tmp_path: [done])
    monkeypatch.setattr(matrix, "environment", None)  # nothing may be installed
    assert matrix.main(["run", "0.5.20"]) == 0
    assert "0.5.20: done, supported" in capsys.readouterr().out


def test_the_exit_status_says_that_something_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(RESULT, failures=("a: b",))
    monkeypatch.setattr(results, "read", lambda: [failed])
    assert matrix.main(["table", "0.5.20"]) == 1
    assert matrix.main(["table", "0.5.12"]) == 1  # was never run
    with pytest.raises(SystemExit):
        matrix.main(["run", "0.4.0"])
