"""The encoding that a caller's `Accept` selects. All encodings have the same content."""

import json

import numpy as np
import pytest
from starlette.datastructures import Headers

from sglang_topp_client import Rollout, RolloutClient
from sglang_topp_client.wire.records import MEDIA_TYPES, from_frame, from_record, to_record
from sglang_topp_server.api.sample_endpoint import NDJSON, accepted_encoding

FRAMES = MEDIA_TYPES[Rollout]


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ([], NDJSON),
        ([""], NDJSON),
        (["*/*"], NDJSON),
        (["application/*, text/html;q=0.9"], NDJSON),
        ([NDJSON], NDJSON),
        ([FRAMES], FRAMES),
        ([FRAMES.upper()], FRAMES),
        ([f"{NDJSON}, {FRAMES}"], FRAMES),
        ([NDJSON, FRAMES], FRAMES),
        ([f"*/*;q=0.1,{FRAMES} ; q=0.5"], FRAMES),
        ([f"{FRAMES};charset=binary"], FRAMES),
        ([f"{FRAMES}2"], NDJSON),
        ([";;,=,;q=,q=1;"], NDJSON),
    ],
)
def test_the_accept_header_chooses_the_encoding(accept, form):
    headers = Headers(raw=[(b"accept", one.encode()) for one in accept])
    assert accepted_encoding(headers, FRAMES).media_type == form


def messages_of(raw):
    """Return the frames in an answer."""
    messages = []
    while raw:
        length = int.from_bytes(raw[:8], "little")
        messages.append(raw[8 : 8 + length])
        assert len(messages[-1]) == length
        raw = raw[8 + length :]
    return messages


def ask(sidecar, accept, **fields):
    body = {"prompts": ["a", "bc"], "sampling_params": {"n": 2, "set_size": 300}, "top_logprobs_p": 0.9}
    return sidecar.http.post(
        "/rollouts",
        json=body | {"stream": True} | fields,
        headers={} if accept is None else {"Accept": accept},
    )


def without_chance(record):
    """Return a record without its random id, its random routing key, and its time."""
    by_chance = ("request_id", "routing_key", "timing")
    return {name: value for name, value in record.items() if name not in by_chance}


def test_frames_hold_what_lines_hold(sidecar):
    in_lines, in_frames = (ask(sidecar, accept) for accept in (None, FRAMES))

    assert [answer.headers["content-type"] for answer in (in_lines, in_frames)] == [NDJSON, FRAMES]
    *lines, end = map(json.loads, in_lines.text.splitlines())
    *frames, framed_end = messages_of(in_frames.content)
    assert end == json.loads(framed_end) == {"done": True, "rollouts": 4}

    def key(record):
        return record["prompt_index"], record["sample_index"]

    records = sorted((to_record(from_frame(Rollout, frame, max_bytes=1 << 20)) for frame in frames), key=key)
    assert [*map(without_chance, records)] == [*map(without_chance, sorted(lines, key=key))]
    assert len(in_frames.content) < len(in_lines.content)


def test_without_an_accept_header_lines_are_sent(sidecar):
    answers = [ask(sidecar, accept, prompts="a", sampling_params={}) for accept in (None, "*/*", "text/html")]
    for answer in answers:
        assert sorted(name for name in answer.headers if name != "date") == [
            "content-type",
            "server",
            "transfer-encoding",
        ]
        record, end = answer.content.splitlines(keepends=True)
        assert from_record(Rollout, json.loads(record)).candidates is not None
        assert end == b'{"done":true,"rollouts":1}\n'


def test_one_answer_is_json_whatever_is_accepted(sidecar):
    answer = ask(sidecar, FRAMES, stream=False)
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.json()["rollouts"]) == 4


def test_errors_come_in_frames_once_a_stream_has_begun(sidecar):
    answer = ask(sidecar, FRAMES, prompts="a", sampling_params={"n": 2, "fault": "hang-second"}, timeout_s=6)
    sample, error = messages_of(answer.content)
    assert from_frame(Rollout, sample, max_bytes=1 << 20).sample_index == 0
    assert json.loads(error)["error"]["type"] == "RequestTimeoutError"
    # Before, they are the answer itself.
    answer = ask(sidecar, FRAMES, top_logprobs_p=1.5)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_the_client_gets_frames(sidecar):
    exact = from_record(Rollout, json.loads(ask(sidecar, None).text.splitlines()[0]))
    with RolloutClient(sidecar.url) as client:
        rollouts = client.generate(["a", "bc"], {"n": 2, "set_size": 300}, top_logprobs_p=0.9)
    rollout = rollouts[2 * exact.prompt_index + exact.sample_index]
    assert np.array_equal(rollout.logprobs, exact.logprobs)
    assert rollout.candidates == exact.candidates
