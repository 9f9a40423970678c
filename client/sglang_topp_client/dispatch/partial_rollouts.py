"""PartialRollouts: build requests that continue interrupted samples, and join the parts of each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from sglang_topp_client.requests.plan_generate import SampleRequest
from sglang_topp_client.requests.resume import OnAbort, as_finished, continuation_request
from sglang_topp_client.types.join_rollouts import join_parts
from sglang_topp_client.types.rollout import ABORT, Rollout

__all__ = ["PartialRollouts"]

_FIRST_WAIT_S = 0.05
_MAX_WAIT_S = 2.0


class PartialRollouts:
    """The undelivered samples of one call of `generate` or `resume`.

    Args:
        requests: one `SampleRequest` for each prompt, as if no sample had been started. If a prompt has an
            unfinished rollout in `existing`, `begin` yields a request for the rollout's missing tokens
            instead.
        on_abort: `"resume"` to continue aborted samples.
        deliver: a function that takes each finished sample, and each aborted sample that is not continued.
        existing: rollouts to continue, by prompt index. A prompt with an existing rollout has one sample,
            which continues the rollout. The delivered sample has the prompt index from `existing` and the
            sample index 0. The indices stored in the existing rollout are ignored.
    """

    def __init__(
        self,
        requests: Sequence[SampleRequest],
        on_abort: OnAbort,
        deliver: Callable[[Rollout], None],
        existing: Mapping[int, Rollout],
    ) -> None:
        self._requests = {request.prompt_index: request for request in requests}
        self._on_abort, self._deliver = on_abort, deliver
        self._parts = {
            (index, 0): replace(rollout, prompt_index=index, sample_index=0)
            for index, rollout in existing.items()
        }
        self._waits_s: dict[tuple[int, int], float] = {}

    def begin(self) -> Iterator[SampleRequest]:
        """Yield the initial requests, and deliver the samples that are already finished."""
        for index, request in self._requests.items():
            part = self._parts.get((index, 0))
            if part is None:
                yield request
            elif (rollout := as_finished(part, request)) is not None:
                self._deliver(rollout)
            else:
                yield continuation_request(part, request, 0)

    def take(self, rollout: Rollout) -> tuple[SampleRequest, float] | None:
        """Join the next part of a sample to the earlier parts of the sample.

        Deliver the sample unless the sample must be continued.

        Returns:
            A request for the rest of the sample, and the seconds to wait before that request is sent; None if
            the sample was delivered.
        """
        place = rollout.prompt_index, rollout.sample_index
        part = self._parts.pop(place, None)
        joined = rollout if part is None else join_parts(part, rollout)
        request = self._requests[rollout.prompt_index]
        if self._on_abort != "resume" or joined.finish_reason != ABORT:
            # Store the caller's parameters in the rollout. The last HTTP request may have lower token limits.
            params, p = request.sampling_params, request.top_logprobs_p
            self._deliver(replace(joined, sampling_params=params, top_logprobs_p=p))
            return None
        self._parts[place] = joined
        # An engine that aborted this part before the first token would probably abort an immediate request
        # too. So the client waits before the next request.
        before_s = self._waits_s.get(place, 0.0)
        wait_s = 0.0 if len(rollout.output_ids) else min(max(2 * before_s, _FIRST_WAIT_S), _MAX_WAIT_S)
        self._waits_s[place] = wait_s
        return continuation_request(joined, request, rollout.sample_index), wait_s
