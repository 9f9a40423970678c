"""Inspect the processes of one server: their roles, their memory, and which still run."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Memory", "Process", "alive", "tree_of"]

_EVERY_S = 2.0
_ROLES = (
    ("sglang::scheduler", "scheduler"),
    ("sglang::detokenizer", "detokenizer"),
    ("resource_tracker", "resource tracker"),
    ("sglang_topp_server.process.engine_supervisor", "supervisor"),
    # After the supervisor: its arguments are the engine's whole command.
    ("sglang_topp_server.process.sglang_with_env_key", "main"),
    ("launch_server", "main"),
    ("sglang_topp_server.cli.main serve", "parent"),
    ("sglang_topp_server.cli.main sidecar", "sidecar"),
)
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


class Process:
    """One process. Its start time distinguishes it from a later process with the same id."""

    def __init__(self, pid: int) -> None:
        """Raises FileNotFoundError or ProcessLookupError if the process does not exist."""
        line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        self.pid = pid
        self.role = next((role for part, role in _ROLES if part in line), line[:40] or "?")
        self.started = _stat(pid)[19]

    def pss_mib(self) -> float:
        """Return its proportional memory (PSS), or 0 if it has ended."""
        with suppress(*_GONE):
            for line in Path(f"/proc/{self.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    return int(line.split()[1]) / 1024
        return 0.0

    def kill(self, number: int) -> None:
        """Send a signal if it still runs."""
        if alive(self):
            os.kill(self.pid, number)


def tree_of(pid: int) -> list[Process]:
    """Return the process and its descendants, parents first."""
    found = []
    for each in (pid, *_descendants(pid)):
        with suppress(*_GONE):
            found.append(Process(each))
    return found


def alive(process: Process) -> bool:
    """Return whether it still runs. A zombie does not."""
    with suppress(*_GONE):
        fields = _stat(process.pid)
        return fields[0] not in "ZX" and fields[19] == process.started
    return False


def _descendants(pid: int) -> Iterator[int]:
    with suppress(*_GONE):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on: 0 is the state, 19 the start time."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


class Memory:
    """Samples the memory of a tree of processes inside a `with` block."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seen: list[tuple[float, dict[str, float]]] = []

    async def __aenter__(self) -> Memory:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            held: dict[str, float] = {}
            for process in tree_of(self._pid):
                held[process.role] = held.get(process.role, 0.0) + process.pss_mib()
            self._seen.append((time.monotonic(), held))
            await asyncio.sleep(_EVERY_S)

    def growth_mib(self) -> dict[str, float]:
        """Return by role the median of the last quarter minus that of the first."""
        if len(self._seen) < 8:
            return {}
        quarter = len(self._seen) // 4
        first, last = self._seen[:quarter], self._seen[-quarter:]
        return {
            role: statistics.median(held.get(role, 0.0) for _, held in last)
            - statistics.median(held.get(role, 0.0) for _, held in first)
            for role in self._seen[-1][1]
        }

    def peak_mib(self) -> dict[str, float]:
        """Return the peak by role."""
        return {
            role: max(held.get(role, 0.0) for _, held in self._seen)
            for role in {role for _, held in self._seen for role in held}
        }
