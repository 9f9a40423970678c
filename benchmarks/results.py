"""What a benchmark leaves behind: its tables, and the machine and the versions that they were measured on.

One JSON file for each benchmark, in `benchmarks/results/`:

    {"benchmark", "date", "machine": {...}, "versions": {...},
     "tables": [{"title", "unit", "better", "rounds", "target", "picture",
                 "rows": [{"label", "figure": {"median", "min", "max"}, "ratio": {"median", "min", "max"}}]}]}

A row's `ratio` says how many times `better` ("faster" or "less") it is than the first row. `target` is the
ratio that the last row is meant to reach, or null; `picture` names the PNG that shows the table, or is null.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["FOLDER", "Row", "Spread", "Table", "record", "recorded", "write"]

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Spread:
    """A figure over the rounds in which it was taken."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        # Six digits: the rest is noise.
        return cls(*(float(f"{value:.6g}") for value in (np.median(values), min(values), max(values))))


@dataclass(frozen=True)
class Row:
    label: str
    figure: Spread
    ratio: Spread


@dataclass(frozen=True)
class Table:
    title: str
    unit: str
    better: str
    rounds: int
    rows: tuple[Row, ...]
    target: float | None = None
    picture: str | None = None

    @classmethod
    def of(cls, values: dict[str, list[float]], **fields: Any) -> Table:
        """From what was measured, by label; the rounds of all labels belong together."""
        first = next(iter(values.values()))
        rows = (
            Row(label, Spread.of(each), Spread.of([a / b for a, b in zip(first, each, strict=True)]))
            for label, each in values.items()
        )
        return cls(rounds=len(first), rows=tuple(rows), **fields)


_recorded: list[Table] = []


def record(table: Table) -> None:
    _recorded.append(table)


@contextlib.contextmanager
def recorded() -> Iterator[list[Table]]:
    """The tables that are recorded within it."""
    _recorded.clear()
    yield _recorded


def write(benchmark: str, tables: Sequence[Table], folder: Path = FOLDER) -> Path:
    """Write the tables of a benchmark, in place of those of its last run."""
    result = {
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": _machine(),
        "versions": _versions(),
        "tables": [dataclasses.asdict(table) for table in tables],
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{benchmark}.json"
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    return path


def _machine() -> dict[str, Any]:
    """What it is, and nothing that says which one."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "gpu": _gpu(),
        "os": platform.freedesktop_os_release()["PRETTY_NAME"],
        # Of the last minute, the benchmark's own included: far above what it uses, others were at work.
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _gpu() -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return {"name": found.name, "memory_gib": _gib(found.total_memory)}


def _gib(num_bytes: int) -> float:
    return round(num_bytes / 2**30, 1)


def _versions() -> dict[str, str | None]:
    packages = {name: _version(name) for name in ("numpy", "sglang", "sglang-topp")}
    # With its build, for CUDA or for the CPU alone.
    torch_itself = {"torch": str(torch.__version__)}
    return {"python": platform.python_version(), **torch_itself, **packages, "commit": _commit()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Short, with `+` behind it where the files differ from it; None without a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(FOLDER.parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
