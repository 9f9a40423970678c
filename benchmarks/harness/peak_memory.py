"""Measure how much memory a computation needs beyond its inputs and its results.

The measure is the most bytes that torch has allocated at one time. torch's profiler reports each allocation
and each free with its address. So the figure is the same in every run, and depends neither on the C library,
which keeps freed memory, nor on the pages that are resident.

- Memory that exists before the computation, such as its inputs, does not count.
- A result, such as a gradient, does not count from its allocation on. A peak before it is allocated is not
  reduced by its size. (A process's peak minus the results would be: full logits that are freed before the
  gradient of a large LM head is allocated would then seem to take nothing.)
- Memory that torch does not allocate does not count: NumPy's arrays, and the workspaces of BLAS libraries.

Full logits [T, V] under a dense mask, in float32, thus take 13 bytes a logit: while the backward pass of the
softmax runs, there are its result, its gradient, the gradient of the logits, and the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness.paired_timing import compare_counts
from benchmarks.harness.result_files import Table

__all__ = ["Work", "compare_peaks", "peak_bytes"]

Work = Callable[[], list[Any]]
"""A computation. It returns its results, a list of tensors."""


def peak_bytes(work: Work) -> int:
    """Return the most bytes that torch has allocated at one time during `work`, without its results."""
    work()  # the first run may allocate what later ones use again
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        results = work()
    traced: Any = profiler.profiler
    changes, events = [], list(traced.kineto_results.experimental_event_tree())
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    changes.sort()
    latest = {address: at for at, address, num_bytes in changes if num_bytes > 0}
    kept = {(latest.get(one), one) for one in (tensor.untyped_storage().data_ptr() for tensor in results)}
    sizes: dict[int, int] = {}
    held = peak = 0
    for at, address, num_bytes in changes:
        if num_bytes < 0:  # of an older block, torch may report the size that another one had there
            held -= sizes.pop(address, 0)
        elif (at, address) not in kept:
            sizes[address] = num_bytes
            held += num_bytes
            peak = max(peak, held)
    return peak


def compare_peaks(
    title: str,
    contenders: Mapping[str, Work],
    *,
    target: float | None = None,
    picture: str | None = None,
) -> Table:
    """Measure peak memory, and print the ratio of the first contender's peak to each contender's peak."""
    peaks = {label: peak_bytes(work) / 2**20 for label, work in contenders.items()}
    return compare_counts(title, "MiB", peaks, target=target, picture=picture)
