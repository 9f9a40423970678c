"""Percentile bands for the charts of `sglang-topp view`: median, p10, and p90 by position in the output.

Each value is counted at the nearest point of a fixed grid, so memory does not grow with the number of
rollouts. A percentile is exact to one step of the grid. A chart cannot show a difference of one step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENTROPY_GRID", "MASS_GRID", "SIZE_GRID", "Grid", "PositionBands"]

NUM_BINS = 128


class Grid:
    """A fixed grid of points. Each value is counted at the point nearest to it.

    Args:
        points: float64 [G], the grid points in ascending order. A value below the first point is counted at
            the first point, and a value above the last point is counted at the last point.
    """

    def __init__(self, points: NDArray[np.float64]) -> None:
        self.points = points
        self._bounds = (points[1:] + points[:-1]) / 2

    def __len__(self) -> int:
        return len(self.points)

    def index(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return the index of the grid point nearest to each value, int64."""
        index: NDArray[np.int64] = np.searchsorted(self._bounds, values, side="left")
        return index


def _size_points() -> NDArray[np.float64]:
    """Return every size from 1 to 1,024, and then sizes in steps of 1 % up to four million."""
    above = np.unique(np.round(1024 * 1.01 ** np.arange(1, 836)))
    points: NDArray[np.float64] = np.concatenate([np.arange(1.0, 1025.0), above])
    return points


MASS_GRID = Grid(np.arange(4097, dtype=np.float64) / 4096)
SIZE_GRID = Grid(_size_points())
ENTROPY_GRID = Grid(np.arange(3001, dtype=np.float64) * 0.005)


class PositionBands:
    """Percentiles of a token metric by position in the output, in at most 128 bins of equal width.

    At first, each bin covers one position. If a rollout has a position beyond the last bin, neighboring bins
    are merged in pairs.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._counts = np.zeros((NUM_BINS, len(grid)), np.int64)
        self._width = 1

    def add(self, positions: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Count each value in the bin of its position in the output. `positions` must be ascending."""
        if not len(positions):
            return
        while positions[-1] >= NUM_BINS * self._width:
            pairs = self._counts[0::2] + self._counts[1::2]
            self._counts[: len(pairs)], self._counts[len(pairs) :] = pairs, 0
            self._width *= 2
        cells = (positions // self._width) * len(self._grid) + self._grid.index(values)
        np.add.at(self._counts.reshape(-1), cells, 1)

    def to_json(self) -> dict[str, Any]:
        """Return the width of the bins, and the number of tokens, p10, median, and p90 of each bin."""
        totals = self._counts.sum(axis=1)
        used = int(np.flatnonzero(totals)[-1]) + 1 if totals.any() else 0
        return {"width": self._width, "count": totals[:used].tolist()} | {
            name: [self._percentile(bin_index, q) for bin_index in range(used)]
            for name, q in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))
        }

    def _percentile(self, bin_index: int, q: float) -> float | None:
        """Return the `q`-quantile of a bin's values as a grid point, or None for an empty bin."""
        seen = np.cumsum(self._counts[bin_index])
        if not seen[-1]:
            return None
        return round(float(self._grid.points[np.searchsorted(seen, q * seen[-1])]), 6)
