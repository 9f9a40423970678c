"""The sidecar's routes through real HTTP: rollouts, streams, `/info`, OpenAPI, and unknown paths."""

import json

import numpy as np
import pytest

from sglang_topp_client import AsyncRolloutClient, Rollout, RolloutClient
from sglang_topp_client.wire.records import MEDIA_TYPES, from_record
from sglang_topp_server.api.sample_endpoint import NDJSON
from sglang_topp_server.openapi import RolloutRecord


def test_rollouts_come_in_the_order_of_the_request(sidecar, engine):
    answer = sidecar.rollouts([[1, 2], [3, 4, 5]], sampling_params={"n": 3, "temperature": 0.7})

    assert answer.status_code == 200
    records = answer.json()["rollouts"]
    assert [(r["prompt_index"], r["sample_index"]) for r in records] == [
        (p, s) for p in range(2) for s in range(3)
    ]
    assert [r["prompt_ids"] for r in records] == [[1, 2]] * 3 + [[3, 4, 5]] * 3
    assert all(body["sampling_params"]["temperature"] == 0.7 for body in engine.bodies)
    assert {body["top_logprobs_p"] for body in engine.bodies} == {0.9}


def test_the_engine_turns_chat_messages_into_ids(sidecar, engine):
    chats = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "c"}]]
    answer = sidecar.rollouts(chats, sampling_params={"n": 2})

    assert answer.status_code == 200, answer.text
    assert [r["prompt_ids"] for r in answer.json()["rollouts"]] == [[97, 98]] * 2 + [[99]] * 2
    assert sorted(body["input_ids"] for body in engine.bodies) == [[97, 98], [99]]


def test_a_record_has_the_fields_of_the_contract_and_decodes(sidecar):
    (record,) = sidecar.rollouts("ab").json()["rollouts"]

    RolloutRecord.model_validate(record)
    rollout = from_record(Rollout, record)
    assert rollout.prompt_ids.tolist() == [97, 98]
    assert rollout.candidates.sizes.tolist() == [4, 4, 4]
    np.testing.assert_array_equal(rollout.candidates.sampled_logprobs, rollout.logprobs)
    assert (record["prompt_tokens"], record["completion_tokens"], record["cached_tokens"]) == (2, 3, 1)
    assert record["weight_version"] == "7"
    assert record["timing"] == {"latency_s": 0.25}


def test_without_a_threshold_there_are_no_sets(sidecar, engine):
    for off in (None, 0):
        (record,) = sidecar.rollouts("ab", top_logprobs_p=off).json()["rollouts"]
        assert record["candidates"] is None
    assert all("top_logprobs_p" not in body for body in engine.bodies)


def test_thresholds_and_parameters_of_each_prompt(sidecar, engine):
    answer = sidecar.rollouts(
        ["a", "bc"], sampling_params=[{"n": 1}, {"n": 2, "top_k": 5}], top_logprobs_p=[None, 0.5]
    )

    assert [r["candidates"] is None for r in answer.json()["rollouts"]] == [True, False, False]
    second = next(body for body in engine.bodies if body["text"] == "bc")
    assert (second["top_logprobs_p"], second["sampling_params"]["top_k"]) == (0.5, 5)


def test_a_stream_is_a_line_per_sample_and_an_end_mark(sidecar):
    answer = sidecar.rollouts(["a", "b"], sampling_params={"n": 2}, stream=True)

    assert answer.headers["content-type"] == "application/x-ndjson"
    *records, end = [json.loads(line) for line in answer.text.splitlines()]
    assert end == {"done": True, "rollouts": 4}
    assert sorted((r["prompt_index"], r["sample_index"]) for r in records) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(from_record(Rollout, record).candidates is not None for record in records)


def test_a_stream_sends_each_sample_as_it_finishes(sidecar, engine):
    fields = {"prompts": "a", "sampling_params": {"n": 2, "fault": "hang-second"}, "stream": True}
    with sidecar.http.stream("POST", "/rollouts", json=fields) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines))["sample_index"] == 0  # the second has not finished
        engine.is_released = True
        assert json.loads(next(lines))["sample_index"] == 1
        assert json.loads(next(lines)) == {"done": True, "rollouts": 2}
        assert list(lines) == []


async def test_the_client_finds_out_that_it_talks_to_a_sidecar(sidecar):
    async with AsyncRolloutClient(sidecar.url) as client:
        rollouts = await client.generate(["a", "bc"], {"n": 2}, top_logprobs_p=0.9)
        assert [r.text for r in rollouts] == ["xxx"] * 4
        assert (await client.server_info())["service"] == "sglang-topp"


def test_info_names_service_engine_limits_and_patch(start, engine):
    sidecar = start(engine.url, max_samples=12)

    info = sidecar.http.get("/info").json()
    assert (info["service"], info["ready"], info["reason"]) == ("sglang-topp", True, "")
    sizes = {"vocab_size": 512, "context_length": 4096, "max_token_chars": 8, "max_text_chars": 4096 * 8}
    assert info["engine"] == {
        "model_path": "fake-model",
        "sglang_version": "0.5.23",
        "weight_version": "7",
        "model": sizes,
    }
    assert info["patch"] == {"active": True, "version": "0.1.0", "seams": {"a": "holds"}, "problems": []}
    assert info["limits"]["max_samples"] == 12


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_info_has_the_weight_version_of_now(start, engine, path):
    engine.model_info_path = path
    sidecar = start(engine.url)
    for version, shown in (("8", "8"), (9, "9"), (None, None)):
        engine.weight_version = version
        assert sidecar.http.get("/info").json()["engine"]["weight_version"] == shown


def test_unknown_paths_and_methods_are_errors_of_the_same_shape(sidecar):
    wrong = [("GET", "/nowhere", 404), ("GET", "/rollouts", 405), ("PUT", "/info", 405)]
    for method, path, status in [*wrong, ("POST", "/scores/", 404), ("POST", "/rollouts%0A", 404)]:
        answer = sidecar.http.request(method, path)

        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "BadRequestError"
        assert path.removesuffix("%0A") in answer.json()["error"]["message"]


def test_openapi_shows_the_request_and_the_records(sidecar):
    page = sidecar.http.get("/openapi.json").json()

    operation = page["paths"]["/rollouts"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == {
        "prompts",
        "rollouts",
        "sampling_params",
        "top_logprobs_p",
        "top_logprobs_source",
        "on_abort",
        "resumed_tokens",
        "return_fields",
        "fields_start",
        "stream",
        "request_id",
        "timeout_s",
    }
    fields = page["components"]["schemas"]["RolloutRecord"]["properties"]
    assert set(fields) == set(sidecar.rollouts("ab").json()["rollouts"][0])
    assert fields["cached_tokens"]["description"].startswith("How many prompt tokens came from")
    assert fields["logprobs"]["description"].endswith("In JSON, base64 of little-endian float32.")
    assert all(field["description"] for field in fields.values())
    order = page["paths"]["/abort"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(order["properties"]) == {"request_id", "all"}
    assert set(operation["responses"]["200"]["content"]) == {"application/json", NDJSON, MEDIA_TYPES[Rollout]}


def test_many_requests_at_once(sidecar, eventually):
    with RolloutClient(sidecar.url) as client:
        rollouts = client.generate([[t + 1] for t in range(100)], {"n": 2}, top_logprobs_p=0.9)

    assert [r.prompt_ids.tolist() for r in rollouts] == [[t + 1] for t in range(100) for _ in range(2)]
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 0)


def test_megabytes_of_sets_come_back_whole(sidecar):
    answer = sidecar.rollouts("a", sampling_params={"set_size": 2000, "repeat": 100})

    (record,) = answer.json()["rollouts"]
    assert from_record(Rollout, record).candidates.sizes.tolist() == [2000] * 300
