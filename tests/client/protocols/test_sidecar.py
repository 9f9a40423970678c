"""Requests to the sidecar's `/rollouts` and `/scores`, and its answers, as lines and as frames."""

import json
from dataclasses import replace

import pytest

from sglang_topp import errors
from sglang_topp_client.protocols.sidecar import SidecarExchange
from sglang_topp_client.requests import SampleRequest, plan, plan_scores
from sglang_topp_client.wire.error_json import error_to_json
from sglang_topp_client.wire.records import to_frame, to_record

OPTIONS = {"request_id": "mine", "timeout_s": 9.0, "max_bytes": 1 << 20}


def rollouts(*arguments, wanted=None):
    (wanted,) = [wanted] if wanted else plan(*(arguments or ([[5]], {"n": 2}, 0.9)))
    return SidecarExchange(wanted, **OPTIONS)


def scores(*arguments, wanted=None):
    (wanted,) = [wanted] if wanted else plan_scores(*(arguments or ([[7, 8, 9]], 0.5, 2)))
    return SidecarExchange(wanted, **OPTIONS)


def line(record):
    return json.dumps(record).encode()


@pytest.fixture
def score(fakes):
    """Return the answer to `scores()`."""
    return fakes.score([7, 8, 9], 2)


# -- requests --------------------------------------------------------------------------------------


def test_the_body_of_rollouts():
    body = rollouts().body()
    assert body.pop("request_id").startswith("mine-")
    assert body == {
        "prompts": [[5]],
        "sampling_params": {"n": 2},
        "top_logprobs_p": 0.9,
        "timeout_s": 9.0,
        "stream": True,
    }


def test_the_body_of_scores():
    body = scores().body()
    assert body.pop("request_id").startswith("mine-")
    assert body == {
        "sequences": [[7, 8, 9]],
        "start": [2],
        "top_logprobs_p": 0.5,
        "timeout_s": 9.0,
        "stream": True,
    }


def test_the_sampler_source_is_sent_if_requested():
    assert rollouts("a", None, None, "sampler").body()["top_logprobs_source"] == "sampler"
    # Sidecars of 0.1.0 refuse a field that they do not know.
    assert "top_logprobs_source" not in rollouts("a", None, 0.9, "distribution").body()


# -- answers ---------------------------------------------------------------------------------------


def test_sets_of_another_source_are_an_error(fakes):
    record = to_record(fakes.sample([5], 0))
    one = rollouts([[5]], None, None, "sampler")
    with pytest.raises(errors.WireError, match="got 'distribution', expected 'sampler', as requested"):
        one.read(line(record))
    ((_, rollout),) = one.read(line(record | {"top_logprobs_source": "sampler"}))
    assert rollout.top_logprobs_source == "sampler"


@pytest.mark.parametrize("encode", [lambda made: line(to_record(made)), to_frame])
def test_samples_get_the_callers_indices(fakes, encode):
    one = rollouts(wanted=SampleRequest(40, [5], {}, (1, 7), 0.9, "distribution"))
    assert one.body()["sampling_params"] == {"n": 2}
    assert not one.has_begun
    results = [one.read(encode(fakes.sample([5], index)))[0] for index in (1, 0)]
    assert [(at, r.prompt_index, r.sample_index) for at, r in results] == [(7, 40, 7), (1, 40, 1)]
    assert one.has_begun
    assert one.read(b"") == []
    assert one.read(line({"done": True, "rollouts": 2})) == []
    assert one.complete


@pytest.mark.parametrize("encode", [lambda made: line(to_record(made)), to_frame])
def test_scores_get_the_callers_index(score, encode):
    (wanted,) = plan_scores([[7, 8, 9]], 0.5, 2)
    one = scores(wanted=replace(wanted, prompt_index=40))
    ((at, result),) = one.read(encode(score))
    assert (at, result.sequence_index) == (0, 40)
    assert one.read(line({"done": True, "scores": 1})) == []
    assert one.complete


def test_unrequested_sets_of_a_score_are_dropped(score):
    ((_, result),) = scores([[7, 8, 9]], None, 2).read(line(to_record(score)))
    assert result.candidates is None


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"prompt_index": 1}, errors.WireError, "prompt_index: got 1"),
        ({"sample_index": 2}, errors.WireError, "sample_index: got 2, expected an unfinished one"),
        ({"prompt_ids": [9], "prompt_tokens": 1}, errors.WireError, "got other ids than those of the prompt"),
        ({"candidates": None}, errors.MissingCandidateSetsError, "though they were asked for"),
        ({"output_ids": []}, errors.WireError, "completion_tokens"),
        ({"finish_reason": "abort"}, errors.RolloutError, "abort"),
    ],
)
def test_a_sample_that_was_not_asked_for_is_an_error(fakes, changes, kind, words):
    record = to_record(fakes.sample([5], 0))
    assert len(rollouts().read(line(record))) == 1
    with pytest.raises(kind, match=words):
        rollouts().read(line(record | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"candidates": None}, errors.MissingCandidateSetsError, "though they were asked for"),
        ({"finish_reason": "abort"}, errors.RolloutError, "abort"),
    ],
)
def test_binary_samples_are_checked_like_json_samples(fakes, changes, kind, words):
    with pytest.raises(kind, match=words):
        rollouts().read(to_frame(replace(fakes.sample([5], 0), **changes)))
    with pytest.raises(errors.WireError, match="prompt_ids: got other ids than those of the prompt"):
        rollouts().read(to_frame(fakes.sample([6], 0)))


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"sequence_index": 1}, errors.WireError, "sequence_index: got 1"),
        ({"start": 1}, errors.WireError, "logprobs"),
        ({"candidates": None}, errors.MissingCandidateSetsError, "though they were asked for"),
    ],
)
def test_a_score_that_was_not_asked_for_is_an_error(score, changes, kind, words):
    with pytest.raises(kind, match=words):
        scores().read(line(to_record(score) | changes))


def test_a_score_of_another_sequence_start_or_threshold_is_an_error(fakes, score):
    for exchange, words in (
        (scores([[7, 8, 6]], 0.5, 2), "token_ids: got other ids than those of the sequence"),
        (scores([[7, 8, 9]], 0.5, 1), "start: got 2, expected 1"),
        (scores([[7, 8, 9]], 1.0, 2), "expected at least 1, the p that was asked for"),
    ):
        with pytest.raises(errors.WireError, match=words):
            exchange.read(line(to_record(score)))


@pytest.mark.parametrize("encode", [lambda made: line(to_record(made)), to_frame])
def test_a_second_copy_is_an_error(fakes, score, encode):
    one = rollouts()
    one.read(encode(fakes.sample([5], 0)))
    with pytest.raises(errors.WireError, match="expected an unfinished one of"):
        one.read(encode(fakes.sample([5], 0)))
    one = scores()
    one.read(to_frame(score))
    with pytest.raises(errors.WireError, match="expected one score"):
        one.read(to_frame(score))


@pytest.mark.parametrize("count", [0, 2, 3, None])
@pytest.mark.parametrize("arrived", [0, 1])
def test_the_last_messages_count_must_match(fakes, count, arrived):
    one = rollouts()
    for index in range(arrived):
        one.read(line(to_record(fakes.sample([5], index))))
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
