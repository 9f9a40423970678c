"""Rollout records in place of prompts are resumed, and malformed ones get a 400 that names the field."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp.engine_contract import Model
from sglang_topp.errors import AbortedError, SglangToppError
from sglang_topp_client import Rollout, RolloutClient
from sglang_topp_client.value_checks import fresh_id
from sglang_topp_client.wire.records import from_record, to_record
from sglang_topp_server.requests import parse_abort, parse_rollouts
from sglang_topp_server.settings import Limits
from tests.server.conftest import refusal

SAMPLING = {"max_new_tokens": 8, "temperature": 1.0}


def rollout(num_tokens=2, **changes):
    ids = np.arange(10, 10 + num_tokens, dtype=np.int32)
    sets = CandidateSets(ids, np.full(num_tokens, -0.05, np.float32), np.arange(num_tokens + 1), ids)
    made = Rollout(
        3, 1, "r", np.array([5, 6], np.int32), ids, "ab", sets.sampled_logprobs, sets, "abort", "7", 1, 0.5
    )
    return replace(made, **{"top_logprobs_source": "distribution", **changes})


def parse(*rollouts, limits=None, **fields):
    body = {"rollouts": list(rollouts), "sampling_params": SAMPLING, "top_logprobs_p": 0.9, **fields}
    return parse_rollouts(json.dumps(body).encode(), limits or Limits())


def test_a_record_is_continued():
    request = parse(to_record(rollout()), to_record(rollout().extend([7])), on_abort="return")
    assert [one.prompt for one in request.wanted] == [[5, 6], [5, 6]]
    assert [one.prompt_index for one in request.wanted] == [0, 1]
    assert [one.output_ids.tolist() for one in request.given.values()] == [[10, 11], [10, 11, 7]]
    assert request.body.on_abort == "return"
    assert request.body.rollouts is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # `tests/client/wire/test_records.py` has every field. Here, one stands for each kind of check.
        ({"output_ids": [10]}, "rollouts[0].completion_tokens: got 2"),
        ({"output_ids": [10, 2**40]}, "rollouts[0].output_ids: got 1099511627776, expected integers of 32"),
        ({"prompt_ids": [], "prompt_tokens": 0}, "rollouts[0].prompt_ids: got none"),
        ({"logprobs": "####"}, "rollouts[0].logprobs: not base64"),
        ({"logprobs": "AAAAAAAAAAA="}, "rollouts[0].candidates: got log-prob"),
        ({"candidates": "AAAA"}, "rollouts[0]."),
        ({"candidates": None}, "rollouts[0].candidates: got no sets"),
        ({"top_logprobs_source": "sampler"}, "rollouts[0].top_logprobs_source: got 'sampler'"),
        ({"weight_versions": "a"}, "rollouts[0].weight_versions: got 'a'"),
        ({"timing": {"latency_s": -1}}, "rollouts[0].timing.latency_s: got -1"),
        ({"top_logprobs_p": 0.25}, "rollouts[0].top_logprobs_p: got 0.25, but"),
        ({"sampling_params": {"temperature": 9}}, "rollouts[0].sampling_params.temperature: got 9, but"),
        ({"sampling_params": []}, "rollouts[0].sampling_params: got []"),
        ({"appended_spans": [[0, 1000]]}, "rollouts[0].appended_spans: got 0 to 1000"),
    ],
)
def test_a_wrong_record_is_named(changes, words):
    with refusal(words):
        parse(to_record(rollout()) | changes)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logit_bias": {"999999": 1}}, "logit_bias: got token id '999999'"),
        ({"regex": "a"}, "regex: got one, expected none: a grammar"),
    ],
)
def test_the_parameters_of_a_record_are_checked_as_those_beside_it(params, words):
    record = to_record(replace(rollout(), sampling_params=SAMPLING | params).extend([7]))
    with refusal(f"rollouts[0].sampling_params.{words}"):
        parse(record).check(Model(1000, 4096, 64), survives_grammars=False)


OPTIONAL = {
    *("appended_spans", "routing_key", "sampling_params", "token_fields", "top_logprobs_p"),
    *("top_logprobs_source", "weight_versions"),
}


@pytest.mark.parametrize("name", sorted(to_record(rollout()).keys() - OPTIONAL))
def test_a_missing_field_of_a_record_is_named(name):
    record = to_record(rollout())
    del record[name]
    with refusal(f"rollouts[0].{name}"):
        parse(record)


@pytest.mark.parametrize(
    ("rollouts", "fields", "words"),
    [
        ([3], {}, "rollouts[0]: got 3"),
        ([None], {}, "rollouts[0]: got None"),
        ([], {}, "rollouts: got none"),
        (["a"], {}, "rollouts[0]: got 'a'"),
        ([to_record(rollout())], {"prompts": "a"}, "rollouts: got rollouts and prompts"),
        ([to_record(rollout())], {"resumed_tokens": 1}, "got resumed_tokens and rollouts"),
        ([to_record(rollout())], {"on_abort": "give up"}, "on_abort: got"),
        ([to_record(rollout())], {"on_abort": None}, "on_abort: got None"),
        ([to_record(rollout())], {"sampling_params": {}}, "max_new_tokens: got none"),
        ([to_record(rollout())], {"sampling_params": {**SAMPLING, "regex": "a"}}, "regex: got 'a'"),
        ([to_record(rollout())], {"sampling_params": [SAMPLING] * 2}, "got 2 values for 1 rollouts"),
    ],
)
def test_wrong_requests_with_records_are_named(rollouts, fields, words):
    with refusal(words):
        parse(*rollouts, **fields)


@pytest.mark.parametrize("given", [{"a": 1}, "abc", 3, True])
def test_rollouts_must_be_a_list(given):
    with refusal("rollouts: got"):
        parse_rollouts(json.dumps({"rollouts": given}).encode(), Limits())


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "max_new_tokens: got none"),
        ({"max_new_tokens": 4, "presence_penalty": 1}, "presence_penalty: got 1"),
        ({"max_new_tokens": 4, "custom_params": {"a": 1}}, "custom_params: got"),
    ],
)
def test_what_cannot_be_resumed_is_refused_before_it_begins(params, words):
    body = {"prompts": "a", "sampling_params": params, "on_abort": "resume"}
    with refusal(words):
        parse_rollouts(json.dumps(body).encode(), Limits())
    (one,) = parse_rollouts(json.dumps({**body, "on_abort": "return"}).encode(), Limits()).wanted
    assert (one.is_interruptible, one.resumed_tokens) == (True, 0)


def test_records_are_counted_before_they_are_decoded():
    with refusal("got 9, expected at most 8 samples", status=413):
        parse(*[{"no": "record"}] * 9, limits=Limits(max_samples=8))


@pytest.mark.parametrize(
    ("prompts", "count", "words"),
    [
        ("ab", 1, "resumed_tokens: got 1 with a text as prompt 0"),
        ([1, 2], 3, "resumed_tokens: got 3 with 2 ids"),
        ([1, 2], -1, "resumed_tokens: got -1"),
        ([1, 2], True, "resumed_tokens: got True"),
        ([1, 2], "1", "resumed_tokens: got '1'"),
        ([[1, 2], [3]], [1], "resumed_tokens: got 1 values for 2 prompts"),
        ([[1, 2], [3]], [1, 2.0], "resumed_tokens[1]: got 2.0"),
        ([[1, 2], [3]], {"a": 1}, "resumed_tokens: got {'a': 1}"),
    ],
)
def test_wrong_resumed_tokens_are_named(prompts, count, words):
    with refusal(words):
        parse_rollouts(json.dumps({"prompts": prompts, "resumed_tokens": count}).encode(), Limits())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not JSON"),
        (b"{}", "got both request_id and all, or neither"),
        (b'{"request_id": "a", "all": true}', "got both request_id and all, or neither"),
        (b'{"request_id": null}', "got both request_id and all, or neither"),
        (b'{"request_id": ""}', "request_id: got an empty string"),
        (b'{"request_id": 3}', "request_id: got 3"),
        (b'{"request_id": "a\\nb"}', "request_id: got the character"),
        (b'{"all": 1}', "all: got 1"),
        (b'{"everything": true}', "everything: no such field, expected one of request_id, all"),
        (b"[]", "the body: got"),
    ],
)
def test_wrong_abort_bodies_are_named(body, words):
    with refusal(words):
        parse_abort(body)


# -- served ----------------------------------------------------------------------------------------


def test_a_record_goes_in_and_a_longer_one_comes_out(sidecar, engine, eventually):
    given = [rollout(), rollout().extend([7]), rollout(finish_reason="stop"), rollout(8)]
    body = {"rollouts": [to_record(one) for one in given], "sampling_params": SAMPLING, "top_logprobs_p": 0.9}
    answer = sidecar.http.post("/rollouts", json=body)
    assert answer.status_code == 200, answer.text
    longer = [from_record(Rollout, one, may_be_extended=True) for one in answer.json()["rollouts"]]
    assert [one.prompt_index for one in longer] == [0, 1, 2, 3]
    assert [one.finish_reason for one in longer] == ["length", "length", "stop", "length"]
    assert [len(one.output_ids) for one in longer] == [5, 6, 2, 8]
    for before, after in zip(given, longer, strict=True):
        count = len(before.output_ids)
        assert after.output_ids[:count].tolist() == before.output_ids.tolist()
        assert after.candidates[:count] == before.candidates
    assert sorted(body["input_ids"] for body in engine.bodies) == [[5, 6, 10, 11], [5, 6, 10, 11, 7]]
    by_prompt = {len(body["input_ids"]): body for body in engine.bodies}
    assert by_prompt[4]["resumed_tokens"] == 2
    assert by_prompt[4]["sampling_params"]["max_new_tokens"] == 6
    assert "resumed_tokens" not in by_prompt[5]
    assert by_prompt[5]["sampling_params"]["max_new_tokens"] == 8
    # The answer arrives shortly before its memory is released.
    eventually(lambda: sidecar.metric("sglang_topp_held_bytes") == 0)


def test_a_continued_record_is_streamed(sidecar):
    body = {"rollouts": [to_record(rollout())], "sampling_params": SAMPLING, "top_logprobs_p": 0.9}
    lines = sidecar.http.post("/rollouts", json={**body, "stream": True}).text.splitlines()
    assert json.loads(lines[-1]) == {"done": True, "rollouts": 1}
    assert len(from_record(Rollout, json.loads(lines[0])).output_ids) == 5


@pytest.mark.parametrize(("place", "where"), [("prompt_ids", [5, 600]), ("output_ids", [10, 600])])
def test_ids_beyond_the_vocabulary_end_no_engine(sidecar, engine, place, where):
    ids = np.array(where, np.int32)
    made = rollout(candidates=None, top_logprobs_source=None, **{place: ids})
    body = {"rollouts": [to_record(made)], "sampling_params": SAMPLING}
    answer = sidecar.http.post("/rollouts", json=body)
    assert answer.status_code == 400
    assert f"rollouts[0].{place}: got token id 600 at position 1" in answer.text
    assert engine.bodies == []


def test_records_that_hold_too_much(start, engine, eventually):
    sidecar = start(engine.url, max_held_bytes=100)
    body = {"rollouts": [to_record(rollout(8, finish_reason="abort"))], "top_logprobs_p": 0.9}
    answer = sidecar.http.post("/rollouts", json={**body, "sampling_params": {"max_new_tokens": 20}})
    assert answer.status_code == 413
    # The answer arrives shortly before its memory is released.
    eventually(lambda: sidecar.metric("sglang_topp_held_bytes") == 0)


def test_a_request_is_stopped_by_its_name(sidecar, engine, eventually):
    with RolloutClient(sidecar.url) as client, ThreadPoolExecutor(1) as pool:
        stream = client.stream([[1], [2]], {"fault": "hang"}, top_logprobs_p=0.9, request_id="mine")
        following = pool.submit(list, stream)
        eventually(lambda: len(engine.bodies) == 2)
        name = engine.bodies[0]["rid"].rsplit("-", 1)[0]
        answer = sidecar.http.post("/abort", json={"request_id": name})
        assert (answer.status_code, answer.json()) == (200, {"status": "ok", "aborted": 1})
        with pytest.raises(SglangToppError, match="aborted"):
            following.result()
    eventually(lambda: len(engine.hung_up) == 2)


def test_a_client_aborts_its_own_calls_and_no_others_of_the_same_name(sidecar, engine, eventually):
    """Two trainers may both use "step-7". The client therefore sends a fresh id for each call."""
    with (
        RolloutClient(sidecar.url) as caller,
        RolloutClient(sidecar.url) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        work = pool.submit(caller.generate, [[1], [2]], {"fault": "hang"}, request_id="step-7")
        eventually(lambda: len(engine.bodies) == 2)
        assert other.abort("step-7") == caller.abort("step") == 0
        assert not work.done()
        assert caller.abort("step-7") == 2
        with pytest.raises(AbortedError):
            work.result()


def test_abort_all_is_sent_to_the_engine(sidecar, engine):
    answer = sidecar.http.post("/abort", json={"all": True})
    assert (answer.status_code, answer.json()) == (200, {"status": "ok", "aborted": None})
    assert engine.aborted == ["all"]
    theirs = fresh_id("theirs")
    assert sidecar.http.post("/abort", json={"request_id": theirs}).json()["aborted"] == 0
    assert engine.aborted == ["all", theirs]


def test_an_abort_needs_the_key_and_an_engine(start, engine, serve_engine):
    guarded = start(engine.url, api_key="secret")
    assert guarded.http.post("/abort", json={"all": True}).status_code == 401
    assert engine.aborted == []
    with serve_engine() as other:
        sidecar = start(other.url)
    answer = sidecar.http.post("/abort", json={"all": True})
    assert answer.status_code == 502
    assert answer.json()["error"]["type"] == "TransportError"
    body = b"x" * 100
    assert start(engine.url, max_body_bytes=10).http.post("/abort", content=body).status_code == 413
