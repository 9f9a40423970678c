"""Result files: the tables of a benchmark run, with the run's machine and software versions.

Each benchmark has one JSON file in `benchmarks/results/`:

    {"benchmark", "date", "machine": {...}, "versions": {...},
     "tables": [{"title", "unit", "better", "rounds", "target", "picture",
                 "rows": [{"label", "figure": {"median", "min", "max"}, "ratio": {"median", "min", "max"}}]}]}

`figure` is the row's measurement in `unit`. `ratio` is the first row's measurement divided by this row's
measurement. Smaller measurements, and therefore larger ratios, are better. `better` is "faster" for times,
and "less" for counts such as bytes. `target` is the ratio that the last row should reach, or null. `picture`
names the table's PNG, or is null.
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

__all__ = ["FOLDER", "Row", "Spread", "Table", "collect_tables", "record", "write"]

FOLDER = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Spread:
    """The median, smallest, and largest value of one measurement over all rounds."""

    median: float
    min: float
    max: float

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        # Keep six significant digits, because the digits beyond the sixth are noise.
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
    def from_rounds(cls, values: dict[str, list[float]], **fields: Any) -> Table:
        """Build a table with one row per label in `values`. Entry i of each list belongs to round i."""
        first = next(iter(values.values()))
        rows = (
            Row(
                label,
                Spread.from_values(each),
                Spread.from_values([a / b for a, b in zip(first, each, strict=True)]),
            )
            for label, each in values.items()
        )
        return cls(rounds=len(first), rows=tuple(rows), **fields)


_recorded: list[Table] = []


def record(table: Table) -> None:
    """Add a table to the running benchmark's tables."""
    _recorded.append(table)


@contextlib.contextmanager
def collect_tables() -> Iterator[list[Table]]:
    """Yield an empty list. Inside the `with` block, `record` adds each table to this list."""
    _recorded.clear()
    yield _recorded


def write(benchmark: str, tables: Sequence[Table], folder: Path = FOLDER) -> Path:
    """Write a benchmark's result file, which replaces the previous run's file, and return the path."""
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
    """Describe the hardware and the OS, without anything that identifies this particular machine."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")),
        "gpu": _gpu(),
        "os": platform.freedesktop_os_release()["PRETTY_NAME"],
        # The machine's load average over the last minute, which includes the load of the benchmark itself. A
        # load far above the benchmark's own number of threads means that other processes competed for the
        # cores.
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
    # torch's own version string also tells whether torch was built for CUDA or only for the CPU.
    torch_version = {"torch": str(torch.__version__)}
    return {"python": platform.python_version(), **torch_version, **packages, "commit": _commit()}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the short hash of HEAD, or None outside a repository.

    A `+` follows the hash if the working tree differs from HEAD, untracked files included. Changed result
    files alone add no `+`.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(FOLDER.parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/", ":(exclude,top)benchmarks/results")
        return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
