"""Requests to the sidecar's `/rollouts`, and its answers, as lines and as frames."""

import json
from dataclasses import replace

import pytest

from sglang_topp import errors
from sglang_topp_client.codecs.error_json import error_to_json
from sglang_topp_client.codecs.rollout_binary import rollout_to_bytes
from sglang_topp_client.codecs.rollout_json import rollout_to_json
from sglang_topp_client.protocols.sidecar_rollouts import RolloutsExchange
from sglang_topp_client.requests.plan_generate import SampleRequest, plan


def exchange(wanted=None):
    wanted = wanted or plan([[5], [6, 7]], {"n": 2}, 0.9)
    return RolloutsExchange(wanted, request_id="mine", timeout_s=9.0, max_bytes=1 << 20)


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


def test_different_values_are_sent_as_lists():
    body = exchange(plan(["a", "b"], [{"n": 2}, {"top_k": 5}], [None, 0.5])).body()
    assert body["sampling_params"] == [{"n": 2}, {"top_k": 5, "n": 1}]
    assert body["top_logprobs_p"] == [None, 0.5]


def test_the_sampler_source_is_sent_if_requested():
    assert exchange(plan(["a", "b"], None, None, "sampler")).body()["top_logprobs_source"] == "sampler"
    body = exchange(plan(["a", "b"], None, [0.9, None], ["distribution", "sampler"])).body()
    assert body["top_logprobs_p"] == [0.9, None]
    assert body["top_logprobs_source"] == ["distribution", "sampler"]
    # Sidecars of 0.1.0 refuse a field that they do not know.
    assert "top_logprobs_source" not in exchange(plan(["a"], None, 0.9, "distribution")).body()


def test_sets_of_another_source_are_an_error(fakes):
    record = rollout_to_json(fakes.sample([5], 0))
    one = exchange(plan([[5]], None, None, "sampler"))
    with pytest.raises(errors.WireError, match="got 'distribution', expected 'sampler', as requested"):
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
    record = rollout_to_json(fakes.sample([5], 0))
    assert len(exchange().read(line(record))) == 1
    with pytest.raises(errors.WireError):
        exchange().read(line(record | changes))


def test_missing_sets_are_named(fakes):
    with pytest.raises(errors.MissingCandidateSetsError):
        exchange().read(line(rollout_to_json(fakes.sample([5], 0)) | {"candidates": None}))


def test_a_second_copy_of_a_sample_is_an_error(fakes):
    one = exchange()
    one.read(line(rollout_to_json(fakes.sample([5], 0))))
    with pytest.raises(errors.WireError, match="expected an unfinished one of"):
        one.read(line(rollout_to_json(fakes.sample([5], 0))))


def test_an_aborted_sample_is_an_error(fakes):
    with pytest.raises(errors.RolloutError, match="abort"):
        exchange().read(line(rollout_to_json(fakes.sample([5], 0)) | {"finish_reason": "abort"}))


@pytest.mark.parametrize("rollouts", [0, 3, 4, None])
def test_the_last_messages_count_must_match(fakes, rollouts):
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
        exchange().read(line(error_to_json(error) | {"prompt_index": 0}))


# -- binary ----------------------------------------------------------------------------------------


def test_a_binary_sample_is_the_same_sample(fakes):
    made = fakes.sample([5], 0)
    (from_line,) = exchange().read(line(rollout_to_json(made)))
    (from_frame,) = exchange().read(rollout_to_bytes(made))
    assert rollout_to_json(from_frame) == rollout_to_json(from_line)


def test_binary_samples_are_checked_like_json_samples(fakes):
    one = exchange()
    one.read(rollout_to_bytes(fakes.sample([5], 0)))
    with pytest.raises(errors.WireError, match="expected an unfinished one of"):
        one.read(rollout_to_bytes(fakes.sample([5], 0)))
    with pytest.raises(errors.MissingCandidateSetsError):
        exchange().read(rollout_to_bytes(replace(fakes.sample([5], 0), candidates=None)))
    with pytest.raises(errors.RolloutError, match="abort"):
        exchange().read(rollout_to_bytes(replace(fakes.sample([5], 0), finish_reason="abort")))
    with pytest.raises(errors.WireError, match="prompt_ids: got other ids than those of prompt 0"):
        exchange().read(rollout_to_bytes(fakes.sample([6], 0)))
