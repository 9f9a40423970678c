"""RolloutTable: the table of rollouts in `sglang-topp view`. The table can find all samples of a prompt."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp_client import ScoredRollout
from sglang_topp_server.view.ratio_summary import OFF
from sglang_topp_server.view.token_metrics import TokenMetrics

__all__ = ["MAX_ROWS", "RolloutTable"]

MAX_ROWS = 20_000
"""The maximum number of rows in the table. The page says how many rollouts are not in the table."""

_PREVIEW_CHARS = 120
_MAX_VERSIONS = 8


class RolloutTable:
    """The table of the first `MAX_ROWS` rollouts, one row per rollout.

    The table ignores all rollouts after the first `MAX_ROWS`.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._prompts: dict[tuple[int, bytes], int] = {}
        self._members: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, scored: ScoredRollout, metrics: TokenMetrics) -> None:
        """Append a row for the next rollout, unless the table already has `MAX_ROWS` rows."""
        if len(self._rows) == MAX_ROWS:
            return
        rollout = scored.rollout
        # A directory may hold several training steps, and each step numbers its prompts from 0. The table
        # therefore identifies a prompt by the prompt's index and the hash of the prompt's token ids.
        key = (rollout.prompt_index, hashlib.sha256(rollout.prompt_ids.tobytes()).digest())
        prompt = self._prompts.setdefault(key, len(self._prompts))
        if prompt == len(self._members):
            self._members.append([])
        self._members[prompt].append(len(self._rows))
        versions = [version for version, _ in rollout.weight_spans or () if version]
        if rollout.weight_spans is None and rollout.weight_version is not None:
            versions = [rollout.weight_version]
        versions = list(dict.fromkeys(versions))
        self._rows.append(
            {
                "prompt": prompt,
                "sample": rollout.sample_index,
                "tokens": len(rollout.output_ids),
                "appended": int(np.count_nonzero(metrics.is_appended)),
                "finish": rollout.finish_reason,
                "versions": ", ".join(versions[:_MAX_VERSIONS] + ["…"] * (len(versions) > _MAX_VERSIONS)),
                "mass": _mean(metrics.mass),
                "least": _rounded(_extreme(np.nanmin, metrics.mass)),
                "largest": int(metrics.sizes.max(initial=0)),
                "off": _mean(np.where(np.isnan(metrics.mass), np.nan, _is_off(metrics))),
                "missing": int(np.count_nonzero(metrics.is_missing)),
                "reward": _rounded(scored.scores.reward),
                "text": rollout.text[:_PREVIEW_CHARS],
            }
        )

    def samples_of_prompt(self, row: int) -> list[int]:
        """Return the row numbers of all samples that share the prompt of `row`, including `row`."""
        return self._members[self._rows[row]["prompt"]] if row < len(self._rows) else []

    def to_json(self) -> dict[str, list[Any]]:
        """Return a mapping from the name of each column to the column's values, one value per row."""
        names = self._rows[0] if self._rows else {}
        return {name: [row[name] for row in self._rows] for name in names}


def _is_off(metrics: TokenMetrics) -> NDArray[np.bool_]:
    is_off: NDArray[np.bool_] = np.abs(np.expm1(metrics.log_ratio_or_mass)) > OFF
    return is_off


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return _rounded(known.mean()) if len(known) else None


def _extreme(of: Any, values: NDArray[np.float64]) -> float | None:
    return None if np.isnan(values).all() else float(of(values))


def _rounded(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), 6)
