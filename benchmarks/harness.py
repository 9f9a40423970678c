"""Paired timings: contenders take turns within one run, so a drifting machine moves them together.

What is claimed is the ratio, round by round, with its spread; absolute times are for orientation. Every
table is printed, and recorded for `results`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

from benchmarks.results import Table, record

__all__ = ["compare", "compare_counts", "wall_s"]


def wall_s(contender: Callable[[], object]) -> float:
    """Seconds on the wall's clock; garbage of the one before is collected first."""
    gc.collect()
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
    """Time `contenders` in turn and print how many times faster each is than the first.

    Args:
        title: the heading of the printed table.
        contenders: label to callable; the first is the baseline.
        rounds: counted rounds; every contender runs once a round.
        warmup: uncounted rounds before.
        target: the ratio that the last contender is meant to reach, printed beside it.
        clock: runs a contender and returns its seconds.
        picture: name of the PNG that the table is drawn in; tables of one name share it.
    """
    ms: dict[str, list[float]] = {label: [] for label in contenders}
    for round_number in range(warmup + rounds):
        for label, contender in contenders.items():
            elapsed_s = clock(contender)
            if round_number >= warmup:
                ms[label].append(elapsed_s * 1e3)
    return _show(Table.of(ms, title=title, unit="ms", better="faster", target=target, picture=picture))


def compare_counts(
    title: str,
    unit: str,
    counts: Mapping[str, float],
    *,
    target: float | None = None,
    picture: str | None = None,
) -> Table:
    """Print how many times less each is than the first: bytes, say, which are the same in every round."""
    values = {label: [float(count)] for label, count in counts.items()}
    return _show(Table.of(values, title=title, unit=unit, better="less", target=target, picture=picture))


def _show(table: Table) -> Table:
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
