"""Keep the tokens with the highest values of a metric, over rollouts that are added one by one.

`sglang-topp view` uses this module to list the worst tokens by set size, by importance ratio, and by kept
mass, the total probability of a candidate set. The lowest kept masses are the worst, so the caller passes the
negated kept mass as the metric.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["TokenPlace", "TopTokens"]


class TokenPlace(NamedTuple):
    """The place of a token: the rollout's index among all rollouts, and the token's index in the output."""

    row: int
    position: int


class TopTokens:
    """The tokens with the highest metric values. Among equal values, the earliest tokens are kept.

    Args:
        count: the number of tokens to keep.
        per_rollout: the maximum number of tokens to keep from one rollout, or None for no maximum.
    """

    def __init__(self, count: int, *, per_rollout: int | None = None) -> None:
        self._count, self._per_rollout = count, per_rollout
        self._values = np.empty(0)
        self._places = np.empty((0, 2), np.int64)

    def add(self, row: int, values: NDArray[Any]) -> None:
        """Add the tokens of one rollout, and keep the `count` tokens with the highest metric values so far.

        Args:
            row: the rollout's index.
            values: the metric value of each token of the rollout. NaN values are ignored.
        """
        least = self._values[-1] if len(self._values) == self._count else -np.inf
        positions = np.flatnonzero(values > least)
        if not len(positions):
            return
        limit = self._count if self._per_rollout is None else self._per_rollout
        order = np.argsort(-values[positions].astype(np.float64), kind="stable")[:limit]
        positions = positions[order]
        places = np.stack([np.full(len(positions), row), positions], axis=1)
        merged = np.concatenate([self._values, values[positions]])
        best = np.argsort(-merged, kind="stable")[: self._count]
        self._values, self._places = merged[best], np.concatenate([self._places, places])[best]

    def places(self) -> list[TokenPlace]:
        """Return the `TokenPlace` of each token in this collection, with the highest metric value first."""
        return [TokenPlace(row, position) for row, position in self._places.tolist()]
