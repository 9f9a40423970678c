"""Keep the most recently served rollouts in memory, for `GET /view`."""

from __future__ import annotations

import asyncio
from collections import deque

from sglang_topp_client import Rollout, Score
from sglang_topp_server.limits import num_bytes_of
from sglang_topp_server.view.build_page import page_of_rollouts

_MAX_BYTES = 2**28


class RecentRollouts:
    """The most recent rollouts: at most `count` rollouts, and at most 256 MiB in total.

    Args:
        count: the maximum number of rollouts to keep.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._rollouts: deque[Rollout] = deque()
        self._num_bytes = 0
        self._one_page_at_a_time = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._rollouts)

    def add(self, sample: Rollout | Score) -> None:
        """Keep `sample` if it is a rollout, and drop the oldest rollouts that no longer fit."""
        if not isinstance(sample, Rollout):
            return
        self._rollouts.append(sample)
        self._num_bytes += num_bytes_of(sample)
        while len(self._rollouts) > self._count or self._num_bytes > _MAX_BYTES:
            self._num_bytes -= num_bytes_of(self._rollouts.popleft())

    async def page(self) -> bytes:
        """Return an HTML page that shows the kept rollouts.

        Raises:
            InvalidInputError: no rollout has been added yet.
        """
        async with self._one_page_at_a_time:
            return await asyncio.to_thread(self._page, list(self._rollouts))

    def _page(self, rollouts: list[Rollout]) -> bytes:
        return b"".join(page_of_rollouts(rollouts, f"the last {len(rollouts)} rollouts"))
