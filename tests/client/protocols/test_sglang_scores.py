"""Requests for scores, as SGLang receives them. Its answers become exact scores, or errors."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp.errors import (
    BadRequestError,
    MissingCandidateSetsError,
    RolloutError,
    SampledTokenMissingError,
    WireError,
)
from sglang_topp_client.protocols.sglang import SglangExchange
from sglang_topp_client.requests import plan_scores

IDS = [5, 6, 7, 8, 9]
VAL, IDX, LENGTHS = (f"input_top_p_logprobs_{part}" for part in ("val_base64", "idx_base64", "lengths"))


def exchange(sequence=IDS, p=0.5, start=2):
    sequences = sequence if isinstance(sequence, str) else [sequence]
    return SglangExchange(*plan_scores(sequences, p, start), request_id="mine")


def read(chunk, **options):
    ((_, score),) = exchange(**options).read(b"data: " + json.dumps(chunk).encode())
    return score


@pytest.fixture
def chunk(fakes):
    """Return the answer to `exchange()`."""
    return fakes.score_chunk(fakes.score(IDS, 2))


def test_the_engine_is_asked_for_no_token():
    body = exchange().body()
    assert body.pop("rid").startswith("mine-")
    assert body.pop("sampling_params").items() >= {"max_new_tokens": 0, "temperature": 1.0, "n": 1}.items()
    assert body == {
        "input_ids": IDS,
        "logprob_start_len": 1,
        "return_logprob": True,
        "return_logprobs_in_base64": True,
        "stream": True,
        "top_logprobs_p": 0.5,
    }
    body = exchange("text", None, 1).body()
    assert (body["text"], body["return_prompt_token_ids"], body["logprob_start_len"]) == ("text", True, 0)
    # Log-probs alone are checked with sets that are as small as possible.
    assert 0 < body["top_logprobs_p"] < 1e-6
    assert body["return_logprobs_in_base64"] is True


def test_an_answer_becomes_a_score(fakes, chunk):
    made, score = fakes.score(IDS, 2), read(chunk)
    assert (score.sequence_index, score.start, score.request_id) == (0, 2, made.request_id)
    assert (score.weight_version, score.cached_tokens) == ("step-7", 1)
    assert (score.token_ids.dtype, score.logprobs.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(score.token_ids, IDS)
    np.testing.assert_array_equal(score.logprobs, made.logprobs)
    np.testing.assert_array_equal(score.candidates.token_ids, made.candidates.token_ids)
    np.testing.assert_array_equal(score.candidates.offsets, made.candidates.offsets)
    np.testing.assert_array_equal(score.candidates.sampled_ids, IDS[2:])


def test_a_request_without_a_threshold_returns_log_probs_only(chunk):
    score = read(chunk, p=None)
    assert score.candidates is None
    assert len(score.logprobs) == 3
    for name in (VAL, IDX, LENGTHS):
        del chunk["meta_info"][name]
    with pytest.raises(MissingCandidateSetsError):
        read(chunk, p=None)


def test_the_tokens_of_a_text_are_those_that_the_engine_saw(fakes):
    score = read(fakes.score_chunk(fakes.score("abc")), sequence="abc", start=1)
    np.testing.assert_array_equal(score.token_ids, list(b"abc"))


def test_the_length_as_start_scores_nothing(fakes):
    score = read(fakes.score_chunk(fakes.score(IDS, 5)), start=5)
    assert len(score.logprobs) == len(score.candidates) == 0


def test_the_last_id_of_the_vocabulary_is_reported_as_0(fakes):
    ids = [5, 6, 511, 7, 511]
    chunk = fakes.score_chunk(fakes.score(ids, 2))
    reported = chunk["meta_info"]["input_token_logprobs"]
    reported[1][1] = reported[3][1] = 0
    np.testing.assert_array_equal(read(chunk, sequence=ids).token_ids, ids)
    # No other id is reported wrongly.
    reported[2][1] = 0
    with pytest.raises(WireError, match="got token 0 at position 1, expected 7, as in the sequence"):
        read(chunk, sequence=ids)


def without(name):
    def change(chunk):
        del chunk["meta_info"][name]

    return change


def with_meta(**fields):
    def change(chunk):
        chunk["meta_info"] |= fields

    return change


def entries(change):
    def changed(chunk):
        change(chunk["meta_info"]["input_token_logprobs"])

    return changed


def lengths(change):
    def changed(chunk):
        change(chunk["meta_info"][LENGTHS])

    return changed


def no_set_at_the_second(chunk):
    made = chunk["meta_info"][LENGTHS]
    made[3], made[2] = made[3] + made[2], 0


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (without("input_token_logprobs"), WireError, "input_token_logprobs: missing"),
        (with_meta(input_token_logprobs=[]), WireError, "expected a first entry without a log-prob"),
        (
            with_meta(input_token_logprobs=[5]),
            WireError,
            r"input_token_logprobs\[0\]: got 5, expected array",
        ),
        (entries(lambda each: each.pop(0)), WireError, "for position 1"),
        (entries(lambda each: each.pop()), WireError, "got 2 entries for 3 sequence_ids"),
        (entries(lambda each: each.append(each[-1])), WireError, "got 4 entries for 3"),
        (entries(lambda each: each.insert(1, each[1])), WireError, "got 4 entries for 3"),
        (entries(lambda each: each[2].__setitem__(1, 99)), WireError, "got token 99 at position 1"),
        (entries(lambda each: each[2].__setitem__(0, None)), WireError, "no log-prob at position 1"),
        (entries(lambda each: each[2].__setitem__(0, -0.5)), WireError, "1 of 3 positions differ"),
        (
            entries(lambda each: each.__setitem__(2, None)),
            WireError,
            r"input_token_logprobs\[2\]: got None, expected array",
        ),
        (
            entries(lambda each: each[2].__setitem__(0, "x")),
            WireError,
            r"input_token_logprobs\[2\]\[0\]: got 'x', expected float . null",
        ),
        (without(VAL), WireError, "missing beside"),
        (lengths(lambda each: each.pop()), WireError, "got 3 positions for 4 tokens"),
        (lengths(lambda each: each.append(-1)), WireError, "got 5 positions for 4 tokens"),
        (no_set_at_the_second, (MissingCandidateSetsError, WireError), "position"),
        (with_meta(top_logprobs_source="sampler"), WireError, "expected 'distribution', as requested"),
        (with_meta(prompt_tokens=4), WireError, "--allow-auto-truncate"),
        (with_meta(completion_tokens=1), WireError, "expected 0, as requested"),
        (with_meta(cached_tokens=None), WireError, "cached_tokens"),
        (with_meta(weight_version=[]), WireError, "weight_version"),
        (with_meta(finish_reason={"type": "abort", "message": "by hand"}), RolloutError, "by hand"),
        (
            with_meta(finish_reason={"type": "abort", "message": "too long", "status_code": 400}),
            BadRequestError,
            "too long",
        ),
    ],
)
def test_an_incomplete_answer_is_an_error(chunk, change, kind, words):
    change(chunk)
    with pytest.raises(kind, match=words):
        read(chunk)


def test_missing_sets_are_an_error(chunk):
    for name in (VAL, IDX, LENGTHS):
        del chunk["meta_info"][name]
    with pytest.raises(MissingCandidateSetsError):
        read(chunk)


def test_a_set_without_its_token_is_an_error(fakes, chunk):
    other = fakes.score_chunk(fakes.score([5, 6, 7, 8, 10], 2))["meta_info"]
    chunk["meta_info"] |= {name: other[name] for name in (VAL, IDX, LENGTHS)}
    with pytest.raises((SampledTokenMissingError, WireError)):
        read(chunk)


def test_sets_from_another_start_are_an_error(fakes):
    """The sets start one position early, where SGLang has no distribution."""
    made = fakes.score(IDS, 1)
    chunk = fakes.score_chunk(made)
    meta = chunk["meta_info"]
    meta[LENGTHS] = meta[LENGTHS][1:]
    meta["input_token_logprobs"] = [[None, 6, None], *meta["input_token_logprobs"][2:]]
    with pytest.raises(WireError, match="got a set before position 2"):
        read(chunk)


def test_sets_of_a_smaller_threshold_are_an_error(chunk):
    with pytest.raises(WireError, match="expected at least 1, the p that was asked for"):
        read(chunk, p=1.0)


def test_a_start_beyond_a_texts_tokens_is_an_error(fakes):
    with pytest.raises(BadRequestError, match="start: got 4, expected at most 3"):
        read(fakes.score_chunk(replace(fakes.score("abc"), start=1)), sequence="abc", start=4)


def test_a_second_answer_is_an_error(chunk):
    one = exchange()
    line = b"data: " + json.dumps(chunk).encode()
    one.read(line)
    with pytest.raises(WireError, match="expected an unfinished one of"):
        one.read(line)
    assert one.read(b"data: [DONE]") == []
    assert one.complete
    with pytest.raises(WireError, match="ended after 0 of 1 samples"):
        exchange().read(b"data: [DONE]")
