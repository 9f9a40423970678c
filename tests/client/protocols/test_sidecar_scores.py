"""Requests to the sidecar's `/scores`, and its answers, as lines and as frames."""

import json
from dataclasses import replace

import pytest

from sglang_topp import errors
from sglang_topp_client.codecs.score_codecs import score_to_bytes, score_to_json
from sglang_topp_client.protocols.sidecar_scores import ScoresExchange
from sglang_topp_client.requests.plan_score import plan_scores


def exchange(wanted=None):
    wanted = wanted or plan_scores([[5, 6], [7, 8, 9]], 0.5, [1, 2])
    return ScoresExchange(wanted, request_id="mine", timeout_s=9.0, max_bytes=1 << 20)


def line(record):
    return json.dumps(record).encode()


@pytest.fixture
def made(fakes):
    """Return the answer to `exchange()`."""
    return [fakes.score([5, 6]), replace(fakes.score([7, 8, 9], 2), sequence_index=1)]


def test_the_request_body():
    body = exchange().body()
    assert body.pop("request_id").startswith("mine-")
    assert body == {
        "sequences": [[5, 6], [7, 8, 9]],
        "start": [1, 2],
        "top_logprobs_p": 0.5,
        "timeout_s": 9.0,
        "stream": True,
    }
    assert exchange(plan_scores(["a", "b"], [None, 0.5])).body()["top_logprobs_p"] == [None, 0.5]


def test_frames_and_lines_alike_under_the_callers_indices(made):
    wanted = [
        replace(one, prompt_index=at)
        for one, at in zip(plan_scores([[5, 6], [7, 8, 9]], 0.5, [1, 2]), [40, 3], strict=True)
    ]
    one = exchange(wanted)
    (second,) = one.read(score_to_bytes(made[1]))
    (first,) = one.read(line(score_to_json(made[0])))
    assert (first.sequence_index, second.sequence_index) == (40, 3)
    assert one.read(line({"done": True, "scores": 2})) == []
    assert one.complete


def test_unrequested_sets_are_dropped(made):
    (score,) = exchange(plan_scores([[5, 6]])).read(line(score_to_json(made[0])))
    assert score.candidates is None


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"sequence_index": 2}, errors.WireError, "sequence_index"),
        ({"sequence_index": 1}, errors.WireError, "start: got 1 of sequence 1, expected 2"),
        ({"candidates": None}, errors.MissingCandidateSetsError, "though they were asked for"),
    ],
)
def test_an_answer_to_another_request_is_an_error(made, changes, kind, words):
    with pytest.raises(kind, match=words):
        exchange().read(line(score_to_json(made[0]) | changes))


def test_another_sequence_is_an_error(fakes):
    with pytest.raises(errors.WireError, match="token_ids: got other ids than those of sequence 0"):
        exchange().read(line(score_to_json(fakes.score([5, 7]))))


def test_sets_of_a_smaller_threshold_are_an_error(made):
    one = exchange(plan_scores([[5, 6]], 1.0))
    with pytest.raises(errors.WireError, match="expected at least 1, the p that was asked for"):
        one.read(line(score_to_json(made[0])))


def test_a_second_copy_of_a_score_is_an_error(made):
    one = exchange()
    one.read(line(score_to_json(made[0])))
    with pytest.raises(errors.WireError, match="got 0, expected an unfinished one of"):
        one.read(line(score_to_json(made[0])))


@pytest.mark.parametrize("end", [{"done": True, "scores": 1}, {"done": True, "rollouts": 2}, {"done": True}])
def test_a_last_message_with_a_wrong_count_is_an_error(made, end):
    one = exchange()
    for score in made:
        one.read(line(score_to_json(score)))
    with pytest.raises(errors.WireError, match="scores: the server counts"):
        one.read(line(end))


def test_a_last_message_before_the_last_score_is_an_error(made):
    one = exchange()
    one.read(line(score_to_json(made[0])))
    with pytest.raises(errors.WireError, match="got 1, expected 2"):
        one.read(line({"done": True, "scores": 1}))
    assert not one.complete


def test_a_reported_failure_is_raised():
    failure = {"error": {"type": "BadRequestError", "message": "start: got 9", "status": 400}}
    with pytest.raises(errors.BadRequestError, match="start: got 9"):
        exchange().read(line(failure | {"sequence_index": 1}))


@pytest.mark.parametrize("garbage", [b"[]", b"5", b"{", b"TPSC", b"TPCR" + bytes(40), b"\xff"])
def test_garbage_is_an_error(garbage):
    with pytest.raises(errors.WireError):
        exchange().read(garbage)
