"""Samples that arrive in parts: which request continues them, and when."""

from dataclasses import replace

import numpy as np

from sglang_topp import CandidateSets
from sglang_topp_client.dispatch.partial_rollouts import PartialRollouts
from sglang_topp_client.requests.plan_generate import SampleRequest

WANTED = SampleRequest(0, [5], {"max_new_tokens": 100}, (0, 1), 0.9, "distribution", resumed_tokens=0)


def test_aborts_without_tokens_back_off(fakes):
    delivered = []
    partials = PartialRollouts([WANTED], "resume", delivered.append, {})
    (first,) = partials.begin()
    assert first is WANTED
    nothing = replace(
        fakes.sample([5], 0),
        finish_reason="abort",
        output_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        candidates=CandidateSets.empty(0),
        weight_spans=(),
    )
    waits = [partials.take(nothing)[1] for _ in range(2000)]
    assert waits[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0]
    assert set(waits[7:]) == {2.0}
    some, wait_s = partials.take(replace(fakes.sample([5], 0), finish_reason="abort"))
    assert (wait_s, some.resumed_tokens, some.samples) == (0.0, 3, (0,))
    assert some.sampling_params == {"max_new_tokens": 97}
    # The other sample has not waited.
    assert partials.take(replace(nothing, sample_index=1))[1] == 0.05
    assert delivered == []


def test_a_resumed_request_keeps_its_resumed_tokens_when_continued(fakes):
    """Two prompt tokens belong to the answer. They count in `resumed_tokens`, not in `max_new_tokens`."""
    wanted = replace(WANTED, prompt=[5, 6, 7], samples=(0,), resumed_tokens=2)
    partials = PartialRollouts([wanted], "resume", [].append, {})
    made = replace(fakes.sample([5, 6, 7], 0), finish_reason="abort")
    more, _ = partials.take(made)
    assert more.resumed_tokens == 5
    assert more.prompt == [5, 6, 7, *made.output_ids.tolist()]
    assert more.sampling_params == {"max_new_tokens": 97}
