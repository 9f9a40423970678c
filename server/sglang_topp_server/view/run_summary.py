"""RunSummary: the statistics of a run, for `sglang-topp rollouts` and for the page of `sglang-topp view`."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp_client import Rollout, ScoredRollout
from sglang_topp_server.view.token_metrics import LEVELS, TokenMetrics, level_names, token_metrics

__all__ = ["MAX_ROWS", "Distribution", "RunSummary"]

MAX_ROWS = 20_000
"""The maximum number of rows in the page's table. The page says how many rollouts are not in the table."""

_OFF = 0.1
_PREVIEW_CHARS = 120
_MAX_VERSIONS = 8


class Distribution:
    """The distribution of a metric over many tokens: counts per level, and mean, least, and largest value.

    Args:
        bounds: the bounds between the levels; see `LEVELS`.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self._sum, self.least, self.largest = 0.0, np.inf, -np.inf

    def __len__(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float | None:
        """The mean of all values, or None without a value."""
        return self._sum / len(self) if len(self) else None

    def add(self, values: NDArray[Any]) -> None:
        """Add the values, except those that are NaN."""
        values = values[~np.isnan(values)]
        if len(values):
            levels = np.searchsorted(self._bounds, values, side="left")
            self.counts += np.bincount(levels, minlength=len(self.counts))
            self._sum += float(values.sum())
            self.least = min(self.least, float(values.min()))
            self.largest = max(self.largest, float(values.max()))

    def to_json(self) -> dict[str, Any] | None:
        """Return the distribution as JSON values, or None without a value."""
        if not len(self):
            return None
        return {
            "counts": self.counts.tolist(),
            "mean": self.mean,
            "least": self.least,
            "largest": self.largest,
        }


class RunSummary:
    """The statistics of all rollouts of a run.

    Attributes:
        num_rollouts, num_prompt_tokens, num_tokens: how many rollouts, prompt tokens, and output tokens were
            added.
        num_appended: how many output tokens came from a tool or an environment.
        num_missing: how many generated tokens have no set.
        reasons: the number of rollouts by finish reason.
        versions: the number of tokens by weight version.
        sources: the number of rollouts by the source of their sets.
        metrics: the distribution of each metric in `LEVELS`.
    """

    def __init__(self) -> None:
        self.num_rollouts = self.num_prompt_tokens = self.num_tokens = 0
        self.num_appended = self.num_missing = self._num_off = 0
        self.reasons: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        self.metrics = {name: Distribution(bounds) for name, bounds in LEVELS.items()}
        self._size_counts = np.zeros(1, np.int64)
        self._prompts: dict[tuple[int, bytes], int] = {}
        self._rows: list[dict[str, Any]] = []
        # How bad each rollout's worst token is, by metric. The worst rollouts are shown token by token.
        self._badness = {name: array("d") for name in ("largest", "least", "worst_ratio")}

    @property
    def num_sets(self) -> int:
        """The number of candidate sets."""
        return int(self._size_counts.sum())

    def add(self, scored: ScoredRollout) -> None:
        """Add the next rollout."""
        rollout, metrics = scored.rollout, token_metrics(scored)
        num_tokens = len(rollout.output_ids)
        self.num_rollouts += 1
        self.num_prompt_tokens += len(rollout.prompt_ids)
        self.num_tokens += num_tokens
        self.num_appended += int(np.count_nonzero(metrics.is_appended))
        self.num_missing += int(np.count_nonzero(metrics.is_missing))
        self.reasons[rollout.finish_reason] += 1
        for version, count in rollout.weight_spans or ((rollout.weight_version or "unknown", num_tokens),):
            # Tokens that `Rollout.extend` appended have the weight version "", because the caller, not the
            # engine, supplied them.
            if version or not rollout.appended_spans:
                self.versions[version] += count
        source = None if rollout.candidates is None else rollout.top_logprobs_source or "another source"
        self.sources[source or "no sets"] += 1
        self._num_off += int(np.count_nonzero(_is_off(metrics)))
        sizes = metrics.sizes[metrics.sizes > 0]
        counts = np.bincount(sizes, minlength=len(self._size_counts))
        counts[: len(self._size_counts)] += self._size_counts
        self._size_counts = counts
        self.metrics["sizes"].add(sizes)
        for name in ("mass", "entropy", "ratio", "replayed"):
            self.metrics[name].add(getattr(metrics, name))
        self._add_row(scored, metrics)

    def _add_row(self, scored: ScoredRollout, metrics: TokenMetrics) -> None:
        rollout = scored.rollout
        worst = {
            "largest": (np.where(metrics.sizes > 0, metrics.sizes, np.nan), metrics.sizes),
            "least": (-metrics.mass, metrics.mass),
            "worst_ratio": (np.abs(np.log(np.maximum(metrics.ratio, 1e-300))), metrics.ratio),
        }
        row: dict[str, Any] = {}
        for name, (badness, values) in worst.items():
            at = None if np.isnan(badness).all() else int(np.nanargmax(badness))
            self._badness[name].append(-np.inf if at is None else badness[at])
            row[name] = None if at is None else _rounded(values[at])
            row[f"{name}_at"] = at
        if len(self._rows) == MAX_ROWS:
            return
        # A directory may hold several training steps, and each numbers its prompts from 0.
        key = (rollout.prompt_index, hashlib.sha256(rollout.prompt_ids.tobytes()).digest())
        is_known = ~np.isnan(metrics.mass)
        row |= {
            "prompt": self._prompts.setdefault(key, len(self._prompts)),
            "sample": rollout.sample_index,
            "tokens": len(rollout.output_ids),
            "finish": rollout.finish_reason,
            "versions": _versions(rollout),
            "mass": _rounded(metrics.mass[is_known].mean()) if is_known.any() else None,
            "off": _rounded(_is_off(metrics)[is_known].mean()) if is_known.any() else None,
            "missing": int(np.count_nonzero(metrics.is_missing)),
            "reward": _rounded(scored.scores.reward),
            "text": rollout.text[:_PREVIEW_CHARS],
        }
        self._rows.append(row)

    def size_quantile(self, q: float) -> int:
        """Return the `q`-quantile of the set sizes, without interpolation."""
        seen = np.cumsum(self._size_counts)
        return int(np.searchsorted(seen, q * seen[-1]))

    def worst_rows(self, count: int) -> list[int]:
        """Return the row numbers of up to `count` rollouts, those with the worst tokens first.

        In turn, the result has the rollouts with the largest set, the least kept mass, and the ratio furthest
        from 1. If places remain, the first rollouts fill them.
        """
        ranks = []
        for badness in self._badness.values():
            values = np.array(badness)
            order = np.argsort(-values, kind="stable")[:count]
            ranks.append([row for row in order.tolist() if values[row] > -np.inf])
        in_turn = [row for rows in zip_longest(*ranks) for row in rows if row is not None]
        return list(dict.fromkeys([*in_turn, *range(min(count, self.num_rollouts))]))[:count]

    def to_json(self) -> dict[str, Any]:
        """Return the statistics of all rollouts as JSON values."""
        num_known = len(self.metrics["mass"])
        return {
            "verdict": {
                "rollouts": self.num_rollouts,
                "tokens": self.num_tokens,
                "appended": self.num_appended,
                "missing": self.num_missing,
                "sets": self.num_sets,
                "without_logprobs": self.num_sets - num_known,
                "mean_mass": self.metrics["mass"].mean,
                "off": self._num_off / num_known if num_known else None,
                "ratios_known": len(self.metrics["ratio"]),
                "median_size": self.size_quantile(0.5),
                "p99_size": self.size_quantile(0.99),
                "reasons": self.reasons.most_common(),
                "versions": self.versions.most_common(),
                "sources": self.sources.most_common(),
            },
            "metrics": {
                name: {"bounds": bounds, "levels": level_names(name), "of_all": self.metrics[name].to_json()}
                for name, bounds in LEVELS.items()
            },
            "table": {name: [row[name] for row in self._rows] for name in (self._rows or [{}])[0]},
        }


def _is_off(metrics: TokenMetrics) -> NDArray[np.bool_]:
    """Return bool [T]: whether a token's ratio differs from 1 by more than 10 %. False if it is unknown."""
    is_off: NDArray[np.bool_] = np.abs(metrics.ratio_or_mass - 1) > _OFF
    return is_off


def _versions(rollout: Rollout) -> str:
    versions = [version for version, _ in rollout.weight_spans or () if version]
    if rollout.weight_spans is None and rollout.weight_version is not None:
        versions = [rollout.weight_version]
    versions = list(dict.fromkeys(versions))
    return ", ".join(versions[:_MAX_VERSIONS] + ["…"] * (len(versions) > _MAX_VERSIONS))


def _rounded(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), 6)
