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
from tests.matrix.releases import RELEASES, SHORT_SET, WHOLE_SET
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
    doctor=True,
    suites={
        "tests/test_a.py": Suite("0" * 16, 1200, skipped={"why": 5}),
        "tests/test_b.py": Suite("1" * 16, 34),
    },
    refused={"resumed_tokens": "has no function", "--pp-size": "hands nothing on"},
)
FAILED = Suite("2" * 16, 7, ("a: b",), {"why": 1})


def test_what_pytest_wrote_is_what_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_left_out.py").write_text("import pytest\npytest.skip('x', allow_module_level=True)\n")
    (tmp_path / "test_wrong.py").write_text("import no_such_module\n")
    junit = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", "."]
    command += ["--continue-on-collection-errors"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode == 1
    suites = results.outcomes(junit, {"test_it.py": "a", "test_left_out.py": "b", "test_wrong.py": "c"})
    assert suites["test_it.py"] == Suite(
        "a",
        passed=1,
        skipped={"refused on this SGLang: why": 2},
        failures=(
            "test_fails: AssertionError: one is not two",
            'test_never_begins: failed on setup with "RuntimeError: no server"',
        ),
    )
    assert suites["test_left_out.py"] == Suite("b", skipped={"collection skipped": 1})
    assert suites["test_wrong.py"].failures == ("test_wrong: collection failure",)
    with pytest.raises(ValueError, match=r"got a case of test_\w+.py, expected some of test_it.py"):
        results.outcomes(junit, {"test_it.py": "a"})


def test_what_is_written_is_read(tmp_path: Path) -> None:
    older = replace(RESULT, release="0.5.12", suites={**RESULT.suites, "tests/test_c.py": FAILED})
    for each in (older, RESULT):
        assert results.write(each, tmp_path).name == f"{each.release}.json"
    found = results.read(tmp_path)
    assert [each.release for each in found] == ["0.5.20", "0.5.12"]
    assert [each.is_served for each in found] == [True, False]
    assert found[1].failures == ["a: b"]
    assert [each.skipped for each in found] == [5, 6]


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "supported"),
        ({"doctor": False}, "fails"),
        ({"suites": {"tests/test_a.py": Suite("0" * 16, 7), "tests/test_c.py": FAILED}}, "fails"),
        ({"suites": {"tests/test_a.py": Suite("0" * 16, skipped={"why": 9})}}, "fails"),
    ],
)
def test_nothing_is_supported_that_failed_or_was_not_run(change: dict[str, Any], state: str) -> None:
    assert replace(RESULT, **change).state == state


def test_the_table() -> None:
    failed = replace(RESULT, release="0.5.12", set="short", suites={"tests/test_c.py": FAILED})
    failed = replace(failed, refused={"--pp-size": "hands nothing on"})
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


def test_a_digest_is_of_the_code_the_packages_and_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = RELEASES["0.5.23"]
    whole, short = results.digests(newest), results.digests(replace(newest, whole=False))
    assert whole == results.digests(newest)
    tests = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/[ep]*/test_*.py")}
    assert set(whole) == {path for path in tests if path.startswith(WHOLE_SET)}
    assert set(short) == {word.partition("::")[0] for word in SHORT_SET}
    oracles, requests = "tests/engine/test_oracles.py", "tests/engine/test_requests.py"
    assert short[oracles] != whole[oracles]  # some of its tests
    assert short[requests] == whole[requests]
    assert not set(whole.values()) & set(results.digests(RELEASES["0.5.20"]).values())


def test_what_has_a_result_of_the_same_code_is_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = RELEASES["0.5.20"]
    done = {path: Suite(code, 1) for path, code in results.digests(release).items()}
    one, other, *_ = done
    found = [replace(RESULT, suites=done)]
    monkeypatch.setattr(results, "read", lambda folder=tmp_path: found)
    monkeypatch.setattr(matrix, "environment", None)  # nothing may be installed
    assert matrix.main(["run", "0.5.20"]) == 0
    assert "0.5.20: done, supported" in capsys.readouterr().out
    for suites, num_left in (
        ({**done, one: Suite("another", 1)}, 1),
        ({**done, one: Suite("another", 1), other: replace(done[other], failures=("a: b",))}, 2),
        ({"tests/engine/test_gone.py": done[one]}, len(done)),
    ):
        found[0] = replace(RESULT, suites=suites)
        with pytest.raises(TypeError, match="not callable"):
            matrix.main(["run", "0.5.20"])
        assert f"; {num_left} files to run" in capsys.readouterr().out


def test_the_exit_status_says_that_something_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(RESULT, suites={"tests/test_c.py": FAILED})
    monkeypatch.setattr(results, "read", lambda: [failed])
    assert matrix.main(["table", "0.5.20"]) == 1
    assert matrix.main(["table", "0.5.12"]) == 1  # was never run
    with pytest.raises(SystemExit):
        matrix.main(["run", "0.4.0"])
