"""Partials: samples that came in parts, put together, and gone on with where they are to be whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from sglang_topp_client.request import SampleRequest
from sglang_topp_client.resuming import OnAbort, continuation, ended, join
from sglang_topp_client.rollout import ABORT, Rollout

__all__ = ["Partials"]

_FIRST_WAIT_S = 0.05
_MAX_WAIT_S = 2.0


class Partials:
    """The samples of one caller's request, each until it is delivered.

    Args:
        wanted: what was asked for, one per prompt, as if there was nothing yet.
        on_abort: with `"resume"`, what was interrupted is gone on with.
        deliver: takes a sample that is as whole as it gets.
        given: what is there already, by prompt index; such a prompt has one sample. What is delivered has
            these indices.
    """

    def __init__(
        self,
        wanted: Sequence[SampleRequest],
        on_abort: OnAbort,
        deliver: Callable[[Rollout], None],
        given: Mapping[int, Rollout],
    ) -> None:
        self._wanted = {one.prompt_index: one for one in wanted}
        self._on_abort, self._deliver = on_abort, deliver
        self._there = {
            (index, 0): replace(rollout, prompt_index=index, sample_index=0)
            for index, rollout in given.items()
        }
        self._waits_s: dict[tuple[int, int], float] = {}

    def begin(self) -> Iterator[SampleRequest]:
        """The requests to begin with; samples that need none are delivered."""
        for index, one in self._wanted.items():
            there = self._there.get((index, 0))
            if there is None:
                yield one
            elif (rollout := ended(there, one)) is not None:
                self._deliver(rollout)
            else:
                yield continuation(there, one, 0)

    def take(self, rollout: Rollout) -> tuple[SampleRequest, float] | None:
        """A sample, or a part of one, has come.

        Returns:
            The request for what is missing, and how many seconds to wait before it is sent; None where the
            sample was delivered.
        """
        at = rollout.prompt_index, rollout.sample_index
        there = self._there.pop(at, None)
        whole = rollout if there is None else join(there, rollout)
        if self._on_abort != "resume" or whole.finish_reason != ABORT:
            self._deliver(whole)
            return None
        self._there[at] = whole
        # Where aborts come faster than tokens, asking again at once would only make more of them.
        before_s = self._waits_s.get(at, 0.0)
        wait_s = 0.0 if len(rollout.output_ids) else min(max(2 * before_s, _FIRST_WAIT_S), _MAX_WAIT_S)
        self._waits_s[at] = wait_s
        return continuation(whole, self._wanted[rollout.prompt_index], rollout.sample_index), wait_s
