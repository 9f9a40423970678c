"""What comes out of a run of pytest, written down as each file of tests ends.

As pytest's plugin (`-p tests.matrix.journal --journal FILE`) it appends a line of JSON for each file that is
done, so that a run which is interrupted, or dies, has lost only the file it was in:

    {"path", "passed", "failures": [...], "skipped": {reason: count}}

It is imported in a release's environment: of pytest and the standard library alone.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

__all__ = ["Journal"]


class Journal:
    """Counts what a file's tests came to, and writes it down once the last of them is over."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._left = Counter[str]()  # tests that are not over, by path
        self._failed = list[pytest.TestReport]()  # of the test that is running: its set-up, call or end
        self._skipped_here = list[pytest.TestReport]()
        self._passed = Counter[str]()
        self._failures = defaultdict[str, list[str]](list)
        self._skipped = defaultdict[str, Counter[str]](Counter)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported, or is left out whole, has no tests."""
        path = _path(report.nodeid)
        if path.endswith(".py") and not report.passed:
            if report.failed:
                self._failures[path].append(f"{Path(path).stem}: {_reason(report)}")
            else:
                self._skipped[path][_reason(report)] += 1
            self._write(path)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._left = Counter(_path(item.nodeid) for item in session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report)
        elif report.skipped:
            self._skipped_here.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        path, _, name = nodeid.partition("::")
        if self._failed:
            self._failures[path].append(f"{name}: {_reason(self._failed[0])}")
        elif self._skipped_here:
            self._skipped[path][_reason(self._skipped_here[0])] += 1
        else:
            self._passed[path] += 1
        self._failed.clear()
        self._skipped_here.clear()
        self._left[path] -= 1
        if not self._left[path]:
            self._write(path)

    def _write(self, path: str) -> None:
        line = {
            "path": path,
            "passed": self._passed[path],
            "failures": self._failures[path],
            "skipped": self._skipped[path],
        }
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--journal", type=Path, required=True, help="what each file of tests came to goes here")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Journal(config.getoption("journal")))


def _path(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Its first line; a failure's is that of what was raised."""
    told = report.longrepr
    if isinstance(told, tuple):  # of a skip: where, which line, why
        text = told[2].removeprefix("Skipped: ")
    elif crash := getattr(told, "reprcrash", None):
        text = crash.message
    else:  # a file that cannot be imported: its traceback, the error last
        text = str(told).strip().rpartition("\n")[2]
    return text.strip().partition("\n")[0][:200]
