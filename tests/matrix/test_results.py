"""Outcomes of pytest runs: the journal, stored results, the documented table, and what a new run repeats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang_topp_patches.releases import RELEASES as SERVED
from tests.matrix import __main__ as matrix
from tests.matrix import results
from tests.matrix.__main__ import REASONS
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

def test_setup_fails(broken): pass

@pytest.mark.skip(reason="refused on this SGLang: why")
@pytest.mark.parametrize("case", [1, 2])
def test_skipped(case): pass
"""
TEARDOWN_FAILS = """
import pytest

@pytest.fixture
def server():
    yield
    raise OSError("still running")

def test_one(server): pass

def test_two(): pass
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
    refused=("resumed_tokens", "--pp-size"),
)
FAILED = Suite("2" * 16, 7, ("a: b",), {"why": 1})


def run_pytest(folder: Path, codes: dict[str, str]) -> int:
    """Run pytest with the journal plugin, as the matrix does, and return its exit status."""
    with (folder / "journal.jsonl").open("a") as file:
        file.write(f"\n{json.dumps(codes)}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *codes]
    command += [
        "-p",
        "tests.matrix.pytest_journal",
        "--journal",
        "journal.jsonl",
        "--continue-on-collection-errors",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL).returncode


def test_journal_records_every_kind_of_outcome(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_skipped.py").write_text("import pytest\npytest.skip('why', allow_module_level=True)\n")
    (tmp_path / "test_wrong.py").write_text("import no_such_module\n")
    (tmp_path / "test_teardown.py").write_text(TEARDOWN_FAILS)
    codes = {"test_it.py": "a", "test_skipped.py": "b", "test_wrong.py": "c", "test_teardown.py": "d"}
    assert run_pytest(tmp_path, codes) == 1
    suites = results.read_journal(tmp_path / "journal.jsonl")
    assert suites["test_it.py"] == Suite(
        "a",
        passed=1,
        skipped={"refused on this SGLang: why": 2},
        failures=("test_fails: AssertionError: one is not two", "test_setup_fails: RuntimeError: no server"),
    )
    assert suites["test_skipped.py"] == Suite("b", skipped={"why": 1})
    (failure,) = suites["test_wrong.py"].failures
    assert failure.startswith("test_wrong: ")
    assert "No module named 'no_such_module'" in failure
    assert suites["test_teardown.py"] == Suite("d", passed=1, failures=("test_one: OSError: still running",))


def test_finished_files_of_a_killed_run_are_kept(tmp_path: Path) -> None:
    """Pytest is killed in its second file and leaves half a line. The next run repeats that file."""
    (tmp_path / "test_1.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    second = "import os\ndef test_one(): pass\ndef test_two(): {}\n"
    (tmp_path / "test_2.py").write_text(second.format("os.kill(os.getpid(), 9)"))
    journal = tmp_path / "journal.jsonl"
    assert run_pytest(tmp_path, {"test_1.py": "a", "test_2.py": "b"}) == -9
    assert results.read_journal(journal) == {"test_1.py": Suite("a", 2)}
    with journal.open("a") as file:
        file.write('{"path": "test_2.py", "pas')
    # Raise instead of sending SIGINT: a shell ignores that signal for background jobs.
    (tmp_path / "test_2.py").write_text(second.format("raise KeyboardInterrupt"))
    assert run_pytest(tmp_path, {"test_2.py": "c"}) == 2
    assert results.read_journal(journal) == {"test_1.py": Suite("a", 2)}
    (tmp_path / "test_2.py").write_text("def test_one(): pass\n")
    assert run_pytest(tmp_path, {"test_2.py": "d"}) == 0
    assert results.read_journal(journal) == {"test_1.py": Suite("a", 2), "test_2.py": Suite("d", 1)}
    assert results.read_journal(tmp_path / "none.jsonl") == {}


def test_written_results_are_read_back(tmp_path: Path) -> None:
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
def test_release_that_failed_or_did_not_run_is_not_supported(change: dict[str, Any], state: str) -> None:
    assert replace(RESULT, **change).state == state


def test_table_lists_releases_and_reasons() -> None:
    failed = replace(RESULT, release="0.5.12", set="short", suites={"tests/test_c.py": FAILED})
    pipeline = {"--pp-size": "hands nothing on"}
    refused = {"0.5.20": {"resumed_tokens": "has no function", **pipeline}, "0.5.12": pipeline}
    lines = results.format_table([RESULT, failed], refused).splitlines()
    assert lines[2:4] == [
        "| 0.5.20 | 2.13.0 | 3.11 | supported | 1,234 of the whole set |",
        "| 0.5.12 | 2.13.0 | 3.11 | fails | 7 of the short set, 1 failed |",
    ]
    assert lines[4].startswith("| any other |")
    assert {line.count("|") for line in lines[:5]} == {6}
    assert lines[5:] == [
        "",
        "Older releases refuse:",
        "",
        "- `--pp-size` on 0.5.12 to 0.5.20: hands nothing on.",
        "- `resumed_tokens` on 0.5.20: has no function.",
    ]


def test_the_documentation_shows_the_table_of_the_stored_results() -> None:
    found = results.read()
    expected = results.format_table(found, REASONS)
    page = ROOT / "docs" / "reference" / "releases.md"
    assert expected in page.read_text(), "see `python -m tests.matrix table`"
    assert all(each.is_served for each in found)


def test_every_supported_release_but_the_newest_has_a_result() -> None:
    """The run refused the same features as the plugin does now. `make test` covers the newest release."""
    newest, *others = SERVED
    refused = {each.release: set(each.refused) for each in results.read() if each.release != newest}
    assert refused == {release: set(REASONS[release]) for release in others}


def test_digest_covers_code_packages_and_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = RELEASES["0.5.23"]
    whole, short = results.compute_digests(newest), results.compute_digests(replace(newest, whole=False))
    assert whole == results.compute_digests(newest)
    tests = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/[ep]*/**/test_*.py")}
    folders = tuple(f"{folder}/" for folder in WHOLE_SET)
    assert set(whole) == {path for path in tests if path.startswith(folders)}
    assert set(short) == {word.partition("::")[0] for word in SHORT_SET}
    oracles, requests = "tests/engine/test_sets_against_references.py", "tests/engine/test_request_kinds.py"
    assert short[oracles] != whole[oracles]  # the short set runs some of its tests only
    assert short[requests] == whole[requests]
    assert not set(whole.values()) & set(results.compute_digests(RELEASES["0.5.20"]).values())


def test_files_with_a_current_result_are_not_run_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    release = RELEASES["0.5.20"]
    done = {path: Suite(code, 1) for path, code in results.compute_digests(release).items()}
    one, other, *_ = done
    found = [replace(RESULT, suites=done)]
    monkeypatch.setattr(results, "read", lambda: found)
    monkeypatch.setattr(matrix, "JOURNALS", tmp_path)
    monkeypatch.setattr(matrix, "environment", None)  # an installation would raise TypeError
    assert matrix.main(["run", "0.5.20"]) == 0
    assert "0.5.20: up to date, supported" in capsys.readouterr().out
    for suites, num_left in (
        ({**done, one: Suite("another", 1)}, 1),
        ({**done, one: Suite("another", 1), other: replace(done[other], failures=("a: b",))}, 2),
        ({"tests/engine/test_gone.py": done[one]}, len(done)),
    ):
        found[0] = replace(RESULT, suites=suites)
        with pytest.raises(TypeError, match="not callable"):
            matrix.main(["run", "0.5.20"])
        assert f": {num_left} test files to run" in capsys.readouterr().out
    ended = [{one: done[one].code}, {"path": one, "passed": 1, "failures": [], "skipped": {}}]
    (tmp_path / "0.5.20.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in ended))
    with pytest.raises(TypeError, match="not callable"):
        matrix.main(["run", "0.5.20"])
    assert f": {len(done) - 1} test files to run" in capsys.readouterr().out


def test_termination_interrupts_pytest(tmp_path: Path) -> None:
    """The fixtures of the interrupted run can then stop their engines."""
    pytest_like = """
import pathlib, sys, time
try:
    print("running", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0.5)
    pathlib.Path(sys.argv[1]).touch()
"""
    program = """
import signal, sys
from tests.matrix.__main__ import _run_pytest
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for background jobs
_run_pytest([sys.executable, "-c", *sys.argv[1:]])
"""
    command = [sys.executable, "-c", program, pytest_like, str(tmp_path / "ended")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"running\n"
        running.terminate()
        assert running.wait() == 143
    assert (tmp_path / "ended").exists()


def test_exit_status_is_1_if_a_release_failed_or_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(RESULT, suites={"tests/test_c.py": FAILED})
    monkeypatch.setattr(results, "read", lambda: [failed])
    assert matrix.main(["table", "0.5.20"]) == 1
    assert matrix.main(["table", "0.5.12"]) == 1  # has no result
    with pytest.raises(SystemExit):
        matrix.main(["run", "0.4.0"])
