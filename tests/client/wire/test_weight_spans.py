"""Weight spans round-trip through SGLang's form, and spans that do not cover each token once are refused."""

from dataclasses import replace

import pytest

from sglang_topp.errors import WireError
from sglang_topp_client import Rollout
from sglang_topp_client.wire.records import from_record, to_record


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_round_trip(fakes, num_tokens):
    spans = {0: (), 1: (("a", 1),), 6: (("a", 2), ("b", 3), ("a", 1))}[num_tokens]
    made = fakes.sample([5, 6], 1, 6)
    made = replace(
        made,
        output_ids=made.output_ids[:num_tokens],
        logprobs=made.logprobs[:num_tokens],
        candidates=None,
        weight_spans=spans,
    )
    back = from_record(Rollout, to_record(made))
    assert back.weight_spans == spans
    assert len(back.weight_versions) == num_tokens


def test_a_record_has_sglangs_form(fakes):
    made = replace(fakes.sample([5, 6], 1), weight_spans=(("7", 2), ("8", 1)))
    assert to_record(made)["weight_versions"] == [
        {"version": "7", "start": 0, "end": 2},
        {"version": "8", "start": 2, "end": 3},
    ]
    assert made.weight_versions == ("7", "7", "8")


def test_spans_of_no_token_and_absent_spans(fakes):
    record = to_record(fakes.sample([5, 6], 1))
    spans = [{"version": "7", "start": 0, "end": 0}, {"version": "8", "start": 0, "end": 3}]
    assert from_record(Rollout, record | {"weight_versions": spans}).weight_spans == (("8", 3),)
    assert from_record(Rollout, record | {"weight_versions": None}).weight_spans is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "weight_versions: got {}, expected array"),
        ("7", "weight_versions: got '7', expected array"),
        ([], "weight_versions: got () for 3 output_ids"),
        ([None], "weight_versions[0]: got None, expected object"),
        ([{"start": 0, "end": 3}], "weight_versions[0].version: missing"),
        ([{"version": 7, "start": 0, "end": 3}], "weight_versions[0].version: got 7, expected str"),
        ([{"version": "7", "start": 0, "end": 2}], "weight_versions: got (('7', 2),) for 3 output_ids"),
        ([{"version": "7", "start": 0, "end": 4}], "weight_versions: got (('7', 4),) for 3 output_ids"),
        ([{"version": "7", "start": 0, "end": 10**400}], "weight_versions[0].end: got a number of 1329 bits"),
        (
            [{"version": "7", "start": 1, "end": 3}],
            "weight_versions: got tokens 1 to 3, expected those from 0",
        ),
        ([{"version": "7", "start": 0, "end": -1}], "weight_versions[0].end: got -1, expected int >= 0"),
        ([{"version": "7", "start": False, "end": 3}], "weight_versions[0].start: got False, expected int"),
        ([{"version": "7", "start": 0, "end": 3.5}], "weight_versions[0].end: got 3.5, expected int"),
        (
            [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 1, "end": 3}],
            "weight_versions: got tokens 1 to 3, expected those from 2 on",
        ),
    ],
)
def test_spans_that_do_not_cover_each_token_once_are_errors(fakes, value, words):
    with pytest.raises(WireError) as caught:
        from_record(Rollout, to_record(fakes.sample([5, 6], 1)) | {"weight_versions": value})
    assert words in str(caught.value)
