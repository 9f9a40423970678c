"""Measure a computation's peak memory in a fresh process, excluding the memory of inputs and results."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.paired_timing import compare_counts
from benchmarks.harness.result_files import Table

__all__ = ["compare_peaks", "peak_bytes"]

Work = Callable[[], list[Any]]


def peak_bytes(prepare: Callable[..., Work], *args: object, warmup: tuple[object, ...]) -> int:
    """Return the peak growth of the resident set in bytes, minus the size of the results.

    Args:
        prepare: A function that builds the inputs and returns the function to measure. Both functions run in
            a fresh process, so `prepare` must be defined at module level. The measured function takes no
            arguments, and returns its results as a list of tensors, such as gradients.
        args: Arguments of `prepare`.
        warmup: Arguments of `prepare` for tiny inputs. An unmeasured first run on these inputs loads the
            libraries and starts the libraries' threads.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, prepare, args, warmup))
    process.start()
    sender.close()
    try:
        result: int = receiver.recv()
    finally:
        process.join()
    return result


def compare_peaks(
    title: str,
    contenders: Mapping[str, tuple[Callable[..., Work], tuple[object, ...]]],
    *,
    warmup: tuple[object, ...],
    target: float | None = None,
    picture: str | None = None,
) -> Table:
    """Measure peak memory, and print the ratio of the first contender's peak to each contender's peak.

    Each contender is a pair `(prepare, args)`, and `peak_bytes(prepare, *args)` measures the contender's
    peak. Peaks below 1 MiB count as 1 MiB, because the kernel's memory counters are too coarse for smaller
    peaks.
    """
    peaks = {
        label: max(1.0, peak_bytes(prepare, *args, warmup=warmup) / 2**20)
        for label, (prepare, args) in contenders.items()
    }
    return compare_counts(title, "MiB", peaks, target=target, picture=picture)


def _measure(
    sender: Any, prepare: Callable[..., Work], args: tuple[object, ...], warmup: tuple[object, ...]
) -> None:
    prepare(*warmup)()
    work = prepare(*args)
    gc.collect()
    # Return freed memory to the OS. If glibc reused the freed memory, the resident set would not grow, and
    # the measured peak would be too low.
    ctypes.CDLL(None).malloc_trim(0)
    # Reset the peak of the resident set (VmHWM) to the current size of the resident set. Linux only.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    results = work()
    kept = sum(tensor.nbytes for tensor in results)
    sender.send(_status_bytes("VmHWM") - before - kept)


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
