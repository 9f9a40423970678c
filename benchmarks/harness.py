"""Paired timings: contenders take turns within one run, so a drifting machine moves them together.

What is claimed is the ratio, round by round, with its spread; absolute times are for orientation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping

import numpy as np

__all__ = ["compare"]


def compare(
    title: str,
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 7,
    warmup: int = 1,
    target: float | None = None,
) -> dict[str, float]:
    """Time `contenders` in turn and print how many times faster each is than the first.

    Args:
        title: the heading of the printed table.
        contenders: label to callable; the first is the baseline.
        rounds: counted rounds; every contender runs once a round.
        warmup: uncounted rounds before.
        target: the ratio that the last contender is meant to reach, printed beside it.

    Returns:
        Median ratio `baseline time / contender time` by label.
    """
    seconds: dict[str, list[float]] = {label: [] for label in contenders}
    for round_number in range(warmup + rounds):
        for label, contender in contenders.items():
            gc.collect()
            start = time.perf_counter()
            contender()
            elapsed = time.perf_counter() - start
            if round_number >= warmup:
                seconds[label].append(elapsed)

    print(f"\n## {title}\n")
    print(f"{'':<44}{'median ms':>12}{'x faster':>10}   min .. max over {rounds} rounds")
    baseline = np.array(seconds[next(iter(contenders))])
    ratios: dict[str, float] = {}
    for label, times in seconds.items():
        each = baseline / np.array(times)
        ratios[label] = float(np.median(each))
        print(
            f"{label:<44}{np.median(times) * 1e3:>12.3f}{ratios[label]:>10.2f}   "
            f"{each.min():.2f} .. {each.max():.2f}"
        )
    if target is not None:
        label = list(contenders)[-1]
        verdict = "reached" if ratios[label] >= target else "NOT reached"
        print(f"target for {label!r}: {target:g} x, {verdict}")
    return ratios
