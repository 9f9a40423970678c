"""Scores in JSON and in binary frames round-trip exactly, and every wrong field is named."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp.errors import SglangToppError, WireError
from sglang_topp_client import Score
from sglang_topp_client.wire.frame import encode_frame
from sglang_topp_client.wire.records import from_frame, from_record, to_frame, to_record


def decoded(raw):
    return from_frame(Score, raw, max_bytes=1 << 20)


def assert_same(read, written):
    assert (read.sequence_index, read.request_id) == (written.sequence_index, written.request_id)
    assert (read.start, read.weight_version, read.cached_tokens) == (
        written.start,
        written.weight_version,
        written.cached_tokens,
    )
    for name in ("token_ids", "logprobs"):
        mine, theirs = getattr(read, name), getattr(written, name)
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(mine, theirs)
    assert (read.candidates is None) == (written.candidates is None)
    if written.candidates is not None:
        for name in ("token_ids", "logprobs", "offsets", "sampled_ids"):
            np.testing.assert_array_equal(
                getattr(read.candidates, name), getattr(written.candidates, name), strict=True
            )


def both_ways(score):
    return from_record(Score, json.loads(json.dumps(to_record(score)))), decoded(to_frame(score))


@pytest.mark.parametrize("start", [1, 3, 6])
def test_json_and_binary_round_trips_are_exact(fakes, start):
    score = replace(fakes.score([5, 6, 7, 8, 9, 10], start), sequence_index=3, weight_version="v ü")
    for read in both_ways(score):
        assert_same(read, score)
    bare = replace(score, candidates=None)
    for read in both_ways(bare):
        assert_same(read, bare)


def test_zero_scored_positions_still_have_sets(fakes):
    for read in both_ways(fakes.score([5, 6], 2)):
        assert read.candidates is not None
        assert len(read.candidates) == len(read.logprobs) == 0


def test_unknown_fields_are_ignored(fakes):
    score = fakes.score([5, 6, 7])
    assert_same(from_record(Score, to_record(score) | {"later": 1}), score)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"start": 0}, "start"),
        ({"start": 7}, "start"),
        ({"start": -1}, "start"),
        ({"start": True}, "start"),
        ({"start": 3}, "logprobs"),
        ({"num_tokens": 5}, "num_tokens"),
        ({"token_ids": [5, 6, 7, 8, 9, -1]}, "token_ids"),
        ({"token_ids": [5, 6, 7, 8, 9, 1 << 40]}, "token_ids"),
        ({"token_ids": [5, 6, 7, 8, 9, 11]}, "candidates"),
        ({"token_ids": "5"}, "token_ids"),
        ({"logprobs": "####"}, "logprobs"),
        ({"logprobs": ""}, "logprobs"),
        ({"logprobs": None}, "logprobs"),
        ({"candidates": "AAAA"}, "candidates"),
        ({"sequence_index": -1}, "sequence_index"),
        ({"sequence_index": 1 << 70}, "sequence_index"),
        ({"request_id": 5}, "request_id"),
        ({"weight_version": 7}, "weight_version"),
        ({"cached_tokens": 0.5}, "cached_tokens"),
    ],
)
def test_a_wrong_field_is_named(fakes, changes, field):
    record = to_record(fakes.score([5, 6, 7, 8, 9, 10], 2)) | changes
    with pytest.raises(SglangToppError) as error:
        from_record(Score, record)
    assert error.value.field == field


@pytest.mark.parametrize(
    "name", ["start", "token_ids", "logprobs", "num_tokens", "cached_tokens", "request_id"]
)
def test_a_missing_field_is_named(fakes, name):
    record = to_record(fakes.score([5, 6, 7]))
    del record[name]
    with pytest.raises(WireError, match=name):
        from_record(Score, record)


def test_a_nan_log_prob_is_an_error(fakes):
    score = fakes.score([5, 6, 7])
    wrong = replace(score, logprobs=np.array([np.nan, -1.0], np.float32))
    for read in (
        lambda: from_record(Score, to_record(wrong)),
        lambda: decoded(to_frame(wrong)),
    ):
        with pytest.raises(WireError, match="got NaN at position 0"):
            read()


def test_sets_of_other_log_probs_are_errors(fakes):
    score = fakes.score([5, 6, 7])
    wrong = replace(score, logprobs=np.nextafter(score.logprobs, np.float32(-9), dtype=np.float32))
    for read in (
        lambda: from_record(Score, to_record(wrong)),
        lambda: decoded(to_frame(wrong)),
    ):
        with pytest.raises(WireError, match="2 of 2 positions differ"):
            read()


def test_sets_of_too_few_positions_are_errors(fakes):
    score = fakes.score([5, 6, 7])
    record = to_record(replace(score, candidates=score.candidates[1:]))
    with pytest.raises(WireError, match="got 1 positions for 2"):
        from_record(Score, record)
    record = to_record(replace(score, candidates=CandidateSets.empty(2)))
    with pytest.raises(SglangToppError, match="sampled token"):
        from_record(Score, record)


def test_a_cut_or_altered_frame_is_an_error(fakes):
    raw = to_frame(fakes.score([5, 6, 7, 8]))
    for length in range(len(raw)):
        with pytest.raises(WireError):
            decoded(raw[:length])
    for at in range(len(raw)):
        altered = bytearray(raw)
        altered[at] ^= 0x01
        with pytest.raises(WireError):
            decoded(bytes(altered))


def test_a_rollout_frame_is_not_a_score(fakes):
    with pytest.raises(WireError, match="sequence_index: missing"):
        decoded(to_frame(fakes.sample([5], 0)))


@pytest.mark.parametrize("changes", [{"num_tokens": 1 << 40}, {"start": 1 << 62}, {"num_tokens": 0}])
def test_counts_that_do_not_fit_allocate_nothing(fakes, changes):
    score = fakes.score([5, 6, 7])
    record = to_record(score) | changes
    for name in ("token_ids", "logprobs", "candidates"):
        del record[name]
    sets = score.candidates
    arrays = (score.token_ids, score.logprobs, sets.sizes.astype(np.int32), sets.token_ids, sets.logprobs)
    raw = encode_frame(record | {"num_candidates": len(sets.token_ids)}, arrays)
    with pytest.raises(SglangToppError):
        decoded(raw)
