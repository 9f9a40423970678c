"""HeapTrimmer: freed memory returns to the OS, and calls in a row share one thread."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_topp import malloc_trim
from sglang_topp.malloc_trim import HeapTrimmer

THREAD = "sglang-topp-trim"

# One block at the end of the heap stays in use, so glibc does not shrink the heap by itself.
FREE_MUCH = """
import re, threading
from pathlib import Path
from sglang_topp import malloc_trim

def resident_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

malloc_trim._DELAYS_S = (0.0,)
size = 4096
blocks = [b"x" * size for _ in range(30_000)]
last = b"x" * size
del blocks
before = resident_mib()
malloc_trim.HeapTrimmer().trim_soon()
for thread in threading.enumerate():
    if thread.name == "sglang-topp-trim":
        thread.join()
print(before, resident_mib())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has malloc_trim")
def test_freed_memory_returns_to_the_os() -> None:
    done = subprocess.run([sys.executable, "-c", FREE_MUCH], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before > 110
    assert before - after > 90


class Clock:
    """A fake `time` module whose `sleep` waits until the test ends it."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.begun, self.ended = threading.Semaphore(0), threading.Semaphore(0)

    def sleep(self, delay_s: float) -> None:
        self.delays.append(delay_s)
        self.begun.release()
        assert self.ended.acquire(timeout=60)

    def end_sleeps(self, count: int) -> None:
        """Wait until `count` more sleeps have begun, and end each one."""
        for _ in range(count):
            assert self.begun.acquire(timeout=60)
            self.ended.release()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(malloc_trim, "time", clock)
    monkeypatch.setattr(malloc_trim, "_DELAYS_S", (1.0, 4.0))
    yield clock
    assert not trim_threads()


@pytest.fixture
def trims(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the argument of each call of `malloc_trim`."""
    calls: list[int] = []
    library = SimpleNamespace(malloc_trim=calls.append)
    monkeypatch.setattr(malloc_trim, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    monkeypatch.setattr(malloc_trim, "sys", SimpleNamespace(platform="linux"))
    return calls


def trim_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


def join_trim_threads() -> None:
    for thread in trim_threads():
        thread.join(timeout=60)


def test_memory_is_trimmed_after_each_delay(clock: Clock, trims: list[int]) -> None:
    HeapTrimmer().trim_soon()
    clock.end_sleeps(2)
    join_trim_threads()
    assert clock.delays == [1.0, 4.0]
    assert trims == [0, 0]


def test_a_call_while_the_thread_runs_starts_the_delays_again(clock: Clock, trims: list[int]) -> None:
    trimmer = HeapTrimmer()
    trimmer.trim_soon()
    clock.end_sleeps(1)
    assert clock.begun.acquire(timeout=60)
    for _ in range(100):
        trimmer.trim_soon()
    assert len(trim_threads()) == 1
    clock.ended.release()
    clock.end_sleeps(2)
    join_trim_threads()
    assert clock.delays == [1.0, 4.0, 1.0, 4.0]
    assert len(trims) == 4


def test_a_call_after_the_thread_ended_starts_another(clock: Clock, trims: list[int]) -> None:
    trimmer = HeapTrimmer()
    for _ in range(2):
        trimmer.trim_soon()
        clock.end_sleeps(2)
        join_trim_threads()
    assert len(trims) == 4


def no_library(_: Any) -> Any:
    raise OSError("no C library to load")


@pytest.mark.parametrize(
    ("system", "load"),
    [("darwin", no_library), ("linux", lambda _: SimpleNamespace())],
    ids=["macOS", "musl"],
)
def test_without_glibc_a_trim_does_nothing(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, system: str, load: Any
) -> None:
    monkeypatch.setattr(malloc_trim, "sys", SimpleNamespace(platform=system))
    monkeypatch.setattr(malloc_trim, "ctypes", SimpleNamespace(CDLL=load))
    HeapTrimmer().trim_soon()
    clock.end_sleeps(2)
    join_trim_threads()
