"""Which form of a stream a caller gets, and that all hold the same."""

import json

import numpy as np
import pytest
from starlette.datastructures import Headers

from sglang_topp_client import RolloutClient
from sglang_topp_client.packed_record import MEDIA_TYPE, from_packed
from sglang_topp_client.record import from_record, to_record
from sglang_topp_server.forms import NDJSON, accepted_form

FRAMES, ROUNDED = MEDIA_TYPE, f"{MEDIA_TYPE};logprob-bits=16"


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (None, NDJSON),
        ("", NDJSON),
        ("*/*", NDJSON),
        ("application/*, text/html;q=0.9", NDJSON),
        (NDJSON, NDJSON),
        (FRAMES, FRAMES),
        (FRAMES.upper(), FRAMES),
        (f"{FRAMES}, {NDJSON};q=0.5", FRAMES),
        (f"{NDJSON}, {FRAMES}", FRAMES),
        (f"{NDJSON}, {FRAMES};q=0.9", NDJSON),
        (f"*/*;q=0.1,{FRAMES} ; q=0.5", FRAMES),
        (f"{FRAMES};q=0", NDJSON),
        (f"{FRAMES};q=x", NDJSON),
        (f"{FRAMES};q=nan", NDJSON),
        (f"{FRAMES};q=1e999", NDJSON),
        (f"{FRAMES};q=-1", NDJSON),
        (ROUNDED, ROUNDED),
        (f'{FRAMES} ; Logprob-Bits = "16" ', ROUNDED),
        (f"{FRAMES};logprob-bits=32", FRAMES),
        (f"{FRAMES};logprob-bits=8", NDJSON),
        (f"{FRAMES};q=0.5, {ROUNDED}", ROUNDED),
        (f"{FRAMES}, {ROUNDED};q=0.5", FRAMES),
        (f"{FRAMES}2", NDJSON),
        (";;,=,;q=,q=1;", NDJSON),
    ],
)
def test_what_is_accepted(accept, form):
    assert accepted_form(Headers({} if accept is None else {"accept": accept}), MEDIA_TYPE).media_type == form


def test_several_headers_are_one():
    raw = [(b"accept", NDJSON.encode() + b";q=0.5"), (b"accept", FRAMES.encode())]
    assert accepted_form(Headers(raw=raw), MEDIA_TYPE).media_type == FRAMES


def messages_of(raw):
    """The frames in an answer."""
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
    """A record without its random id and its time."""
    return {name: value for name, value in record.items() if name not in ("request_id", "timing")}


def test_frames_hold_what_lines_hold(sidecar):
    in_lines, in_frames, rounded = (ask(sidecar, accept) for accept in (None, FRAMES, ROUNDED))

    assert [answer.headers["content-type"] for answer in (in_lines, in_frames, rounded)] == [
        NDJSON,
        FRAMES,
        ROUNDED,
    ]
    *lines, end = map(json.loads, in_lines.text.splitlines())
    *frames, framed_end = messages_of(in_frames.content)
    *rounded_frames, rounded_end = messages_of(rounded.content)
    assert end == json.loads(framed_end) == json.loads(rounded_end) == {"done": True, "rollouts": 4}

    def key(record):
        return record["prompt_index"], record["sample_index"]

    records = sorted((to_record(from_packed(frame)) for frame in frames), key=key)
    assert [*map(without_chance, records)] == [*map(without_chance, sorted(lines, key=key))]
    for frame in rounded_frames:
        rollout = from_packed(frame, logprob_bits=16)
        (exact,) = [record for record in lines if key(record) == (rollout.prompt_index, rollout.sample_index)]
        sets = from_record(exact).candidates
        assert np.array_equal(rollout.candidates.offsets, sets.offsets)
        assert np.abs(rollout.candidates.logprob_sum - sets.logprob_sum).max() < 2**-10
    assert len(rounded.content) < len(in_frames.content) < len(in_lines.content)


def test_who_does_not_ask_gets_the_lines_of_before(sidecar):
    answers = [ask(sidecar, accept, prompts="a", sampling_params={}) for accept in (None, "*/*", "text/html")]
    for answer in answers:
        assert sorted(name for name in answer.headers if name != "date") == [
            "content-type",
            "server",
            "transfer-encoding",
        ]
        record, end = answer.content.splitlines(keepends=True)
        # As `test_pieces` pins them, the sets last.
        assert record.endswith(b'"}\n')
        assert [*json.loads(record)][-1] == "candidates"
        assert end == b'{"done":true,"rollouts":1}\n'


def test_one_answer_is_json_whatever_is_accepted(sidecar):
    answer = ask(sidecar, FRAMES, stream=False)
    assert answer.headers["content-type"] == "application/json"
    assert len(answer.json()["rollouts"]) == 4


def test_errors_come_in_frames_once_they_have_begun(sidecar):
    answer = ask(
        sidecar, FRAMES, prompts="a", sampling_params={"n": 2, "fault": "hang-second"}, timeout_s=1.5
    )
    sample, error = messages_of(answer.content)
    assert from_packed(sample).sample_index == 0
    assert json.loads(error)["error"]["type"] == "RequestTimeoutError"
    # Before, they are the answer itself.
    answer = ask(sidecar, FRAMES, top_logprobs_p=1.5)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize("bits", [32, 16])
def test_the_client_gets_frames(sidecar, bits):
    exact = from_record(json.loads(ask(sidecar, None).text.splitlines()[0]))
    with RolloutClient(sidecar.url, logprob_bits=bits) as client:
        rollouts = client.generate(["a", "bc"], {"n": 2, "set_size": 300}, top_logprobs_p=0.9)
    rollout = rollouts[2 * exact.prompt_index + exact.sample_index]
    assert np.array_equal(rollout.logprobs, exact.logprobs)
    assert (rollout.candidates == exact.candidates) is (bits == 32)
