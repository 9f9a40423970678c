"""Samples that come in parts: what is asked for next, and when."""

from dataclasses import replace

import numpy as np

from sglang_topp import CandidateSets
from sglang_topp_client.partials import Partials
from sglang_topp_client.request import SampleRequest

WANTED = SampleRequest(0, [5], {"max_new_tokens": 100}, (0, 1), 0.9, "distribution", resumed_tokens=0)


def test_aborts_that_come_faster_than_tokens_are_waited_out(fakes):
    delivered = []
    partials = Partials([WANTED], "resume", delivered.append, {})
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


def test_an_answer_that_goes_on_already_keeps_its_count(fakes):
    """Two tokens of the prompt began it: they count for the engine, not for the limit that is given."""
    wanted = replace(WANTED, prompt=[5, 6, 7], samples=(0,), resumed_tokens=2)
    partials = Partials([wanted], "resume", [].append, {})
    made = replace(fakes.sample([5, 6, 7], 0), finish_reason="abort")
    more, _ = partials.take(made)
    assert more.resumed_tokens == 5
    assert more.prompt == [5, 6, 7, *made.output_ids.tolist()]
    assert more.sampling_params == {"max_new_tokens": 97}
