import json
from dataclasses import replace

import pytest

from sglang_topp import errors
from sglang_topp_client.score_record import PackedScore, score_to_record
from sglang_topp_client.score_request import plan_scores
from sglang_topp_client.sidecar_scores import ScoresExchange


def exchange(wanted=None, **options):
    wanted = wanted or plan_scores([[5, 6], [7, 8, 9]], 0.5, [1, 2])
    return ScoresExchange(wanted, request_id="mine", timeout_s=9.0, **options)


def line(record):
    return json.dumps(record).encode()


@pytest.fixture
def made(fakes):
    """The answer to `exchange()`."""
    return [fakes.score([5, 6]), replace(fakes.score([7, 8, 9], 2), sequence_index=1)]


def test_the_body():
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
    (second,) = one.read(b"".join(PackedScore(made[1])))
    (first,) = one.read(line(score_to_record(made[0])))
    assert (first.sequence_index, second.sequence_index) == (40, 3)
    assert one.read(line({"done": True, "scores": 2})) == []
    assert one.complete


def test_rounded_sets_are_taken_where_they_were_asked_for(made):
    assert "logprob-bits=16" in exchange(logprob_bits=16).accept
    raw = b"".join(PackedScore(made[0], logprob_bits=16))
    assert exchange(logprob_bits=16).read(raw)
    with pytest.raises(errors.WireError, match="nobody asked for"):
        exchange().read(raw)


def test_sets_that_nobody_asked_for_are_not_handed_on(made):
    (score,) = exchange(plan_scores([[5, 6]])).read(line(score_to_record(made[0])))
    assert score.candidates is None


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"sequence_index": 2}, errors.WireError, "sequence_index"),
        ({"sequence_index": 1}, errors.WireError, "start: got 1 of sequence 1, and 2 was asked for"),
        ({"candidates": None}, errors.MissingCandidateSetsError, "though they were asked for"),
    ],
)
def test_what_was_not_asked_for(made, changes, kind, words):
    with pytest.raises(kind, match=words):
        exchange().read(line(score_to_record(made[0]) | changes))


def test_another_sequence(fakes):
    with pytest.raises(errors.WireError, match="token_ids: are not those of sequence 0"):
        exchange().read(line(score_to_record(fakes.score([5, 7]))))


def test_sets_of_a_smaller_threshold(made):
    one = exchange(plan_scores([[5, 6]], 1.0))
    with pytest.raises(errors.WireError, match="top_logprobs_p 1 was asked for"):
        one.read(line(score_to_record(made[0])))


def test_a_score_twice(made):
    one = exchange()
    one.read(line(score_to_record(made[0])))
    with pytest.raises(errors.WireError, match="got 0 twice"):
        one.read(line(score_to_record(made[0])))


@pytest.mark.parametrize("end", [{"done": True, "scores": 1}, {"done": True, "rollouts": 2}, {"done": True}])
def test_an_end_that_counts_wrong(made, end):
    one = exchange()
    for score in made:
        one.read(line(score_to_record(score)))
    with pytest.raises(errors.WireError, match="scores: the server counts"):
        one.read(line(end))


def test_an_end_before_the_last(made):
    one = exchange()
    one.read(line(score_to_record(made[0])))
    with pytest.raises(errors.WireError, match="1 came, 2 were asked for"):
        one.read(line({"done": True, "scores": 1}))
    assert not one.complete


def test_a_failure_of_one_sequence():
    failure = {"error": {"type": "BadRequestError", "message": "start: got 9", "status": 400}}
    with pytest.raises(errors.BadRequestError, match="start: got 9"):
        exchange().read(line(failure | {"sequence_index": 1}))


@pytest.mark.parametrize("garbage", [b"[]", b"5", b"{", b"TPSC", b"TPCR" + bytes(40), b"\xff"])
def test_garbage(garbage):
    with pytest.raises(errors.WireError):
        exchange().read(garbage)
