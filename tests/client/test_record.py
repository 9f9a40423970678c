import json
import pickle
from dataclasses import fields, replace

import numpy as np
import pybase64
import pytest

from sglang_topp import CandidateSets, errors, wire
from sglang_topp_client.record import (
    check_kept_mass,
    check_sets,
    error_from_record,
    error_to_record,
    from_record,
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
    back = from_record(json.loads(json.dumps(to_record(rollout))))
    assert same(back, rollout)
    assert back.logprobs.dtype == np.float32
    assert back.output_ids.dtype == back.prompt_ids.dtype == np.int32


def test_without_sets(rollout):
    back = from_record(to_record(replace(rollout, candidates=None)))
    assert back.candidates is None
    with pytest.raises(errors.InvalidInputError, match="none were asked for"):
        _ = back.masked_logprobs


def test_the_source_of_the_sets(rollout):
    record = to_record(replace(rollout, top_logprobs_source="sampler"))
    assert from_record(record).top_logprobs_source == "sampler"
    # As sidecars of 0.1.0 write it: there was one rule.
    del record["top_logprobs_source"]
    assert from_record(record).top_logprobs_source == "distribution"
    assert from_record(record | {"candidates": None}).top_logprobs_source is None
    for wrong in ("", "nucleus", 1):
        with pytest.raises(errors.WireError, match="top_logprobs_source"):
            from_record(record | {"top_logprobs_source": wrong})


def test_each_tokens_weights(rollout):
    record = to_record(rollout)
    assert record["weight_versions"][0] == {"version": "step-6", "start": 0, "end": 1}
    assert from_record(record).weight_versions == ("step-6", *["step-7"] * (len(rollout.output_ids) - 1))


def test_a_record_of_before_there_were_versions_of_tokens(rollout):
    record = to_record(rollout)
    del record["weight_versions"]
    assert from_record(record).weight_versions is None
    assert from_record(record).weight_version == "step-7"
    assert from_record(to_record(replace(rollout, weight_spans=None))).weight_spans is None


def test_unknown_fields_are_passed_over(rollout):
    assert same(from_record(to_record(rollout) | {"added_later": 1}), rollout)


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
        "weight_version",
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
        from_record(record)
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
    ],
)
def test_values_at_odds_are_errors(rollout, name, value):
    with pytest.raises(errors.WireError):
        from_record(to_record(rollout) | {name: value})


@pytest.mark.parametrize("record", [None, [], "x", 1])
def test_a_record_is_an_object(record):
    with pytest.raises(errors.WireError, match="record"):
        from_record(record)


def test_sets_of_other_tokens_are_errors(rollout, fakes):
    other = fakes.sample([5, 6], 2)
    with pytest.raises(errors.WireError, match="sampled token"):
        from_record(to_record(rollout) | {"candidates": wire.pack_base64(other.candidates)})


def test_sets_with_other_logprobs_are_errors(rollout):
    sets = rollout.candidates
    nudged = CandidateSets(
        sets.token_ids, np.nextafter(sets.logprobs, np.float32(-99)), sets.offsets, sets.sampled_ids
    )
    with pytest.raises(errors.WireError, match="engine reports"):
        from_record(to_record(rollout) | {"candidates": wire.pack_base64(nudged)})


def test_sets_without_logprobs_are_errors(rollout):
    ids_only = replace(rollout, candidates=rollout.candidates.without_logprobs())
    with pytest.raises(errors.WireError, match="candidates: holds sets without log-probs"):
        from_record(to_record(ids_only))


def test_every_position_needs_a_set(rollout):
    sets = CandidateSets([], [], [0, 0], [3])
    with pytest.raises(errors.MissingCandidateSetsError, match="position 0"):
        check_sets(sets, np.array([3], np.int32), np.zeros(1, np.float32), field="candidates")
    with pytest.raises(errors.WireError, match="1 positions for 2"):
        check_sets(sets, np.array([3, 4], np.int32), np.zeros(2, np.float32), field="candidates")


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
def test_errors_cross_as_themselves(error):
    back = error_from_record(json.loads(json.dumps(error_to_record(error)))["error"])
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert getattr(back, "status", None) == getattr(error, "status", None)
    assert str(pickle.loads(pickle.dumps(back))) == str(error)


@pytest.mark.parametrize(
    "body", ["broken", None, {"message": "broken"}, {"type": "OSError", "message": "broken"}]
)
def test_an_error_without_a_known_type_is_the_servers(body):
    assert type(error_from_record(body)) is errors.ServerError


@pytest.mark.parametrize("name", ["annotations", "__all__", "_rebuild"])
def test_a_type_is_one_of_the_errors(name):
    assert type(error_from_record({"type": name, "message": "x"})) is errors.ServerError


def test_sets_of_another_threshold_are_refused(rollout):
    kept = np.exp(rollout.candidates.logprob_sum)
    check_kept_mass(rollout.candidates, float(kept.min()), field="candidates")
    check_kept_mass(rollout.candidates, float(kept.min()) + 0.02, field="candidates")
    with pytest.raises(
        errors.WireError, match=r"keeps a mass of 0\.\d+, and top_logprobs_p 0\.99 was asked for"
    ):
        check_kept_mass(rollout.candidates, 0.99, field="candidates")


def test_sets_of_more_than_all_mass_are_refused():
    logprobs = np.log(np.array([0.9, 0.9, 0.9], np.float32))
    sets = CandidateSets(np.arange(3, dtype=np.int32), logprobs, [0, 3], [0])
    with pytest.raises(errors.WireError, match=r"position 0 has a mass of 2\.7000, more than there is"):
        check_kept_mass(sets, 0.9, field="candidates")


@pytest.mark.parametrize(("size", "in_bfloat16"), [(130_700, -11.75), (130_800, -11.8125)])
def test_flat_rows_in_bfloat16_pass(size, in_bfloat16):
    """The worst that rounding does: every log-prob of a row is off by 0.031, and the same way."""
    assert abs(np.log(size) + in_bfloat16) > 0.03
    logprobs = np.full(size, in_bfloat16, np.float32)
    sets = CandidateSets(np.arange(size, dtype=np.int32), logprobs, [0, size], [0])
    check_kept_mass(sets, 1.0, field="candidates")
