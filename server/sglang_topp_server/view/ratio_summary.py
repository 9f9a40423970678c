"""Summarize importance ratios over many tokens: mean, share of outliers, and log-ratio histogram."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["OFF", "RatioSummary"]

OFF = 0.1
"""The threshold for outliers: an importance ratio is an outlier if it differs from 1 by more than `OFF`."""

# The bounds of the histogram's bars, in log-ratios. The middle bar is centered on the log-ratio 0, which is
# the ratio 1. The first bar counts all log-ratios below -1.01, and the last bar counts all log-ratios above
# 1.01.
_EDGES = np.concatenate([[-np.inf], np.arange(-50.5, 51.0) * 0.02, [np.inf]])


class RatioSummary:
    """Statistics of importance ratios. The caller passes the logarithms of the ratios to `add`.

    Attributes:
        num_tokens: the number of tokens whose ratios have been added.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._sum, self._num_off = 0.0, 0
        self._least, self._most = np.inf, -np.inf
        self._counts = np.zeros(len(_EDGES) - 1, np.int64)

    def add(self, log_ratios: NDArray[np.float64]) -> None:
        """Add the tokens' log-ratios to the statistics, except log-ratios that are NaN."""
        log_ratios = log_ratios[~np.isnan(log_ratios)]
        if not len(log_ratios):
            return
        # The cap of 700 on log-ratios keeps the ratios finite in float64. The log-ratios in the histogram
        # need no cap, because the last bar counts all log-ratios above 1.01.
        ratios = np.exp(np.minimum(log_ratios, 700.0))
        self.num_tokens += len(ratios)
        self._sum += float(ratios.sum())
        self._num_off += int(np.count_nonzero(np.abs(ratios - 1) > OFF))
        self._least, self._most = min(self._least, ratios.min()), max(self._most, ratios.max())
        self._counts += np.bincount(
            np.searchsorted(_EDGES[1:-1], log_ratios, side="right"), minlength=len(self._counts)
        )

    def to_json(self) -> dict[str, Any] | None:
        """Return the statistics of all added ratios as JSON values, or None if no ratio was added."""
        if not self.num_tokens:
            return None
        return {
            "tokens": self.num_tokens,
            "mean": self._sum / self.num_tokens,
            "off": self._num_off / self.num_tokens,
            "least": float(self._least),
            "most": float(self._most),
            "edges": np.round(_EDGES[1:-1], 6).tolist(),
            "counts": self._counts.tolist(),
        }
