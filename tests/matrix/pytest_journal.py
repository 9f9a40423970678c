"""A pytest plugin that appends the outcomes of each test file to a journal when the file ends.

`-p tests.matrix.pytest_journal --journal FILE` writes one line of JSON per test file. A run that is
interrupted or killed loses only the test file that it was in:

    {"path", "passed", "failures": [...], "skipped": {reason: count}}

The environment of a release imports this module, so it needs only pytest and the standard library.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import pytest

__all__ = ["Journal"]


class Journal:
    """Counts the outcomes of the tests in a file, and writes them after the last one."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._left = Counter[str]()  # unfinished tests by path
        self._failed = list[pytest.TestReport]()  # of the running test: setup, call, or teardown
        self._skipped_here = list[pytest.TestReport]()
        self._passed = Counter[str]()
        self._failures = defaultdict[str, list[str]](list)
        self._skipped = defaultdict[str, Counter[str]](Counter)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file that fails to import or skips itself: it has no tests."""
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
    parser.addoption("--journal", type=Path, required=True, help="file for the outcomes of each test file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Journal(config.getoption("journal")))


def _path(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the first line of the reason of a skip, or of the exception of a failure."""
    reason = report.longrepr
    if isinstance(reason, tuple):  # a skip: path, line number, reason
        text = reason[2].removeprefix("Skipped: ")
    elif crash := getattr(reason, "reprcrash", None):
        text = crash.message
    else:  # an import error: a traceback that ends with the error
        text = str(reason).strip().rpartition("\n")[2]
    return text.strip().partition("\n")[0][:200]
