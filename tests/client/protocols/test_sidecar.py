"""Requests to the sidecar's `/rollouts` and `/scores`, and its answers, as lines and as frames."""

import json
from dataclasses import replace

import pytest

from sglang_topp import errors
from sglang_topp_client.protocols.sidecar import SidecarExchange
from sglang_topp_client.requests import SampleRequest, build_sample_requests, build_score_requests
from sglang_topp_client.wire.error_json import error_to_json
from sglang_topp_client.wire.records import to_frame, to_record
from tests.client.conftest import sample, score

FIRST, SECOND = (sample([5], index) for index in range(2))
SCORE = score([7, 8, 9], 2)


def exchange(wanted):
    return SidecarExchange(wanted, request_id="mine", timeout_s=9.0, max_bytes=1 << 20)


def rollouts(prompts=((5,),), p=0.9, source=None):
    return exchange(*build_sample_requests(prompts, {"n": 2}, p, source))


def scores(sequence=(7, 8, 9), p=0.5, start=2):
    return exchange(*build_score_requests([list(sequence)], p, start))


def line(record):
    return json.dumps(record).encode()


both_encodings = pytest.mark.parametrize("encode", [lambda made: line(to_record(made)), to_frame])


# -- requests --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (rollouts, {"prompts": [[5]], "sampling_params": {"n": 2}, "top_logprobs_p": 0.9}),
        (scores, {"sequences": [[7, 8, 9]], "start": [2], "top_logprobs_p": 0.5}),
        (
            lambda: exchange(SampleRequest(0, [5, 6, 7], {}, (0,), 0.9, "distribution", "", 2, True)),
            {
                "prompts": [[5, 6, 7]],
                "sampling_params": {"n": 1},
                "top_logprobs_p": 0.9,
                "on_abort": "return",
                "resumed_tokens": [2],
            },
        ),
    ],
)
def test_the_body(make, expected):
    body = make().body()
    assert body.pop("request_id").startswith("mine-")
    assert body == {**expected, "timeout_s": 9.0, "stream": True}


def test_the_sampler_source_is_sent_if_requested():
    assert rollouts("a", None, "sampler").body()["top_logprobs_source"] == "sampler"
    # Sidecars of 0.1.0 refuse a field that they do not know.
    assert "top_logprobs_source" not in rollouts("a", 0.9, "distribution").body()


# -- answers ---------------------------------------------------------------------------------------


def test_sets_of_another_source_are_an_error():
    one = rollouts(p=None, source="sampler")
    with pytest.raises(errors.WireError, match="got 'distribution', expected 'sampler', as requested"):
        one.read(line(to_record(FIRST)))
    ((_, rollout),) = one.read(line(to_record(FIRST) | {"top_logprobs_source": "sampler"}))
    assert rollout.top_logprobs_source == "sampler"


@both_encodings
def test_results_get_the_callers_indices(encode):
    one = exchange(SampleRequest(40, [5], {}, (1, 7), 0.9, "distribution"))
    assert one.body()["sampling_params"] == {"n": 2}
    assert not one.has_begun
    results = [one.read(encode(made))[0] for made in (SECOND, FIRST)]
    assert [(at, r.prompt_index, r.sample_index) for at, r in results] == [(7, 40, 7), (1, 40, 1)]
    assert one.has_begun
    assert one.read(b"") == one.read(line({"done": True, "rollouts": 2})) == []
    assert one.complete

    (wanted,) = build_score_requests([[7, 8, 9]], 0.5, 2)
    one = exchange(replace(wanted, prompt_index=40))
    ((at, result),) = one.read(encode(SCORE))
    assert (at, result.sequence_index) == (0, 40)
    assert one.read(line({"done": True, "scores": 1})) == []
    assert one.complete


def test_unrequested_sets_of_a_score_are_dropped():
    ((_, result),) = scores(p=None).read(line(to_record(SCORE)))
    assert result.candidates is None


@both_encodings
@pytest.mark.parametrize(
    ("one", "result", "kind", "words"),
    [
        (rollouts, replace(FIRST, prompt_index=1), errors.WireError, "prompt_index: got 1"),
        (rollouts, replace(FIRST, sample_index=2), errors.WireError, "got 2, expected an unfinished one"),
        (rollouts, sample([9], 0), errors.WireError, "got other ids than those of the prompt"),
        (rollouts, replace(FIRST, candidates=None), errors.MissingCandidateSetsError, "were asked for"),
        (rollouts, replace(FIRST, finish_reason="abort"), errors.RolloutError, "abort"),
        (scores, replace(SCORE, sequence_index=1), errors.WireError, "sequence_index: got 1"),
        (scores, replace(SCORE, candidates=None), errors.MissingCandidateSetsError, "were asked for"),
        (lambda: scores([7, 8, 6]), SCORE, errors.WireError, "got other ids than those of the sequence"),
        (lambda: scores(start=1), SCORE, errors.WireError, "start: got 2, expected 1"),
        (lambda: scores(p=1.0), SCORE, errors.WireError, "expected at least 1, the p that was asked for"),
    ],
)
def test_a_result_that_was_not_asked_for_is_an_error(one, result, kind, words, encode):
    with pytest.raises(kind, match=words):
        one().read(encode(result))


@both_encodings
@pytest.mark.parametrize(("make", "result"), [(rollouts, FIRST), (scores, SCORE)])
def test_a_second_copy_is_an_error(make, result, encode):
    one = make()
    assert len(one.read(encode(result))) == 1
    with pytest.raises(errors.WireError, match="expected an unfinished one of"):
        one.read(encode(result))


@pytest.mark.parametrize(
    ("arrived", "count"), [(n, count) for n in range(3) for count in (0, 2, 3, None) if (n, count) != (2, 2)]
)
def test_the_last_messages_count_must_match(arrived, count):
    one = rollouts()
    for made in (FIRST, SECOND)[:arrived]:
        one.read(line(to_record(made)))
    with pytest.raises(errors.WireError, match=f"got {arrived}, expected 2"):
        one.read(line({"done": True, "rollouts": count}))
    assert not one.complete


@pytest.mark.parametrize("exchange", [rollouts, scores])
@pytest.mark.parametrize("garbage", [b"{", b"[]", b"5", b"data: {}", b"{}", b"TPSC", b"\xff"])
def test_garbage_is_an_error(exchange, garbage):
    with pytest.raises(errors.WireError):
        exchange().read(garbage)


@pytest.mark.parametrize("exchange", [rollouts, scores])
@pytest.mark.parametrize(
    "error",
    [
        errors.MissingCandidateSetsError("f", "gone"),
        errors.RolloutError("aborted"),
        errors.ServerError("down", status=502),
        errors.RequestTimeoutError("9 s"),
    ],
)
def test_a_reported_error_is_raised_as_itself(exchange, error):
    with pytest.raises(type(error), match=str(error)):
        exchange().read(line(error_to_json(error) | {"prompt_index": 0}))
