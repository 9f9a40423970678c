"""Rollouts and scores in JSON and in frames: every bit comes back, and every wrong field is named."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pybase64
import pytest

from sglang_topp import CandidateSets, errors
from sglang_topp_client import Rollout, Score
from sglang_topp_client.wire.error_json import error_from_json, error_to_json
from sglang_topp_client.wire.frame import encode_frame
from sglang_topp_client.wire.records import check_result, from_frame, from_record, to_frame, to_record
from tests.client.conftest import bits, sample, score, through_a_frame, through_json, without_tokens
from tests.test_errors import MADE as ERRORS

ROLLOUT = sample([5, 6], 1)
SCORE = score([5, 6, 7, 8, 9, 10], 2)
RESULTS = {
    "as it is": ROLLOUT,
    "no sets": replace(ROLLOUT, candidates=None, top_logprobs_source=None, weight_version=None),
    "text": replace(ROLLOUT, text='é"\n 中文 \x00', weight_spans=None, top_logprobs_source="sampler"),
    "no prompt": replace(ROLLOUT, prompt_ids=np.empty(0, np.int32), prompt_index=7, sample_index=9),
    "no token": without_tokens(ROLLOUT),
    "spans": replace(sample([5, 6], 1, 6), weight_spans=(("a", 2), ("b", 3), ("a", 1))),
    "request": replace(
        ROLLOUT,
        routing_key="prompt@server",
        top_logprobs_p=0.9,
        sampling_params={"temperature": 0.7, "stop": ["a", None]},
    ),
    "score": replace(SCORE, sequence_index=3, weight_version="v ü"),
    "score of all but one": score([5, 6, 7]),
    "score of no position": score([5, 6], 2),
    "score without sets": replace(SCORE, candidates=None),
}
OPTIONAL = {
    *("appended_spans", "routing_key", "sampling_params", "token_fields", "top_logprobs_p"),
    *("top_logprobs_source", "weight_versions"),
}
NULLABLE = OPTIONAL | {"candidates", "weight_version"}


@pytest.mark.parametrize("read_back", [through_json, through_a_frame])
@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_every_bit_comes_back(result, read_back):
    back = read_back(result)
    assert bits(back) == bits(result)
    assert back.logprobs.flags.aligned
    assert not back.logprobs.flags.writeable


def test_a_rollout_without_sets_has_no_masked_logprobs():
    with pytest.raises(errors.InvalidInputError, match="none were requested"):
        _ = RESULTS["no sets"].masked_logprobs


def test_older_records_lack_fields_and_newer_ones_have_more():
    record = {name: value for name, value in to_record(ROLLOUT).items() if name not in OPTIONAL}
    expected = replace(ROLLOUT, top_logprobs_source=None, weight_spans=None)
    assert bits(from_record(Rollout, record | {"added_later": 1})) == bits(expected)


@pytest.mark.parametrize("name", sorted(to_record(ROLLOUT).keys() - NULLABLE))
@pytest.mark.parametrize("value", ["absent", None, True, object(), -1, 1.5])
def test_every_field_is_checked_and_named(name, value):
    record = to_record(ROLLOUT) | {name: value}
    if value == "absent":
        del record[name]
    with pytest.raises(errors.WireError, match=name) as caught:
        from_record(Rollout, record)
    assert caught.value.field == name


def base64(array):
    return pybase64.b64encode(array.tobytes()).decode()


def span(start, end, version="7"):
    return {"version": version, "start": start, "end": end}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("output_ids", [1, 2], ""),
        ("output_ids", [1, 2, 2**31], ""),
        ("output_ids", [1, 2, -3], ""),
        ("output_ids", [1, 2, 3.0], ""),
        ("output_ids", [1, 2, True], ""),
        ("completion_tokens", 4, ""),
        ("prompt_tokens", 7, ""),
        ("logprobs", "!!!!", ""),
        ("logprobs", base64(np.zeros(5, np.uint8)), ""),
        ("logprobs", base64(np.zeros(2, "<f4")), ""),
        ("logprobs", base64(np.full(3, np.nan, "<f4")), ""),
        ("candidates", "!!!!", ""),
        ("candidates", 5, ""),
        ("timing", {}, ""),
        ("timing", {"latency_s": -1.0}, ""),
        ("timing", {"latency_s": float("nan")}, ""),
        ("weight_version", 7, ""),
        ("routing_key", None, ""),
        ("routing_key", 7, ""),
        ("top_logprobs_p", 0, ""),
        ("top_logprobs_p", 1.5, ""),
        ("top_logprobs_p", float("nan"), ""),
        ("top_logprobs_p", True, ""),
        ("top_logprobs_source", "", "top_logprobs_source"),
        ("top_logprobs_source", "nucleus", "top_logprobs_source"),
        ("top_logprobs_source", 1, "top_logprobs_source"),
        ("sampling_params", [], ""),
        ("appended_spans", None, ""),
        ("appended_spans", [[0, 1]], ""),
        ("weight_versions", {}, "weight_versions: got {}, expected array"),
        ("weight_versions", "7", "weight_versions: got '7', expected array"),
        ("weight_versions", [], "weight_versions: got () for 3 output_ids"),
        ("weight_versions", [None], "weight_versions[0]: got None, expected object"),
        ("weight_versions", [{"start": 0, "end": 3}], "weight_versions[0].version: missing"),
        ("weight_versions", [span(0, 3, 7)], "weight_versions[0].version: got 7, expected str"),
        ("weight_versions", [span(0, 2)], "weight_versions: got (('7', 2),) for 3 output_ids"),
        ("weight_versions", [span(0, 4)], "weight_versions: got (('7', 4),) for 3 output_ids"),
        ("weight_versions", [span(0, 10**400)], "weight_versions[0].end: got a number of 1329 bits"),
        ("weight_versions", [span(1, 3)], "weight_versions: got tokens 1 to 3, expected those from 0"),
        ("weight_versions", [span(0, -1)], "weight_versions[0].end: got -1, expected int >= 0"),
        ("weight_versions", [span(False, 3)], "weight_versions[0].start: got False, expected int"),
        ("weight_versions", [span(0, 3.5)], "weight_versions[0].end: got 3.5, expected int"),
        ("weight_versions", [span(0, 2), span(1, 3)], "got tokens 1 to 3, expected those from 2 on"),
    ],
)
def test_values_at_odds_are_errors(name, value, words):
    with pytest.raises(errors.WireError) as caught:
        from_record(Rollout, to_record(ROLLOUT) | {name: value})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "spans", [[[0]], [[0, 4]], [[1, 1]], [[2, 1]], [[0, 2], [1, 3]], [[True, 2]], [{}], ["ab"], [[-1, 2]]]
)
def test_invalid_spans_of_appended_tokens_are_errors(spans):
    with pytest.raises(errors.WireError, match=r"^appended_spans(\[0\])*: got .*, expected"):
        from_record(Rollout, to_record(ROLLOUT) | {"appended_spans": spans}, may_be_extended=True)


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("start", 0, "start"),
        ("start", 7, "start"),
        ("start", -1, "start"),
        ("start", True, "start"),
        ("start", 3, "logprobs"),
        ("num_tokens", 5, "num_tokens"),
        ("token_ids", [5, 6, 7, 8, 9, -1], "token_ids"),
        ("token_ids", [5, 6, 7, 8, 9, 1 << 40], "token_ids"),
        ("token_ids", [5, 6, 7, 8, 9, 11], "candidates"),
        ("token_ids", "5", "token_ids"),
        ("logprobs", "####", "logprobs"),
        ("logprobs", "", "logprobs"),
        ("logprobs", None, "logprobs"),
        ("candidates", "AAAA", "candidates"),
        ("sequence_index", -1, "sequence_index"),
        ("sequence_index", 1 << 70, "sequence_index"),
        ("request_id", 5, "request_id"),
        ("weight_version", 7, "weight_version"),
        ("cached_tokens", 0.5, "cached_tokens"),
    ],
)
def test_a_wrong_field_of_a_score_is_named(name, value, field):
    with pytest.raises(errors.SglangToppError) as error:
        from_record(Score, to_record(SCORE) | {name: value})
    assert error.value.field == field


@pytest.mark.parametrize("record", [None, [], "x", 1])
def test_a_record_is_an_object(record):
    with pytest.raises(errors.WireError, match="record"):
        from_record(Rollout, record)


def test_a_record_has_sglangs_form_of_spans():
    made = replace(ROLLOUT, weight_spans=(("7", 2), ("8", 1)))
    record = to_record(made)
    assert record["weight_versions"] == [span(0, 2), span(2, 3, "8")]
    assert made.weight_versions == ("7", "7", "8")
    record["weight_versions"] = [span(0, 0), span(0, 3, "8")]
    assert from_record(Rollout, record).weight_spans == (("8", 3),)
    assert from_record(Rollout, record | {"weight_versions": None}).weight_spans is None


def nudged(sets):
    logprobs = np.nextafter(sets.logprobs, np.float32(-99))
    return CandidateSets(sets.token_ids, logprobs, sets.offsets, sets.sampled_ids)


def empty(sampled_ids):
    return CandidateSets([], [], [0] * (len(sampled_ids) + 1), sampled_ids)


@pytest.mark.parametrize(
    ("result", "sets", "kind", "words"),
    [
        (ROLLOUT, sample([5, 6], 2).candidates, errors.WireError, "sampled token"),
        (ROLLOUT, nudged(ROLLOUT.candidates), errors.WireError, "engine reports"),
        (ROLLOUT, ROLLOUT.candidates.without_logprobs(), errors.WireError, "got sets without log-probs"),
        (ROLLOUT, empty(ROLLOUT.output_ids), errors.MissingCandidateSetsError, "position 0"),
        (ROLLOUT, empty(ROLLOUT.output_ids[:1]), errors.WireError, "1 positions for 3"),
        (SCORE, SCORE.candidates[1:], errors.WireError, "got 3 positions for 4"),
        (SCORE, CandidateSets.empty(4), errors.SglangToppError, "sampled token"),
    ],
)
def test_sets_that_do_not_fit_their_tokens_are_errors(result, sets, kind, words):
    with pytest.raises(kind, match=f"^candidates: .*{words}"):
        through_json(replace(result, candidates=sets))


def test_sets_of_another_threshold_are_refused():
    kept = float(np.exp(ROLLOUT.candidates.log_kept_mass).min())
    check_result(ROLLOUT, p=kept - 1e-6)
    for p in (kept + 0.02, 0.99):
        with pytest.raises(errors.WireError, match=r"^candidates: add up to a mass of 0\.\d+ at position"):
            check_result(ROLLOUT, p=p)


def test_a_rollout_frame_is_not_a_score():
    with pytest.raises(errors.WireError, match="sequence_index: missing"):
        from_frame(Score, to_frame(ROLLOUT), max_bytes=1 << 20)


@pytest.mark.parametrize("changes", [{"num_tokens": 1 << 40}, {"start": 1 << 62}, {"num_tokens": 0}])
def test_counts_that_do_not_fit_allocate_nothing(changes):
    sets = SCORE.candidates
    record = to_record(SCORE, framed=True) | {"num_candidates": len(sets.token_ids)} | changes
    arrays = (SCORE.token_ids, SCORE.logprobs, sets.sizes.astype(np.int32), sets.token_ids, sets.logprobs)
    with pytest.raises(errors.SglangToppError):
        from_frame(Score, encode_frame(record, arrays), max_bytes=1 << 20)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [one for one in ERRORS if not isinstance(one, errors.WeightPushError | errors.InvalidCandidateSetsError)],
    ids=lambda error: type(error).__name__,
)
def test_errors_round_trip_with_their_class(error):
    back = error_from_json(json.loads(json.dumps(error_to_json(error)))["error"])
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert getattr(back, "status", None) == getattr(error, "status", None)
    assert str(pickle.loads(pickle.dumps(back))) == str(error)


@pytest.mark.parametrize("name", [None, "OSError", "annotations", "__all__", "_rebuild"])
def test_an_error_of_unknown_type_is_a_server_error(name):
    assert type(error_from_json({"type": name, "message": "x"})) is errors.ServerError
    for body in ("broken", None, {"message": "broken"}):
        assert type(error_from_json(body)) is errors.ServerError
