"""What the matrix leaves behind: one JSON file for each release, and the table that the README shows.

    {"release", "python", "torch", "set", "code", "doctor", "tests": {"passed", "failed", "skipped"},
     "failures": [...], "skipped": {reason: count}, "refused": {what: why}, "date", "commit"}

`set` is "whole" or "short"; `refused` says what is not served on the release, and why. `code` is a digest of
all that was tested: where it is still the same, the release need not be run again.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.matrix.environment import ROOT
from tests.matrix.releases import FOLDER, RELEASES, Release

__all__ = ["Result", "Suite", "digest", "read", "table", "write"]

_TESTED = (
    "sglang_topp",
    "patches",
    "client",
    "server",
    "tests/engine",
    "tests/patches",
    "tests/features.py",
    "pyproject.toml",
)


@dataclass(frozen=True)
class Suite:
    """What came out of a run of pytest; each failure and skip with its reason's first line."""

    passed: int
    failures: tuple[str, ...]
    skipped: Mapping[str, int]

    @classmethod
    def of(cls, junit: Path) -> Suite:
        """From the XML that `pytest --junitxml` writes."""
        passed, failures, skipped = 0, [], Counter[str]()
        for case in ElementTree.parse(junit).getroot().iter("testcase"):
            failed = [each for each in case if each.tag in ("failure", "error")]
            left_out = case.find("skipped")
            if failed:
                name = f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}"
                failures.append(f"{name}: {_first_line(failed[0])}")
            elif left_out is not None:
                skipped[_first_line(left_out)] += 1
            else:
                passed += 1
        return cls(passed, tuple(failures), dict(skipped))


@dataclass(frozen=True)
class Result:
    """What is known of a release after its run."""

    release: str
    python: str
    torch: str
    set: str
    code: str
    doctor: bool
    tests: Mapping[str, int]
    failures: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).date().isoformat())
    commit: str = ""

    @property
    def is_served(self) -> bool:
        return self.doctor and not self.failures and self.tests["passed"] > 0

    @property
    def state(self) -> str:
        return "supported" if self.is_served else "fails"


def write(result: Result, folder: Path = FOLDER) -> Path:
    path = folder / f"{result.release}.json"
    path.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return path


def read(folder: Path = FOLDER) -> list[Result]:
    """Every result that is there, the newest release first."""
    found = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    return [Result(**found[version]) for version in RELEASES if version in found]


def digest(release: Release) -> str:
    """Of all that a run tests: the code, the tests, and the packages that go with it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *_TESTED],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    paths = [ROOT / name for name in sorted(filter(None, listed.split("\0")))]
    code = hashlib.sha256()
    for path in (*filter(Path.is_file, paths), release.lock):
        code.update(f"{path.relative_to(ROOT)}\0".encode())
        code.update(hashlib.sha256(path.read_bytes()).digest())
    for word in release.tests:
        code.update(word.encode())
    return code.hexdigest()[:16]


def table(results: Sequence[Result]) -> str:
    """The README's table of releases, and why something is not served on some of them, in Markdown."""
    lines = ["| SGLang | torch | Python | state | tests | not served there |", "|---|---|---|---|---|---|"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for each in results:
        count = f"{each.tests['passed']:,} of the {each.set} set"
        if each.tests["failed"]:
            count += f", {each.tests['failed']} failed"
        refused = ", ".join(f"`{what}`" for what in sorted(each.refused))
        for refusal in each.refused.items():
            reasons.setdefault(refusal, []).append(each.release)
        torch, python = each.torch.partition("+")[0], ".".join(each.python.split(".")[:2])
        lines.append(f"| {each.release} | {torch} | {python} | {each.state} | {count} | {refused} |")
    lines.append(
        "| any other | | | refused | | requests for sets get a 400 that says so, everything else is served |"
    )
    if reasons:
        lines.append("")
    for (what, why), releases in sorted(reasons.items()):
        of = releases[0] if len(releases) == 1 else f"{releases[-1]} to {releases[0]}"
        lines.append(f"- `{what}`, {of}: {why}.")
    return "\n".join(lines)


def _first_line(element: ElementTree.Element) -> str:
    text = element.get("message") or element.text or ""
    return text.strip().partition("\n")[0][:200]
