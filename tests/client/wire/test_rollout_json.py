"""Rollouts in JSON round-trip exactly, and every wrong field of a record is named."""

import json
import pickle
from dataclasses import fields, replace

import numpy as np
import pybase64
import pytest

from sglang_topp import CandidateSets, errors, formats
from sglang_topp_client import Rollout
from sglang_topp_client.wire.error_json import error_from_json, error_to_json
from sglang_topp_client.wire.records import (
    check_result,
    from_frame,
    from_record,
    to_frame,
    to_record,
)


@pytest.fixture
def rollout(fakes):
    return fakes.sample([5, 6], 1)


def same(a, b):
    return all(
        np.array_equal(x, y) if isinstance(x, np.ndarray) else x == y
        for x, y in ((getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
    )


def test_round_trip_is_exact(rollout):
    back = from_record(Rollout, json.loads(json.dumps(to_record(rollout))))
    assert same(back, rollout)
    assert back.logprobs.dtype == np.float32
    assert back.output_ids.dtype == back.prompt_ids.dtype == np.int32


def test_a_rollout_without_sets_has_no_masked_logprobs(rollout):
    back = from_record(Rollout, to_record(replace(rollout, candidates=None)))
    assert back.candidates is None
    with pytest.raises(errors.InvalidInputError, match="none were requested"):
        _ = back.masked_logprobs


def test_the_source_of_the_sets(rollout):
    record = to_record(replace(rollout, top_logprobs_source="sampler"))
    assert from_record(Rollout, record).top_logprobs_source == "sampler"
    del record["top_logprobs_source"]
    assert from_record(Rollout, record).top_logprobs_source is None
    for wrong in ("", "nucleus", 1):
        with pytest.raises(errors.WireError, match="top_logprobs_source"):
            from_record(Rollout, record | {"top_logprobs_source": wrong})


def test_weight_versions_of_each_token_round_trip(rollout):
    record = to_record(rollout)
    assert record["weight_versions"][0] == {"version": "step-6", "start": 0, "end": 1}
    assert from_record(Rollout, record).weight_versions == (
        "step-6",
        *["step-7"] * (len(rollout.output_ids) - 1),
    )


def test_an_older_record_without_weight_versions_is_accepted(rollout):
    record = to_record(rollout)
    del record["weight_versions"]
    assert from_record(Rollout, record).weight_versions is None
    assert from_record(Rollout, record).weight_version == "step-7"
    assert from_record(Rollout, to_record(replace(rollout, weight_spans=None))).weight_spans is None


def test_unknown_fields_are_ignored(rollout):
    assert same(from_record(Rollout, to_record(rollout) | {"added_later": 1}), rollout)


@pytest.mark.parametrize(
    "name",
    [
        "prompt_index",
        "sample_index",
        "request_id",
        "prompt_ids",
        "output_ids",
        "text",
        "logprobs",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "cached_tokens",
        "timing",
    ],
)
@pytest.mark.parametrize("value", ["absent", None, True, object(), -1, 1.5])
def test_every_field_is_checked_and_named(rollout, name, value):
    record = to_record(rollout)
    if value == "absent":
        del record[name]
    else:
        record[name] = value
    with pytest.raises(errors.WireError, match=name) as caught:
        from_record(Rollout, record)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("output_ids", [1, 2]),
        ("output_ids", [1, 2, 2**31]),
        ("output_ids", [1, 2, -3]),
        ("output_ids", [1, 2, 3.0]),
        ("output_ids", [1, 2, True]),
        ("completion_tokens", 4),
        ("prompt_tokens", 7),
        ("logprobs", "!!!!"),
        ("logprobs", pybase64.b64encode(b"12345").decode()),
        ("logprobs", pybase64.b64encode(np.zeros(2, "<f4").tobytes()).decode()),
        ("logprobs", pybase64.b64encode(np.full(3, np.nan, "<f4").tobytes()).decode()),
        ("candidates", "!!!!"),
        ("candidates", 5),
        ("weight_versions", [{"version": "7", "start": 0, "end": 2}]),
        ("timing", {}),
        ("timing", {"latency_s": -1.0}),
        ("timing", {"latency_s": float("nan")}),
        ("weight_version", 7),
        ("routing_key", None),
        ("routing_key", 7),
        ("top_logprobs_p", 0),
        ("top_logprobs_p", 1.5),
        ("top_logprobs_p", float("nan")),
        ("top_logprobs_p", True),
        ("sampling_params", []),
        ("appended_spans", None),
        ("appended_spans", [[0, 1]]),
    ],
)
def test_values_at_odds_are_errors(rollout, name, value):
    with pytest.raises(errors.WireError):
        from_record(Rollout, to_record(rollout) | {name: value})


@pytest.mark.parametrize("record", [None, [], "x", 1])
def test_a_record_is_an_object(record):
    with pytest.raises(errors.WireError, match="record"):
        from_record(Rollout, record)


def test_sets_of_other_tokens_are_errors(rollout, fakes):
    other = fakes.sample([5, 6], 2)
    with pytest.raises(errors.WireError, match="sampled token"):
        from_record(Rollout, to_record(rollout) | {"candidates": formats.pack_base64(other.candidates)})


def test_sets_with_other_logprobs_are_errors(rollout):
    sets = rollout.candidates
    nudged = CandidateSets(
        sets.token_ids, np.nextafter(sets.logprobs, np.float32(-99)), sets.offsets, sets.sampled_ids
    )
    with pytest.raises(errors.WireError, match="engine reports"):
        from_record(Rollout, to_record(rollout) | {"candidates": formats.pack_base64(nudged)})


def test_sets_without_logprobs_are_errors(rollout):
    ids_only = replace(rollout, candidates=rollout.candidates.without_logprobs())
    with pytest.raises(errors.WireError, match="candidates: got sets without log-probs"):
        from_record(Rollout, to_record(ids_only))


def test_every_position_needs_a_set(rollout):
    ids = rollout.output_ids
    with pytest.raises(errors.MissingCandidateSetsError, match="position 0"):
        check_result(replace(rollout, candidates=CandidateSets([], [], [0, 0, 0, 0], ids)))
    with pytest.raises(errors.WireError, match="1 positions for 3"):
        check_result(replace(rollout, candidates=CandidateSets([], [], [0, 0], ids[:1])))


@pytest.mark.parametrize(
    "error",
    [
        errors.WireError("some_field", "is odd"),
        errors.MissingCandidateSetsError("some_field", "is absent"),
        errors.SampledTokenMissingError("some_field", "lacks it"),
        errors.InvalidInputError("n: got 0"),
        errors.PatchError("a seam is gone"),
        errors.TransportError("reset"),
        errors.RequestTimeoutError("3 s"),
        errors.BadRequestError("no", status=400),
        errors.RolloutError("aborted"),
        errors.ServerError("down", status=503),
    ],
)
def test_errors_round_trip_with_their_class(error):
    back = error_from_json(json.loads(json.dumps(error_to_json(error)))["error"])
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert getattr(back, "status", None) == getattr(error, "status", None)
    assert str(pickle.loads(pickle.dumps(back))) == str(error)


@pytest.mark.parametrize(
    "body", ["broken", None, {"message": "broken"}, {"type": "OSError", "message": "broken"}]
)
def test_an_error_of_unknown_type_is_a_server_error(body):
    assert type(error_from_json(body)) is errors.ServerError


@pytest.mark.parametrize("name", ["annotations", "__all__", "_rebuild"])
def test_a_type_that_is_not_an_error_class_is_a_server_error(name):
    assert type(error_from_json({"type": name, "message": "x"})) is errors.ServerError


def test_sets_of_another_threshold_are_refused(rollout):
    kept = float(np.exp(rollout.candidates.log_kept_mass).min())
    check_result(rollout, p=kept - 1e-6)
    for p in (kept + 0.02, 0.99):
        with pytest.raises(errors.WireError, match=r"^candidates: add up to a mass of 0\.\d+ at position"):
            check_result(rollout, p=p)


@pytest.mark.parametrize(
    "spans", [[[0]], [[0, 4]], [[1, 1]], [[2, 1]], [[0, 2], [1, 3]], [[True, 2]], [{}], ["ab"], [[-1, 2]]]
)
def test_invalid_weight_spans_are_errors(rollout, spans):
    with pytest.raises(errors.WireError, match=r"^appended_spans(\[0\])*: got .*, expected"):
        from_record(Rollout, to_record(rollout) | {"appended_spans": spans}, may_be_extended=True)


def test_the_request_parameters_round_trip(rollout):
    asked = replace(
        rollout,
        routing_key="prompt@server",
        top_logprobs_p=0.9,
        sampling_params={"temperature": 0.7, "stop": ["a", None]},
        weight_version=None,
    )
    for back in (
        from_record(Rollout, json.loads(json.dumps(to_record(asked)))),
        from_frame(Rollout, to_frame(asked), max_bytes=1 << 20),
    ):
        assert back.routing_key == "prompt@server"
        assert (back.top_logprobs_p, back.sampling_params) == (0.9, asked.sampling_params)
        assert back.weight_version is None
