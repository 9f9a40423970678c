"""`POST /scores` on the real sidecar. A sequence's last token chooses the fake engine's fault."""

import base64
import json

import numpy as np
import pytest

from sglang_topp import formats
from sglang_topp_client import Rollout, RolloutClient, Score
from sglang_topp_client.wire.records import MEDIA_TYPES, from_frame, from_record
from sglang_topp_server.api.sample_endpoint import NDJSON
from sglang_topp_server.openapi import ScoreRecord
from sglang_topp_server.requests import ScoresBody

HANG, NO_SETS, WRONG_SETS, GIVE_UP, LARGE = 500, 501, 502, 503, 504


def records_of(answer, stream):
    """Return the records, after checking the rest of the answer."""
    assert answer.status_code == 200, answer.text
    if not stream:
        assert answer.headers["content-type"] == "application/json"
        return answer.json()["scores"]
    assert answer.headers["content-type"] == NDJSON
    *records, end = [json.loads(line) for line in answer.text.splitlines()]
    assert end == {"done": True, "scores": len(records)}
    return sorted(records, key=lambda record: record["sequence_index"])


def test_a_record_for_each_sequence(sidecar, engine, stream):
    records = records_of(sidecar.scores([[5, 6, 7], [8, 9]], start=[2, None], stream=stream), stream)
    for record in records:
        ScoreRecord.model_validate(record)
    first, second = records
    assert (first["sequence_index"], first["token_ids"], first["start"]) == (0, [5, 6, 7], 2)
    assert (second["sequence_index"], second["token_ids"], second["start"]) == (1, [8, 9], 1)
    assert first["num_tokens"] == 3
    assert np.frombuffer(base64.b64decode(first["logprobs"]), "<f4") == pytest.approx(np.log(0.4))
    assert formats.unpack_base64(first["candidates"]).sampled_ids.tolist() == [7]
    # The engine got no request for these sequences.
    assert [body["logprob_start_len"] for body in engine.bodies] == [1, 0]
    assert {body["sampling_params"]["max_new_tokens"] for body in engine.bodies} == {0}
    assert sidecar.metric("sglang_topp_scores_total") == 2
    assert sidecar.metric("sglang_topp_samples_total") == 0
    assert sidecar.metric("sglang_topp_tokens_total", kind="prompt") == 5
    assert sidecar.metric("sglang_topp_tokens_total", kind="scored") == 2
    assert sidecar.metric("sglang_topp_tokens_total", kind="cached") == 2


def test_without_a_threshold_log_probs_are_returned_alone(sidecar, engine, stream):
    (record,) = records_of(sidecar.scores("abc", top_logprobs_p=None, stream=stream), stream)
    assert record["candidates"] is None
    assert engine.bodies[0]["top_logprobs_p"] < 1e-6


def test_frames_hold_the_same_scores_as_lines(sidecar):
    body = {"sequences": [[5, 6, 7]], "top_logprobs_p": 0.5, "stream": True}
    answer = sidecar.http.post(
        "/scores", json=body, headers={"Accept": f"{MEDIA_TYPES[Score]}, {NDJSON};q=0.5"}
    )
    assert answer.headers["content-type"] == MEDIA_TYPES[Score]
    length = int.from_bytes(answer.content[:8], "little")
    framed = from_frame(Score, answer.content[8 : 8 + length], max_bytes=1 << 20)
    assert json.loads(answer.content[8 + length + 8 :]) == {"done": True, "scores": 1}
    (line,) = records_of(sidecar.http.post("/scores", json=body), True)
    read = from_record(Score, line)
    np.testing.assert_array_equal(framed.token_ids, read.token_ids)
    np.testing.assert_array_equal(framed.logprobs, read.logprobs)
    np.testing.assert_array_equal(framed.candidates.token_ids, read.candidates.token_ids)


def test_frames_of_rollouts_are_not_sent_as_scores(sidecar):
    body = {"sequences": [[5, 6, 7]], "stream": True}
    answer = sidecar.http.post("/scores", json=body, headers={"Accept": MEDIA_TYPES[Rollout]})
    assert answer.headers["content-type"] == NDJSON


def test_the_client_gets_the_same_from_both(sidecar, engine):
    with RolloutClient(sidecar.url) as through, RolloutClient(engine.url, kind="sglang") as straight:
        for one, other in zip(
            through.score([[5, 6, 7], [8, 9]], top_logprobs_p=0.5, request_id="mine"),
            straight.score([[5, 6, 7], [8, 9]], top_logprobs_p=0.5),
            strict=True,
        ):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
            np.testing.assert_array_equal(one.candidates.token_ids, other.candidates.token_ids)
            assert one.request_id.startswith("mine-")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "sequences: missing, but required"),
        ({"prompts": "a", "sequences": "a"}, "prompts: no such field, expected one of"),
        ({"sequences": "a", "top_logprobs_source": "sampler"}, "top_logprobs_source: no such field"),
        ({"sequences": "a", "sampling_params": {}}, "sampling_params: no such field"),
        ({"sequences": []}, "sequences: got none"),
        ({"sequences": [[5], [600]]}, "sequences[1]: got token id 600 at position 0, expected 0 to 511"),
        ({"sequences": [5, 600]}, "sequences: got token id 600 at position 1"),
        ({"sequences": [[5, 6]], "start": 3}, "start: got 3, expected at most 2"),
        ({"sequences": "a", "top_logprobs_p": 1.5}, "top_logprobs_p: got 1.5"),
        ({"sequences": "a", "timeout_s": 0}, "timeout_s"),
        ({"sequences": "a", "stream": 1}, "stream"),
        ({"sequences": "a", "request_id": "a\n"}, "request_id: got the character"),
    ],
)
def test_a_wrong_field_is_400_and_reaches_no_engine(sidecar, engine, body, words):
    answer = sidecar.http.post("/scores", json=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert engine.bodies == []


def test_garbage_is_400(sidecar):
    for body in (b"", b"{", b"[]", b"5", b"[" * 100_000):
        assert sidecar.http.post("/scores", content=body).status_code == 400


def test_too_many_sequences_or_bytes_are_413(engine, start):
    sidecar = start(engine.url, max_samples=2, max_body_bytes=100_000)
    for sequences, words in (
        (["a"] * 3, "sequences: got 3, expected at most 2"),
        (["a" * 40_000], "sequences[0]: got a text of 40000 characters"),
        ([[5] * 60_000], "the body: got"),
    ):
        answer = sidecar.scores(sequences)
        assert answer.status_code == 413
        assert words in answer.json()["error"]["message"]
    assert engine.bodies == []
    # A flat list of ids is one sequence.
    assert sidecar.scores([5, 6, 7, 8]).status_code == 200


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        (WRONG_SETS, 502, "SampledTokenMissingError"),
        (GIVE_UP, 502, "AbortedError"),
        (NO_SETS, 503, "MissingCandidateSetsError"),
    ],
)
def test_a_sequence_that_fails(sidecar, stream, fault, status, kind):
    answer = sidecar.scores([[5, fault]], stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind


def test_failures_in_a_stream_are_messages_of_their_sequence(sidecar, engine, eventually):
    sequences = [[5, 6], [5, GIVE_UP], [7, HANG]]
    connection = sidecar.send("/scores", sequences=sequences, top_logprobs_p=0.5, stream=True)
    eventually(lambda: sidecar.metric("sglang_topp_errors_total", status="502", type="AbortedError") == 1)
    engine.is_released = True
    raw = b""
    while b'"done":true' not in raw:
        raw += connection.recv(1 << 16)
    connection.close()
    messages = [json.loads(line) for line in raw.splitlines() if line.startswith(b"{")]
    failures = [message for message in messages if "error" in message]
    assert [(one["sequence_index"], one["error"]["type"]) for one in failures] == [(1, "AbortedError")]
    assert sorted(one["sequence_index"] for one in messages if "num_tokens" in one) == [0, 2]
    assert messages[-1] == {"done": True, "scores": 2}
    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="partial") == 1)


def test_a_start_behind_a_text_is_its_failure(sidecar, stream):
    answer = sidecar.scores(["abc"], start=4, stream=stream)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "start: got 4, expected at most 3, the number of the sequence's tokens"
    )


def test_hanging_up_aborts_in_the_engine(sidecar, engine, stream, eventually):
    connection = sidecar.send("/scores", sequences=[[5, HANG], [6, HANG]], stream=stream)
    eventually(lambda: engine.running == 2)
    connection.close()
    eventually(lambda: engine.running == 0 and len(engine.hung_up) == 2)
    eventually(lambda: sidecar.metric("sglang_topp_requests_total", outcome="aborted") == 1)


def test_a_time_limit_aborts(sidecar, engine, stream, eventually):
    answer = sidecar.scores([[5, HANG]], timeout_s=0.5, stream=stream)
    assert answer.status_code == 504
    assert answer.json()["error"]["message"] == "timeout_s: 0.5 s passed before every sequence finished"
    eventually(lambda: engine.running == 0)


def test_scores_and_rollouts_share_the_places_in_flight(engine, start, eventually):
    sidecar = start(engine.url, max_in_flight=1)
    connection = sidecar.send("/scores", sequences=[[5, HANG]])
    eventually(lambda: engine.running == 1)
    assert sidecar.rollouts("a").status_code == 429
    assert sidecar.scores("a").status_code == 429
    engine.is_released = True
    assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    connection.close()
    eventually(lambda: sidecar.metric("sglang_topp_in_flight") == 0)


def test_scores_that_wait_for_their_caller_are_limited(engine, start, eventually):
    sidecar = start(engine.url, max_held_bytes=1 << 20)
    answer = sidecar.scores([[5] * 20 + [LARGE]])
    assert answer.status_code == 413
    assert "bytes" in answer.json()["error"]["message"]
    eventually(lambda: sidecar.metric("sglang_topp_held_bytes") == 0)
    assert sidecar.scores([[5, 6]]).status_code == 200


def test_scores_need_the_key(engine, start):
    sidecar = start(engine.url, api_key="secret")
    assert sidecar.scores("a").status_code == 401
    with RolloutClient(sidecar.url, api_key="secret") as client:
        assert len(client.score([[5, 6]])) == 1


def test_openapi_shows_the_request_and_the_records(sidecar):
    page = sidecar.http.get("/openapi.json").json()
    operation = page["paths"]["/scores"]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(ScoresBody.__struct_fields__)
    assert body["required"] == ["sequences"]
    assert set(operation["responses"]["200"]["content"]) == {"application/json", NDJSON, MEDIA_TYPES[Score]}
    (made,) = sidecar.scores([[5, 6]]).json()["scores"]
    assert set(page["components"]["schemas"]["ScoreRecord"]["properties"]) == set(made)
