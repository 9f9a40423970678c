"""Percentile bands for the charts of `sglang-topp view`: median, p10, and p90 by position in the output.

To keep memory constant, this module rounds each metric value to the nearest point of a fixed grid, and stores
only the number of values at each grid point. The error of a percentile is at most the distance between two
neighboring grid points. An error of this size is too small to see in a chart.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ENTROPY_GRID", "MASS_GRID", "SIZE_GRID", "Grid", "PositionBands"]

NUM_BINS = 128


class Grid:
    """Fixed grid points for one metric. `PositionBands` counts each value at the nearest grid point.

    Args:
        points: float64 [G], the G grid points in ascending order. A value below the first grid point is
            rounded to the first grid point, and a value above the last grid point to the last grid point.
    """

    def __init__(self, points: NDArray[np.float64]) -> None:
        self.points = points
        self._bounds = (points[1:] + points[:-1]) / 2

    def __len__(self) -> int:
        return len(self.points)

    def index(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Return int64 [N]: for each of the N values, the index of the nearest grid point."""
        index: NDArray[np.int64] = np.searchsorted(self._bounds, values, side="left")
        return index


def _size_points() -> NDArray[np.float64]:
    """Return the grid points for set sizes: 1 to 1,024, then steps of 1 % up to four million."""
    above = np.unique(np.round(1024 * 1.01 ** np.arange(1, 836)))
    points: NDArray[np.float64] = np.concatenate([np.arange(1.0, 1025.0), above])
    return points


MASS_GRID = Grid(np.arange(4097, dtype=np.float64) / 4096)
SIZE_GRID = Grid(_size_points())
ENTROPY_GRID = Grid(np.arange(3001, dtype=np.float64) * 0.005)


class PositionBands:
    """Percentiles of a token metric by position in the output, in at most 128 bins of equal width.

    At first, each bin covers one position in the output. If a rollout has a token beyond the last bin, `add`
    merges neighboring bins in pairs, so that each bin covers twice as many positions.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._counts = np.zeros((NUM_BINS, len(grid)), np.int64)
        self._width = 1

    def add(self, positions: NDArray[np.int64], values: NDArray[Any]) -> None:
        """Count the metric values of one rollout's tokens, each in the bin of the token's position.

        Args:
            positions: int64 [N], the positions of N tokens in the output, in ascending order.
            values: the metric values of the N tokens, [N].
        """
        if not len(positions):
            return
        while positions[-1] >= NUM_BINS * self._width:
            pairs = self._counts[0::2] + self._counts[1::2]
            self._counts[: len(pairs)], self._counts[len(pairs) :] = pairs, 0
            self._width *= 2
        cells = (positions // self._width) * len(self._grid) + self._grid.index(values)
        np.add.at(self._counts.reshape(-1), cells, 1)

    def to_json(self) -> dict[str, Any]:
        """Return the width of the bins, and the p10, median, p90, and token count of each bin."""
        totals = self._counts.sum(axis=1)
        used = int(np.flatnonzero(totals)[-1]) + 1 if totals.any() else 0
        return {"width": self._width, "count": totals[:used].tolist()} | {
            name: [self._percentile(bin_index, q) for bin_index in range(used)]
            for name, q in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))
        }

    def _percentile(self, bin_index: int, q: float) -> float | None:
        """Return the quantile `q` of one bin's values, rounded to a grid point, or None for an empty bin."""
        seen = np.cumsum(self._counts[bin_index])
        if not seen[-1]:
            return None
        return round(float(self._grid.points[np.searchsorted(seen, q * seen[-1])]), 6)
