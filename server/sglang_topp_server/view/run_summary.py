"""The numbers of a run: those of single tokens, and RunSummary, the statistics of all rollouts.

T is the number of a rollout's output tokens.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp_client import Rollout, ScoredRollout

Float64Array = NDArray[np.float64]

MAX_ROWS = 20_000
"""The maximum number of a run's rows in the page's table. The page says how many rollouts are left out."""

MAX_LISTED = 48
"""The page lists this many candidates of a position, and the sampled token."""

EDGES: dict[str, Float64Array] = {
    "entropy": np.arange(1201) / 100,
    "mass": np.arange(1001) / 1000,
    "sizes": np.unique(np.geomspace(1, 1 << 20, 241).round()),
    "ratio": np.arange(1001) / 500,
    "replayed": np.arange(1001) / 500,
    "start": np.arange(1001) / 500,
}
"""For each metric, the edges of its histogram's bins, which are the same in all runs. Bin k holds the values
above `edges[k - 1]`, up to and including `edges[k]`; the last bin holds the values above all edges."""

_PREVIEW_CHARS = 120
_PROMPT_TOKENS = 64
_MAX_VERSIONS = 8
BADNESS: dict[str, Callable[[Float64Array], Float64Array]] = {
    "largest": lambda sizes: sizes,
    "least": lambda mass: -mass,
    "worst_ratio": lambda ratio: np.abs(np.log(np.maximum(ratio, 1e-300))),
}
"""How bad the worst token of a rollout is, by the column that has its value. NaN stays NaN."""


def token_metrics(scored: ScoredRollout) -> dict[str, NDArray[Any]]:
    """Return the metrics of a rollout's T output tokens by name. A float is NaN where it is unknown.

    ``sizes``
        int64 [T], the number of candidates in each token's set, or 0 for a token without a set.
    ``is_appended``
        bool [T], whether a tool or an environment appended the token.
    ``is_missing``
        bool [T], whether the token was generated but has no set. A trainer must not train on such tokens.
    ``mass``
        float64 [T], the kept mass: the total probability of each token's set.
    ``entropy``
        float64 [T], the entropy of the distribution within each token's set, in nats.
    ``ratio``
        float64 [T], the importance ratio without replay: the trainer's probability over the whole vocabulary,
        divided by the rollout's probability within the set.
    ``replayed``
        float64 [T], the importance ratio with replay: both probabilities are within the set.
    ``start``
        float64 [T], `ratio`, and where it is unknown, the kept mass, which is the ratio of a trainer with the
        sampler's weights.
    """
    rollout, scores = scored
    num_tokens = len(rollout.output_ids)
    is_appended = np.zeros(num_tokens, np.bool_)
    for start, end in rollout.appended_spans:
        is_appended[start:end] = True
    unknown = np.full(num_tokens, np.nan)
    sets = rollout.candidates
    sizes = np.zeros(num_tokens, np.int64) if sets is None else sets.sizes
    mass = entropy = masked = unknown
    if sets is not None and sets.has_logprobs:
        mass = np.where(sizes > 0, np.exp(sets.log_kept_mass.astype(np.float64)), np.nan)
        entropy = np.where(sizes > 0, sets.entropy, np.nan)
        masked = np.where(sizes > 0, sets.masked_logprobs.astype(np.float64), np.nan)

    def ratio_of(logprobs: NDArray[np.float32] | None) -> Float64Array:
        # With a cap of 700, the ratio is finite in float64.
        return unknown if logprobs is None else np.exp(np.minimum(logprobs - masked, 700.0))

    ratio = ratio_of(scores.logprobs)
    return {
        "sizes": sizes,
        "is_appended": is_appended,
        "is_missing": (sizes == 0) & ~is_appended,
        "mass": mass,
        "entropy": entropy,
        "ratio": ratio,
        "replayed": ratio_of(scores.masked_logprobs),
        "start": np.where(np.isnan(ratio), mass, ratio),
    }


class Distribution:
    """The distribution of a metric over many tokens: counts per bin, and mean, least, and largest value.

    Args:
        edges: the edges of the bins; see `EDGES`.
    """

    def __init__(self, edges: Float64Array) -> None:
        self._edges = edges
        self._counts = np.zeros(len(edges) + 1, np.int64)
        self._sum, self._least, self._largest = 0.0, np.inf, -np.inf

    def __len__(self) -> int:
        return int(self._counts.sum())

    def add(self, values: NDArray[Any]) -> None:
        """Add the values, except those that are NaN."""
        values = values[~np.isnan(values)]
        if len(values):
            bins = np.searchsorted(self._edges, values, side="left")
            self._counts += np.bincount(bins, minlength=len(self._counts))
            self._sum += float(values.sum())
            self._least = min(self._least, float(values.min()))
            self._largest = max(self._largest, float(values.max()))

    def to_json(self) -> dict[str, Any] | None:
        """Return the distribution as JSON values, or None without a value."""
        if not len(self):
            return None
        return {
            "counts": self._counts.tolist(),
            "mean": self._sum / len(self),
            "least": self._least,
            "largest": self._largest,
        }


class RunSummary:
    """The statistics of all rollouts of a run.

    Attributes:
        totals: how many `rollouts` and output `tokens` were added, how many tokens a tool or an environment
            `appended`, and how many generated tokens have no set (`missing`).
        reasons: the number of rollouts by finish reason.
        versions: the number of tokens by weight version.
        metrics: the distribution of each metric in `EDGES`.
        rows: a row of the page's table for each of the first `MAX_ROWS` rollouts.
        prompts: the last token ids of each prompt of the rows; the column `prompt` is an index in this list.
        threshold: the smallest threshold of a set, or None if no threshold is known.
        num_listed: for each row, how many candidates the page would list.
    """

    def __init__(self) -> None:
        self.totals = Counter(rollouts=0, tokens=0, appended=0, missing=0)
        self.reasons: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()
        self.metrics = {name: Distribution(edges) for name, edges in EDGES.items()}
        self.rows: list[dict[str, Any]] = []
        self.prompts: list[NDArray[np.int32]] = []
        self.threshold: float | None = None
        self.num_listed: list[int] = []
        self._num_off = Counter({0.01: 0, 0.1: 0})
        self._size_counts = np.zeros(1, np.int64)
        self._prompt_numbers: dict[tuple[int, bytes], int] = {}

    def add(self, scored: ScoredRollout, numbers: Mapping[str, float | None] | None = None) -> None:
        """Add the next rollout, and the numbers that a trainer recorded for it in columns of its own."""
        rollout, metrics = scored.rollout, token_metrics(scored)
        num_tokens = len(rollout.output_ids)
        missing = int(np.count_nonzero(metrics["is_missing"]))
        appended = int(np.count_nonzero(metrics["is_appended"]))
        self.totals.update(rollouts=1, tokens=num_tokens, appended=appended, missing=missing)
        self.reasons[rollout.finish_reason] += 1
        for version, count in rollout.weight_spans or ((rollout.weight_version or "unknown", num_tokens),):
            # Tokens that `Rollout.extend` appended have the weight version "", because the caller, not the
            # engine, supplied them.
            if version or not rollout.appended_spans:
                self.versions[version] += count
        thresholds = rollout.top_logprobs_p, (rollout.sampling_params or {}).get("top_p"), self.threshold
        self.threshold = min((p for p in thresholds if p), default=None)
        off = np.abs(metrics["start"] - 1)
        for least in self._num_off:
            self._num_off[least] += int(np.count_nonzero(off > least))
        sizes = metrics["sizes"][metrics["sizes"] > 0]
        counts = np.bincount(sizes, minlength=len(self._size_counts))
        counts[: len(self._size_counts)] += self._size_counts
        self._size_counts = counts
        for name, distribution in self.metrics.items():
            distribution.add(sizes if name == "sizes" else metrics[name])
        if len(self.rows) < MAX_ROWS:
            self.num_listed.append(int(np.minimum(sizes, MAX_LISTED + 1).sum()))
            others = {name: _rounded(number) for name, number in (numbers or {}).items()}
            self.rows.append({**others, **self._row(scored, metrics)})

    def _row(self, scored: ScoredRollout, metrics: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        rollout = scored.rollout
        # A directory may hold several training steps, and each numbers its prompts from 0.
        key = (rollout.prompt_index, hashlib.sha256(rollout.prompt_ids.tobytes()).digest())
        if key not in self._prompt_numbers:
            self._prompt_numbers[key] = len(self.prompts)
            self.prompts.append(rollout.prompt_ids[-_PROMPT_TOKENS:].copy())
        off = np.abs(metrics["start"] - 1)
        values = {"largest": metrics["sizes"], "least": metrics["mass"], "worst_ratio": metrics["ratio"]}
        worst: dict[str, Any] = {}
        for name, each in values.items():
            badness = BADNESS[name](np.where(metrics["sizes"] > 0, each, np.nan))
            at = None if np.isnan(badness).all() else int(np.nanargmax(badness))
            worst |= {name: None if at is None else _rounded(each[at]), f"{name}_at": at}
        return worst | {
            "prompt": self._prompt_numbers[key],
            "sample": rollout.sample_index,
            "tokens": len(rollout.output_ids),
            "finish": rollout.finish_reason,
            "versions": _versions(rollout),
            "entropy": _mean(metrics["entropy"]),
            "mass": _mean(metrics["mass"]),
            "off": _mean(np.where(np.isnan(off), np.nan, off > 0.1)),
            "missing": int(np.count_nonzero(metrics["is_missing"])),
            "reward": _rounded(scored.scores.reward),
            "text": rollout.text[:_PREVIEW_CHARS],
        }

    def _size_quantile(self, q: float) -> int:
        """Return the `q`-quantile of the set sizes, without interpolation."""
        seen = np.cumsum(self._size_counts)
        return int(np.searchsorted(seen, q * seen[-1]))

    def worst_rows(self, max_listed: int) -> list[int]:
        """Return row numbers, those with the worst tokens first, which list at most `max_listed` candidates.

        In turn, the result has the rollouts with the largest set, the least kept mass, and the ratio furthest
        from 1, and then the others.
        """
        ranks = []
        for name, badness_of in BADNESS.items():
            badness = badness_of(np.array([row[name] for row in self.rows], np.float64))
            order = np.argsort(-badness, kind="stable")  # NaN comes last
            ranks.append(order[: np.count_nonzero(~np.isnan(badness))].tolist())
        in_turn = [row for rows in zip_longest(*ranks) for row in rows if row is not None]
        rows = list(dict.fromkeys([*in_turn, *range(len(self.rows))]))
        num_listed = np.cumsum([self.num_listed[row] for row in rows])
        return rows[: max(1, int(np.searchsorted(num_listed, max_listed, side="right")))]

    def to_json(self) -> dict[str, Any]:
        """Return the statistics of all rollouts as JSON values."""
        num_sets, num_known = int(self._size_counts.sum()), len(self.metrics["start"])
        return {
            "verdict": {
                **self.totals,
                "sets": num_sets,
                "without_logprobs": num_sets - len(self.metrics["mass"]),
                "off_1": self._num_off[0.01] / num_known if num_known else None,
                "off_10": self._num_off[0.1] / num_known if num_known else None,
                "ratios_known": len(self.metrics["ratio"]),
                "median_size": self._size_quantile(0.5),
                "p99_size": self._size_quantile(0.99),
                "reasons": self.reasons.most_common(),
                "versions": self.versions.most_common(),
            },
            "metrics": {name: distribution.to_json() for name, distribution in self.metrics.items()},
        }


def _versions(rollout: Rollout) -> str:
    versions = [version for version, _ in rollout.weight_spans or () if version]
    if rollout.weight_spans is None and rollout.weight_version is not None:
        versions = [rollout.weight_version]
    versions = list(dict.fromkeys(versions))
    return ", ".join(versions[:_MAX_VERSIONS] + ["…"] * (len(versions) > _MAX_VERSIONS))


def _mean(values: Float64Array) -> float | None:
    known = values[~np.isnan(values)]
    return _rounded(known.mean()) if len(known) else None


def _rounded(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.7g}")
