"""Paired timings: contenders take turns in one run, so that a slowdown of the machine affects them all.

Every contender runs once per round. A contender's speedup in a round is the first contender's time divided by
the contender's own time. A table shows the median speedup over all rounds, with the minimum and maximum.
Absolute times are accurate only to an order of magnitude. Every table is printed, and recorded for the
benchmark's result file.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

from benchmarks.harness.result_files import Table, record

__all__ = ["compare", "compare_counts", "wall_s"]


def wall_s(contender: Callable[[], object]) -> float:
    """Return the elapsed seconds of one call."""
    gc.collect()  # so that the timed call does not collect the garbage of earlier calls
    start = time.perf_counter()
    contender()
    return time.perf_counter() - start


def compare(
    title: str,
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    warmup: int = 1,
    target: float | None = None,
    clock: Callable[[Callable[[], object]], float] = wall_s,
    picture: str | None = None,
) -> Table:
    """Time `contenders` in turn, and print each contender's speedup over the first.

    Args:
        title: The heading of the printed table.
        contenders: The functions to time, by label. The first function is the baseline.
        rounds: Number of measured rounds. Every contender runs once per round.
        warmup: Number of unmeasured rounds that run first.
        target: The speedup that the last contender should reach, printed below the table.
        clock: Runs a contender and returns the seconds that the contender took.
        picture: Name of the PNG that shows the table. Tables with the same `picture` share one PNG.
    """
    ms: dict[str, list[float]] = {label: [] for label in contenders}
    for round_number in range(warmup + rounds):
        for label, contender in contenders.items():
            elapsed_s = clock(contender)
            if round_number >= warmup:
                ms[label].append(elapsed_s * 1e3)
    return _print_and_record(
        Table.from_rounds(ms, title=title, unit="ms", better="faster", target=target, picture=picture)
    )


def compare_counts(
    title: str,
    unit: str,
    counts: Mapping[str, float],
    *,
    target: float | None = None,
    picture: str | None = None,
) -> Table:
    """Print each contender's count, and a comparison with the first contender.

    The comparison is the first contender's count divided by the contender's own count. A count, such as a
    number of bytes, is the same in every round, so each count is measured only once.
    """
    values = {label: [float(count)] for label, count in counts.items()}
    return _print_and_record(
        Table.from_rounds(values, title=title, unit=unit, better="less", target=target, picture=picture)
    )


def _print_and_record(table: Table) -> Table:
    spread = f"   min .. max over {table.rounds} rounds" if table.rounds > 1 else ""
    print(f"\n## {table.title}\n")
    print(f"{'':<44}{table.unit:>18}{'x ' + table.better:>10}{spread}")
    for row in table.rows:
        spread = f"   {row.ratio.min:.2f} .. {row.ratio.max:.2f}" if table.rounds > 1 else ""
        print(f"{row.label:<44}{row.figure.median:>18.3f}{row.ratio.median:>10.2f}{spread}")
    if table.target is not None:
        last = table.rows[-1]
        verdict = "reached" if last.ratio.median >= table.target else "NOT reached"
        print(f"target for {last.label!r}: {table.target:.3g} x, {verdict}")
    record(table)
    return table
