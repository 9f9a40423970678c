"""Peak memory of a piece of work, beyond its inputs and its results, measured in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness import compare_counts
from benchmarks.results import Table

__all__ = ["compare_peaks", "peak_bytes"]

Work = Callable[[], list[Any]]


def peak_bytes(prepare: Callable[..., Work], *args: object, warmup: tuple[object, ...]) -> int:
    """How much the resident set grew at its highest while the work ran, less what the work returned.

    Args:
        prepare: builds the inputs and returns the work, a callable without arguments; both run in a
            fresh process, so `prepare` is a module's function. The work returns the tensors that are its
            results: gradients, say.
        args: for `prepare`.
        warmup: for `prepare`, of tiny sizes: run before, so that libraries are loaded and started.
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
    """Measure each contender, `(prepare, args)`, and print how many times less it takes than the first.

    Below a MiB the kernel's counters do not tell: less is shown and compared as 1 MiB.
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
    # What was freed until now must not hide what is allocated from now on (glibc).
    ctypes.CDLL(None).malloc_trim(0)
    # Linux: sets the highest resident set so far back to the present one.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    results = work()
    kept = sum(tensor.nbytes for tensor in results)
    sender.send(_status("VmHWM") - before - kept)


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
