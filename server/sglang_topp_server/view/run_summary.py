"""RunSummary: the statistics that `sglang-topp view` shows for a run.

The statistics are histograms, percentile bands, a table of rollouts, and the numbers for the page's verdict.
If a generated token lacks its candidate set, the verdict warns against training on the token. Otherwise, the
verdict says how much top-p changes the importance ratios, and therefore whether the trainer must score the
policy over the candidate sets (replay).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp_client import ScoredRollout
from sglang_topp_client.rollout import ABORT
from sglang_topp_server.view.percentile_bands import ENTROPY_GRID, MASS_GRID, SIZE_GRID, PositionBands
from sglang_topp_server.view.ratio_summary import OFF, RatioSummary
from sglang_topp_server.view.rollout_table import RolloutTable
from sglang_topp_server.view.token_metrics import TokenMetrics, token_metrics
from sglang_topp_server.view.worst_tokens import TokenPlace, TopTokens

__all__ = ["NUM_WORST", "RunSummary"]

NUM_WORST = 50
_MASS_EDGES = np.arange(51) / 50


class RunSummary:
    """The statistics that the page of `sglang-topp view` shows, over all rollouts.

    `add` takes one rollout at a time, and keeps only the statistics of the rollout.

    Args:
        max_detailed: the number of rollouts that the page shows token by token.

    Attributes:
        table: one row per rollout.
        num_rollouts, num_tokens: how many rollouts and output tokens have been added.
    """

    def __init__(self, max_detailed: int) -> None:
        self.table = RolloutTable()
        self.num_rollouts = self.num_tokens = 0
        self._num_appended = self._num_missing = self._num_aborted = self._num_without_logprobs = 0
        self._mass_sum, self._num_masses, self._num_off = 0.0, 0, 0
        self._mass_counts = np.zeros(len(_MASS_EDGES) - 1, np.int64)
        self._size_counts = np.zeros(1, np.int64)
        self._bands = {
            "size": PositionBands(SIZE_GRID),
            "mass": PositionBands(MASS_GRID),
            "entropy": PositionBands(ENTROPY_GRID),
        }
        self._ratios = {"without": RatioSummary(), "with": RatioSummary()}
        self._reasons: Counter[str] = Counter()
        self._versions: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self._worst = {name: TopTokens(NUM_WORST) for name in ("size", "mass", "ratio")}
        self._extremes = {name: TopTokens(max_detailed, per_rollout=1) for name in self._worst}

    def add(self, scored: ScoredRollout) -> None:
        """Add the next rollout to the statistics."""
        rollout, metrics, row = scored.rollout, token_metrics(scored), self.num_rollouts
        num_tokens = len(rollout.output_ids)
        self.num_rollouts += 1
        self.num_tokens += num_tokens
        self._num_appended += int(np.count_nonzero(metrics.is_appended))
        self._num_missing += int(np.count_nonzero(metrics.is_missing))
        self._num_aborted += rollout.finish_reason == ABORT
        self._reasons[rollout.finish_reason] += 1
        for version, count in rollout.weight_spans or ((rollout.weight_version or "unknown", num_tokens),):
            # Tokens that `Rollout.extend` appended have the weight version "", because the caller, not the
            # engine, supplied these tokens. If a rollout has such tokens, do not count its version "".
            if version or not rollout.appended_spans:
                self._versions[version] += count
        source = None if rollout.candidates is None else rollout.top_logprobs_source or "another source"
        self._sources[source or "no sets"] += 1
        self._add_tokens(metrics)
        for tops in (self._worst, self._extremes):
            tops["size"].add(row, np.where(metrics.sizes > 0, metrics.sizes, np.nan))
            tops["mass"].add(row, -metrics.mass)
            tops["ratio"].add(row, np.abs(metrics.log_ratio))
        self.table.add(scored, metrics)

    def _add_tokens(self, metrics: TokenMetrics) -> None:
        positions = np.flatnonzero(metrics.sizes)
        sizes = metrics.sizes[positions]
        self._size_counts = _added(self._size_counts, np.bincount(sizes))
        self._bands["size"].add(positions, sizes)
        known = np.flatnonzero(~np.isnan(metrics.mass))
        self._num_without_logprobs += len(positions) - len(known)
        mass = metrics.mass[known]
        self._mass_sum += float(mass.sum())
        self._num_masses += len(mass)
        self._num_off += int(np.count_nonzero(np.abs(np.expm1(metrics.log_ratio_or_mass[known])) > OFF))
        bins = np.searchsorted(_MASS_EDGES[1:-1], mass, side="right")
        self._mass_counts += np.bincount(bins, minlength=len(self._mass_counts))
        self._bands["mass"].add(known, mass)
        self._bands["entropy"].add(known, metrics.entropy[known])
        self._ratios["without"].add(metrics.log_ratio)
        self._ratios["with"].add(metrics.log_replayed_ratio)

    def worst_tokens(self) -> list[tuple[str, TokenPlace]]:
        """Return at most `NUM_WORST` of the worst tokens, each with the name of the metric that selected it.

        The worst token of each metric comes first, then the second worst token of each metric, and so on.
        """
        queues = {name: top.places() for name, top in self._worst.items() if top.places()}
        seen: set[TokenPlace] = set()
        chosen: list[tuple[str, TokenPlace]] = []
        while any(queues.values()) and len(chosen) < NUM_WORST:
            for name, queue in queues.items():
                while queue and queue[0] in seen:
                    queue.pop(0)
                if queue and len(chosen) < NUM_WORST:
                    seen.add(queue[0])
                    chosen.append((name, queue.pop(0)))
        return chosen

    def ranked_rows(self) -> list[int]:
        """Return the row numbers of the rollouts with the worst tokens, worst first.

        For each metric, this method ranks each rollout by its worst token. The list holds the first rollout
        of each ranking, then the second rollout of each ranking, and so on. No rollout occurs twice.
        """
        ranked = [[place.row for place in top.places()] for top in self._extremes.values()]
        longest = max(map(len, ranked), default=0)
        in_turn = (queue[i] for i in range(longest) for queue in ranked if i < len(queue))
        return list(dict.fromkeys(in_turn))

    def to_json(self) -> dict[str, Any]:
        """Return the statistics of all rollouts as JSON values."""
        num_sets = int(self._size_counts.sum())
        return {
            "verdict": {
                "rollouts": self.num_rollouts,
                "tokens": self.num_tokens,
                "appended": self._num_appended,
                "missing": self._num_missing,
                "aborts": self._num_aborted,
                "sets": num_sets,
                "without_logprobs": self._num_without_logprobs,
                "mean_mass": self._mass_sum / self._num_masses if self._num_masses else None,
                "off": self._num_off / self._num_masses if self._num_masses else None,
                "off_from_ratios": self._ratios["without"].num_tokens == self._num_masses > 0,
                "ratios_known": self._ratios["without"].num_tokens,
                "reasons": self._reasons.most_common(),
                "versions": self._versions.most_common(),
                "sources": self._sources.most_common(),
            },
            "mass": {"edges": _MASS_EDGES.tolist(), "counts": self._mass_counts.tolist()},
            "size": self._size_histogram(),
            "bands": {name: bands.to_json() for name, bands in self._bands.items()},
            "ratios": {name: ratios.to_json() for name, ratios in self._ratios.items()},
        }

    def _size_histogram(self) -> dict[str, Any]:
        """Return the histogram of set sizes. Bar k counts sizes in `(2^(k-1), 2^k]`. Bar 0 counts size 1."""
        counts, largest = self._size_counts, len(self._size_counts) - 1
        num_bars = max(1, int(largest - 1).bit_length() + 1)
        bars = np.ceil(np.log2(np.maximum(np.arange(len(counts)), 1))).astype(np.int64)
        seen = np.cumsum(counts)
        num_sets = int(seen[-1])
        return {
            "tops": [1 << k for k in range(num_bars)],
            "counts": np.bincount(bars, weights=counts, minlength=num_bars).astype(int).tolist(),
            "mean": float(counts @ np.arange(len(counts))) / num_sets if num_sets else None,
            "median": int(np.searchsorted(seen, 0.5 * num_sets)) if num_sets else None,
            "p99": int(np.searchsorted(seen, 0.99 * num_sets)) if num_sets else None,
            "largest": largest,
        }


def _added(some: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the elementwise sum of two arrays of counts, with zeros appended to the shorter array."""
    longer, shorter = (some, others) if len(some) >= len(others) else (others, some)
    out = longer.astype(np.int64)
    out[: len(shorter)] += shorter
    return out
