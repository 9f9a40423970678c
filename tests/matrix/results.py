"""What the matrix leaves behind: one JSON file for each release, and the table that the README shows.

    {"release", "python", "torch", "set", "doctor",
     "suites": {path: {"code", "passed", "failures": [...], "skipped": {reason: count}}},
     "refused": [what, ...], "date", "commit"}

`set` is "whole" or "short"; `suites` has an entry for each file of tests; `refused` names what was not served
on the release when it was run.
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

__all__ = ["Result", "Suite", "digests", "outcomes", "read", "table", "words", "write"]

_TESTED = ("sglang_topp", "patches", "client", "server", "pyproject.toml")
_TESTS = ("tests/engine", "tests/patches", "tests/features.py")


@dataclass(frozen=True)
class Suite:
    """What came out of one file of tests.

    Attributes:
        code: a digest of all that it tests, and of itself.
        passed: how many tests did.
        failures: each with its reason's first line.
        skipped: how many were, by the reason's first line.
    """

    code: str
    passed: int = 0
    failures: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What is known of a release after its run."""

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


def outcomes(journal: Path) -> dict[str, Suite]:
    """What came out of runs of pytest, by file of tests: the latest of each.

    Args:
        journal: for each run a line {path: digest} of what it was to run, and after it what
            `tests.matrix.journal` wrote; it may end anywhere, and need not be there.
    """
    suites, codes = dict[str, Suite](), dict[str, str]()
    for line in journal.read_text().splitlines() if journal.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue  # its run was ended as it wrote
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
    """Every result that is there, the newest release first."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    results = []
    for version in RELEASES:
        if written := found.get(version):
            suites = {path: Suite(**suite) for path, suite in written.pop("suites").items()}
            refused = tuple(written.pop("refused"))
            results.append(Result(**written, suites=suites, refused=refused))
    return results


def digests(release: Release) -> dict[str, str]:
    """For each file of tests of the release's set: a digest of the code, of the packages that go with it, of
    what the tests share, and of the file."""
    listed = _listed(_TESTS)
    files = [
        path
        for path in listed
        if Path(path).name.startswith("test_") and any(_names(word, path) for word in release.tests)
    ]
    shared = [path for path in (*_listed(_TESTED), *listed) if not Path(path).name.startswith("test_")]
    code = _digest((*shared, str(release.lock.relative_to(ROOT))), ())
    return {path: _digest((path,), (code, *words(release, path))) for path in files}


def words(release: Release, path: str) -> list[str]:
    """What of a file the release's set runs, in pytest's words."""
    return [word for word in release.tests if word.startswith(f"{path}::")] or [path]


def _names(word: str, path: str) -> bool:
    """Whether a word of pytest's names a file, some of its tests, or a folder above it."""
    named = word.partition("::")[0]
    return path == named or path.startswith(f"{named}/")


def _listed(below: Iterable[str]) -> list[str]:
    """Files that git has, or would take."""
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


def table(results: Sequence[Result], refused: Mapping[str, Mapping[str, str]]) -> str:
    """The README's table of releases, and why something is not served on some of them, in Markdown.

    Args:
        refused: for each release what is not served on it now, and why.
    """
    lines = ["| SGLang | torch | Python | state | tests | not served there |", "|---|---|---|---|---|---|"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in results:
        count = f"{each.passed:,} of the {each.set} set"
        if each.failures:
            count += f", {len(each.failures)} failed"
        refusals = refused.get(each.release, {})
        for refusal in refusals.items():
            reasons.setdefault(refusal, []).append(each.release)
        torch, python = each.torch.partition("+")[0], ".".join(each.python.split(".")[:2])
        names = ", ".join(f"`{what}`" for what in sorted(refusals))
        lines.append(f"| {each.release} | {torch} | {python} | {each.state} | {count} | {names} |")
    lines.append(
        "| any other | | | refused | | requests for sets get a 400 that says so, everything else is served |"
    )
    if reasons:
        lines.append("")
    for (what, why), releases in sorted(reasons.items()):
        lines.append(f"- `{what}`, {_spans(releases, [each.release for each in results])}: {why}.")
    return "\n".join(lines)


def _spans(some: Sequence[str], releases: Sequence[str]) -> str:
    """Which releases, the newest first in both, in words: "0.5.12 to 0.5.18, 0.5.20"."""
    spans: list[list[str]] = []
    for one, before in zip(releases, ("", *releases), strict=False):
        if one in some:
            spans += [] if spans and spans[-1][-1] == before else [[]]
            spans[-1].append(one)
    return ", ".join(span[0] if len(span) == 1 else f"{span[-1]} to {span[0]}" for span in reversed(spans))
