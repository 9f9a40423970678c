"""Report: counters, the table, and whether the goals are met."""

from __future__ import annotations

import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from sglang_topp.errors import MissingCandidateSetsError, SampledTokenMissingError, WireError

__all__ = ["KNOWS_WITHIN_S", "LEAK_MIB", "Report", "table"]

KNOWS_WITHIN_S = 5.0
LEAK_MIB = 64.0
_SHOWN = 30


@dataclass
class Report:
    """The counts of one part, which are one line of the table.

    Attributes:
        name: of the part.
        requests: the number of requests that were sent.
        faults: wrong answers. misses: answers that lack a requested set. misplaced: sets of another position,
        token, or threshold.
        outcomes: how the requests ended, for the table.
        leaked_mib: by process, the growth of its memory from the first to the last quarter.
        knew_s: the longest time until a caller got an error, in seconds. None if no caller expects one.
        left_running: processes that outlived their server.
        p99_s: the 99th percentile of normal callers' times, in seconds. None without such callers.
        what: the first faults, each as a sentence with its count.
    """

    name: str
    requests: int = 0
    faults: int = 0
    misses: int = 0
    misplaced: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    leaked_mib: dict[str, float] = field(default_factory=dict)
    knew_s: float | None = None
    left_running: int = 0
    p99_s: float | None = None
    what: Counter[str] = field(default_factory=Counter)

    def fault(self, sentence: str) -> None:
        """Count a fault other than wrong sets."""
        self.faults += 1
        self._note(sentence)

    def failed(self, error: BaseException, asked: object) -> None:
        """Count a wrong answer by its error."""
        if isinstance(error, MissingCandidateSetsError):
            self.misses += 1
        elif isinstance(error, AssertionError | SampledTokenMissingError | WireError):
            self.misplaced += 1
        else:
            self.faults += 1
        place = traceback.extract_tb(error.__traceback__)[-1:]
        at = "".join(f" at {Path(frame.filename).name}:{frame.lineno}" for frame in place)
        self._note(f"{type(error).__name__}{at}: {str(error)[:300]} (asked: {str(asked)[:300]})")

    def _note(self, sentence: str) -> None:
        if sentence in self.what or len(self.what) < _SHOWN:
            self.what[sentence] += 1

    def problems(self) -> list[str]:
        """Return the missed goals."""
        found = [
            f"{name}: {count} {what}"
            for name, count, what in (
                (self.name, self.faults, "faults"),
                (self.name, self.misses, "misses"),
                (self.name, self.misplaced, "misplaced"),
                (self.name, self.left_running, "processes left running"),
            )
            if count
        ]
        if self.knew_s is not None and self.knew_s > KNOWS_WITHIN_S:
            found.append(f"{self.name}: a caller knew after {self.knew_s:.1f} s only")
        if (leaked := sum(self.leaked_mib.values())) > LEAK_MIB:
            found.append(f"{self.name}: {leaked:.0f} MiB more in the last quarter than in the first")
        return found


def table(reports: list[Report]) -> str:
    """Return all lines, and the faults below them."""
    heads = ("part", "requests", "faults", "misses", "misplaced", "leaked MiB", "knew after", "left", "p99")
    rows = [
        (
            each.name,
            f"{each.requests}",
            f"{each.faults}",
            f"{each.misses}",
            f"{each.misplaced}",
            f"{sum(each.leaked_mib.values()):.0f}" if each.leaked_mib else "",
            "" if each.knew_s is None else f"{each.knew_s:.1f} s",
            f"{each.left_running}",
            "" if each.p99_s is None else f"{each.p99_s:.2f} s",
        )
        for each in reports
    ]
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in (heads, tuple("-" * width for width in widths), *rows)
    ]
    for each in reports:
        if each.outcomes:
            counted = ", ".join(f"{count} {name}" for name, count in each.outcomes.most_common())
            lines.append(f"{each.name}: {counted}")
        if each.leaked_mib:
            held = ", ".join(f"{role} {mib:+.0f}" for role, mib in each.leaked_mib.items())
            lines.append(f"{each.name}: MiB, last quarter against first: {held}")
        lines += [f"{each.name}: {count} x {sentence}" for sentence, count in each.what.items()]
    return "\n".join(lines)
