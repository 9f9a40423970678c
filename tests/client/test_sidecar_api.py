import json
from dataclasses import replace

import pytest

from sglang_topp import errors
from sglang_topp_client.packed_record import PackedRecord
from sglang_topp_client.record import error_to_record, to_record
from sglang_topp_client.request import SampleRequest, plan
from sglang_topp_client.sidecar_api import RolloutsExchange


def exchange(wanted=None):
    return RolloutsExchange(wanted or plan([[5], [6, 7]], {"n": 2}, 0.9), request_id="mine", timeout_s=9.0)


def line(record):
    return json.dumps(record).encode()


def test_one_value_for_all_is_sent_once():
    body = exchange().body()
    assert body.pop("request_id").startswith("mine-")
    assert body == {
        "prompts": [[5], [6, 7]],
        "sampling_params": {"n": 2},
        "top_logprobs_p": 0.9,
        "timeout_s": 9.0,
        "stream": True,
    }


def test_different_values_are_sent_one_each():
    body = exchange(plan(["a", "b"], [{"n": 2}, {"top_k": 5}], [None, 0.5])).body()
    assert body["sampling_params"] == [{"n": 2}, {"top_k": 5, "n": 1}]
    assert body["top_logprobs_p"] == [None, 0.5]


def test_the_sampler_as_source_is_sent_where_it_is_asked_for():
    assert exchange(plan(["a", "b"], None, None, "sampler")).body()["top_logprobs_source"] == "sampler"
    body = exchange(plan(["a", "b"], None, [0.9, None], ["distribution", "sampler"])).body()
    assert body["top_logprobs_p"] == [0.9, None]
    assert body["top_logprobs_source"] == ["distribution", "sampler"]
    # Sidecars of 0.1.0 refuse a field that they do not know.
    assert "top_logprobs_source" not in exchange(plan(["a"], None, 0.9, "distribution")).body()


def test_sets_of_another_source_are_an_error(fakes):
    record = to_record(fakes.sample([5], 0))
    one = exchange(plan([[5]], None, None, "sampler"))
    with pytest.raises(errors.WireError, match="got distribution, and 'sampler' was asked for"):
        one.read(line(record))
    (rollout,) = one.read(line(record | {"top_logprobs_source": "sampler"}))
    assert rollout.top_logprobs_source == "sampler"


def test_samples_get_the_callers_indices(fakes):
    wanted = [
        SampleRequest(40, [5], {}, (1, 7), 0.9, "distribution"),
        SampleRequest(3, [6], {}, (2,), 0.9, "distribution"),
    ]
    one = exchange(wanted)
    assert one.body()["sampling_params"] == [{"n": 2}, {"n": 1}]
    places = [one.read(line(record))[0] for record in fakes.records(one.body())]
    assert [(r.prompt_index, r.sample_index) for r in places] == [(40, 1), (40, 7), (3, 2)]
    assert one.read(b"") == []
    assert one.read(line({"done": True, "rollouts": 3})) == []
    assert one.complete


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_index": 2},
        {"sample_index": 2},
        {"prompt_ids": [9], "prompt_tokens": 1},
        {"candidates": None},
        {"output_ids": []},
    ],
)
def test_a_sample_that_was_not_asked_for_is_an_error(fakes, changes):
    record = to_record(fakes.sample([5], 0))
    assert len(exchange().read(line(record))) == 1
    with pytest.raises(errors.WireError):
        exchange().read(line(record | changes))


def test_missing_sets_are_named(fakes):
    with pytest.raises(errors.MissingCandidateSetsError):
        exchange().read(line(to_record(fakes.sample([5], 0)) | {"candidates": None}))


def test_a_sample_comes_once(fakes):
    one = exchange()
    one.read(line(to_record(fakes.sample([5], 0))))
    with pytest.raises(errors.WireError, match="twice"):
        one.read(line(to_record(fakes.sample([5], 0))))


def test_an_aborted_sample_is_an_error(fakes):
    with pytest.raises(errors.RolloutError, match="abort"):
        exchange().read(line(to_record(fakes.sample([5], 0)) | {"finish_reason": "abort"}))


@pytest.mark.parametrize("rollouts", [0, 3, 4, None])
def test_the_end_must_add_up(fakes, rollouts):
    one = exchange()
    for record in list(fakes.records(one.body()))[:3]:
        one.read(line(record))
    with pytest.raises(errors.WireError, match="4"):
        one.read(line({"done": True, "rollouts": rollouts}))


@pytest.mark.parametrize("garbage", [b"{", b"[]", b"5", b"data: {}", b"{}"])
def test_garbage_is_an_error(garbage):
    with pytest.raises(errors.WireError):
        exchange().read(garbage)


@pytest.mark.parametrize(
    "error",
    [
        errors.MissingCandidateSetsError("f", "gone"),
        errors.RolloutError("aborted"),
        errors.ServerError("down", status=502),
        errors.RequestTimeoutError("9 s"),
    ],
)
def test_a_reported_error_is_raised_as_itself(error):
    with pytest.raises(type(error), match=str(error)):
        exchange().read(line(error_to_record(error) | {"prompt_index": 0}))


# -- packed ----------------------------------------------------------------------------------------


def packed(made, bits=32):
    return b"".join(PackedRecord(made, logprob_bits=bits))


def test_a_packed_sample_is_the_same_sample(fakes):
    made = fakes.sample([5], 0)
    (from_line,), (from_frame,) = exchange().read(line(to_record(made))), exchange().read(packed(made))
    assert to_record(from_frame) == to_record(from_line)


def test_rounded_log_probs_come_to_those_who_ask(fakes):
    made = fakes.sample([5], 0)
    with pytest.raises(errors.WireError, match="rounded to 16 bits, which nobody asked for"):
        exchange().read(packed(made, 16))
    asking = RolloutsExchange(plan([[5]], None, 0.9), request_id="mine", logprob_bits=16)
    (rollout,) = asking.read(packed(made, 16))
    assert rollout.logprobs.tolist() == made.logprobs.tolist()
    # Whoever may round need not.
    asking = RolloutsExchange(plan([[5]], None, 0.9), request_id="mine", logprob_bits=16)
    assert asking.read(packed(made))[0].candidates == made.candidates


def test_packed_samples_are_checked_like_any(fakes):
    one = exchange()
    one.read(packed(fakes.sample([5], 0)))
    with pytest.raises(errors.WireError, match="twice"):
        one.read(packed(fakes.sample([5], 0)))
    with pytest.raises(errors.MissingCandidateSetsError):
        exchange().read(packed(replace(fakes.sample([5], 0), candidates=None)))
    with pytest.raises(errors.RolloutError, match="abort"):
        exchange().read(packed(replace(fakes.sample([5], 0), finish_reason="abort")))
    with pytest.raises(errors.WireError, match="prompt_ids: are not those of prompt 0"):
        exchange().read(packed(fakes.sample([6], 0)))
