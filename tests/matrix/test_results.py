"""A run's outcome is read as pytest wrote it, and told as it was."""

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

def test_never_begins(broken): pass

@pytest.mark.skip(reason="refused on this SGLang: why")
@pytest.mark.parametrize("case", [1, 2])
def test_left_out(case): pass
"""
TEST_WHOSE_END_FAILS = """
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
    """As the matrix does."""
    with (folder / "journal.jsonl").open("a") as file:
        file.write(f"\n{json.dumps(codes)}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={folder}", *codes]
    command += ["-p", "tests.matrix.journal", "--journal", "journal.jsonl", "--continue-on-collection-errors"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL).returncode


def test_what_pytest_came_to_is_what_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_left_out.py").write_text("import pytest\npytest.skip('why', allow_module_level=True)\n")
    (tmp_path / "test_wrong.py").write_text("import no_such_module\n")
    (tmp_path / "test_end.py").write_text(TEST_WHOSE_END_FAILS)
    codes = {"test_it.py": "a", "test_left_out.py": "b", "test_wrong.py": "c", "test_end.py": "d"}
    assert run_pytest(tmp_path, codes) == 1
    suites = results.outcomes(tmp_path / "journal.jsonl")
    assert suites["test_it.py"] == Suite(
        "a",
        passed=1,
        skipped={"refused on this SGLang: why": 2},
        failures=("test_fails: AssertionError: one is not two", "test_never_begins: RuntimeError: no server"),
    )
    assert suites["test_left_out.py"] == Suite("b", skipped={"why": 1})
    (failure,) = suites["test_wrong.py"].failures
    assert failure.startswith("test_wrong: ")
    assert "No module named 'no_such_module'" in failure
    assert suites["test_end.py"] == Suite("d", passed=1, failures=("test_one: OSError: still running",))


def test_what_ended_before_a_run_did_is_kept(tmp_path: Path) -> None:
    """Pytest is killed in its second file, as it writes; the next run goes on with that file."""
    (tmp_path / "test_1.py").write_text("def test_one(): pass\ndef test_two(): pass\n")
    second = "import os\ndef test_one(): pass\ndef test_two(): {}\n"
    (tmp_path / "test_2.py").write_text(second.format("os.kill(os.getpid(), 9)"))
    journal = tmp_path / "journal.jsonl"
    assert run_pytest(tmp_path, {"test_1.py": "a", "test_2.py": "b"}) == -9
    assert results.outcomes(journal) == {"test_1.py": Suite("a", 2)}
    with journal.open("a") as file:
        file.write('{"path": "test_2.py", "pas')
    # Not by the signal: it is ignored where a shell started all of this in the background.
    (tmp_path / "test_2.py").write_text(second.format("raise KeyboardInterrupt"))
    assert run_pytest(tmp_path, {"test_2.py": "c"}) == 2
    assert results.outcomes(journal) == {"test_1.py": Suite("a", 2)}
    (tmp_path / "test_2.py").write_text("def test_one(): pass\n")
    assert run_pytest(tmp_path, {"test_2.py": "d"}) == 0
    assert results.outcomes(journal) == {"test_1.py": Suite("a", 2), "test_2.py": Suite("d", 1)}
    assert results.outcomes(tmp_path / "none.jsonl") == {}


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
    pipeline = {"--pp-size": "hands nothing on"}
    refused = {"0.5.20": {"resumed_tokens": "has no function", **pipeline}, "0.5.12": pipeline}
    lines = results.table([RESULT, failed], refused).splitlines()
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
    expected = results.table(found, REASONS)
    assert expected in (ROOT / "README.md").read_text(), "see `python -m tests.matrix table`"
    assert all(each.is_served for each in found)


def test_what_is_served_was_run() -> None:
    """And what is refused was refused then. `make test` is the newest's run."""
    newest, *others = SERVED
    refused = {each.release: set(each.refused) for each in results.read() if each.release != newest}
    assert refused == {release: set(REASONS[release]) for release in others}


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
    monkeypatch.setattr(results, "read", lambda: found)
    monkeypatch.setattr(matrix, "JOURNALS", tmp_path)
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
    ended = [{one: done[one].code}, {"path": one, "passed": 1, "failures": [], "skipped": {}}]
    (tmp_path / "0.5.20.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in ended))
    with pytest.raises(TypeError, match="not callable"):
        matrix.main(["run", "0.5.20"])
    assert f"; {len(done) - 1} files to run" in capsys.readouterr().out


def test_an_end_reaches_pytest(tmp_path: Path) -> None:
    """Whose fixtures then end their engines."""
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
from tests.matrix.__main__ import _wait
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background
_wait([sys.executable, "-c", *sys.argv[1:]])
"""
    command = [sys.executable, "-c", program, pytest_like, str(tmp_path / "ended")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"running\n"
        running.terminate()
        assert running.wait() == 143
    assert (tmp_path / "ended").exists()


def test_the_exit_status_says_that_something_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = replace(RESULT, suites={"tests/test_c.py": FAILED})
    monkeypatch.setattr(results, "read", lambda: [failed])
    assert matrix.main(["table", "0.5.20"]) == 1
    assert matrix.main(["table", "0.5.12"]) == 1  # was never run
    with pytest.raises(SystemExit):
        matrix.main(["run", "0.4.0"])
