"""Results of the matrix: one JSON file per release, and the table of releases in the documentation.

    {"release", "python", "torch", "set", "doctor",
     "suites": {path: {"code", "passed", "failures": [...], "skipped": {reason: count}}},
     "refused": [what, ...], "date", "commit"}

`set` is "whole" or "short". `suites` has one entry per test file. `refused` names the features that the
plugin refused on the release at the time of the run.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.matrix.environment import ROOT
from tests.matrix.releases import FOLDER, RELEASES, Release

__all__ = [
    "Result",
    "Suite",
    "compute_digests",
    "format_table",
    "pytest_arguments",
    "read",
    "read_journal",
    "write",
]

_TESTED = ("sglang_topp", "patches", "client", "server", "pyproject.toml")
_TESTS = ("tests/engine", "tests/patches", "tests/skip_missing_features.py")


@dataclass(frozen=True)
class Suite:
    """Outcomes of one test file.

    Attributes:
        code: Digest of the tested code and of the test file.
        passed: Number of tests that passed.
        failures: Failed tests, each with the first line of its error.
        skipped: Number of skipped tests, by the first line of the reason.
    """

    code: str
    passed: int = 0
    failures: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Outcomes of a release's test run, with the versions that it used."""

    release: str
    python: str
    torch: str
    set: str
    doctor: bool
    suites: Mapping[str, Suite]
    refused: tuple[str, ...] = ()
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())
    commit: str = ""

    @property
    def passed(self) -> int:
        return sum(suite.passed for suite in self.suites.values())

    @property
    def skipped(self) -> int:
        return sum(sum(suite.skipped.values()) for suite in self.suites.values())

    @property
    def failures(self) -> list[str]:
        return [failure for suite in self.suites.values() for failure in suite.failures]

    @property
    def is_served(self) -> bool:
        return self.doctor and not self.failures and self.passed > 0

    @property
    def state(self) -> str:
        return "supported" if self.is_served else "fails"


def read_journal(journal: Path) -> dict[str, Suite]:
    """Return the latest outcomes of each test file in a journal.

    Args:
        journal: A file with one block per run: a line `{path: digest}` of the test files to run, then the
            lines that `tests.matrix.pytest_journal` wrote. The file may end in the middle of a line, or be
            missing.
    """
    suites, codes = dict[str, Suite](), dict[str, str]()
    for line in journal.read_text().splitlines() if journal.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # the run was killed while it wrote this line
        if "path" in found:
            path = found.pop("path")
            suites[path] = Suite(codes[path], found["passed"], tuple(found["failures"]), found["skipped"])
        else:
            codes = found
    return suites


def write(result: Result, folder: Path = FOLDER) -> Path:
    path = folder / f"{result.release}.json"
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return path


def read(folder: Path = FOLDER) -> list[Result]:
    """Return all stored results, newest release first."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    results = []
    for version in RELEASES:
        if written := found.get(version):
            suites = {path: Suite(**suite) for path, suite in written.pop("suites").items()}
            refused = tuple(written.pop("refused"))
            results.append(Result(**written, suites=suites, refused=refused))
    return results


def compute_digests(release: Release) -> dict[str, str]:
    """Return a digest for each test file in the release's set.

    A digest covers the tested code, the locked packages, the helpers that tests share, and the test file.
    """
    listed = _git_files(_TESTS)
    files = [
        path
        for path in listed
        if Path(path).name.startswith("test_") and any(_selects(argument, path) for argument in release.tests)
    ]
    shared = [path for path in (*_git_files(_TESTED), *listed) if not Path(path).name.startswith("test_")]
    code = _digest((*shared, str(release.lock.relative_to(ROOT))), ())
    return {path: _digest((path,), (code, *pytest_arguments(release, path))) for path in files}


def pytest_arguments(release: Release, path: str) -> list[str]:
    """Return the pytest arguments that select the release's tests in a file."""
    return [argument for argument in release.tests if argument.startswith(f"{path}::")] or [path]


def _selects(argument: str, path: str) -> bool:
    """Return whether a pytest argument selects a file, some of its tests, or a folder that contains it."""
    selected = argument.partition("::")[0]
    return path == selected or path.startswith(f"{selected}/")


def _git_files(below: Iterable[str]) -> list[str]:
    """Return the files that git tracks, and the untracked files that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *below]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return [name for name in sorted(filter(None, names)) if (ROOT / name).is_file()]


def _digest(paths: Iterable[str], more: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path}\0".encode())
        digest.update(hashlib.sha256((ROOT / path).read_bytes()).digest())
    for word in more:
        digest.update(f"{word}\0".encode())
    return digest.hexdigest()[:16]


def format_table(results: Sequence[Result], refused: Mapping[str, Mapping[str, str]]) -> str:
    """Format the documented table of releases in Markdown, with the reasons for refused features below it.

    Args:
        refused: For each release, the features that are refused now, with the reason.
    """
    lines = ["| SGLang | torch | Python | state | tests |", "|---|---|---|---|---|"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in results:
        count = f"{each.passed:,} of the {each.set} set"
        if each.failures:
            count += f", {len(each.failures)} failed"
        for refusal in refused.get(each.release, {}).items():
            reasons.setdefault(refusal, []).append(each.release)
        torch, python = each.torch.partition("+")[0], ".".join(each.python.split(".")[:2])
        lines.append(f"| {each.release} | {torch} | {python} | {each.state} | {count} |")
    lines.append("| any other | | | refused | |")
    if reasons:
        lines += ["", "Older releases refuse:", ""]
    for (what, why), releases in sorted(reasons.items()):
        ranges = _format_ranges(releases, [each.release for each in results])
        lines.append(f"- `{what}` on {ranges}: {why}.")
    return "\n".join(lines)


def _format_ranges(some: Sequence[str], releases: Sequence[str]) -> str:
    """Describe `some` of the `releases` as ranges, such as "0.5.12 to 0.5.18, 0.5.20".

    Both lists are sorted newest first. The ranges are sorted oldest first.
    """
    spans: list[list[str]] = []
    for one, before in zip(releases, ("", *releases), strict=False):
        if one in some:
            spans += [] if spans and spans[-1][-1] == before else [[]]
            spans[-1].append(one)
    return ", ".join(span[0] if len(span) == 1 else f"{span[-1]} to {span[0]}" for span in reversed(spans))
