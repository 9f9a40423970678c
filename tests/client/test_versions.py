import pytest

from sglang_topp.errors import WireError
from sglang_topp_client.versions import per_token, spans_from_json, spans_to_json


@pytest.mark.parametrize("spans", [(), (("a", 1),), (("a", 2), ("b", 3), ("a", 1))])
def test_round_trip(spans):
    num_tokens = sum(count for _, count in spans)
    assert spans_from_json(spans_to_json(spans), num_tokens) == spans
    assert len(per_token(spans)) == num_tokens


def test_the_form_is_sglangs():
    spans = (("7", 2), ("8", 1))
    assert spans_to_json(spans) == [
        {"version": "7", "start": 0, "end": 2},
        {"version": "8", "start": 2, "end": 3},
    ]
    assert per_token(spans) == ("7", "7", "8")


def test_a_sample_without_tokens_has_no_versions():
    assert spans_from_json([{"version": "7", "start": 0, "end": 0}], 0) == ()
    assert spans_from_json(None, 3) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "expected a list"),
        ("7", "expected a list"),
        ([], "tells of 0 tokens; the output has 3"),
        ([None], "expected an object"),
        ([{"start": 0, "end": 3}], "got None as a version"),
        ([{"version": 7, "start": 0, "end": 3}], "got 7 as a version"),
        ([{"version": "\ud800", "start": 0, "end": 3}], "as a version"),
        ([{"version": "7", "start": 0, "end": 2}], "tells of 2 tokens; the output has 3"),
        ([{"version": "7", "start": 0, "end": 4}], "tells of 4 tokens"),
        ([{"version": "7", "start": 0, "end": 10**400}], "tells of"),
        ([{"version": "7", "start": 1, "end": 3}], "expected those from 0 on"),
        ([{"version": "7", "start": 0, "end": -1}], "expected those from 0 on"),
        ([{"version": "7", "start": False, "end": 3}], "expected those from 0 on"),
        ([{"version": "7", "start": 0, "end": 3.0}], "expected those from 0 on"),
        (
            [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 1, "end": 3}],
            "got tokens 1 to 3, expected those from 2 on",
        ),
    ],
)
def test_what_does_not_tell_of_each_token_once_is_an_error(value, words):
    with pytest.raises(WireError, match="weight_versions") as caught:
        spans_from_json(value, 3)
    assert words in str(caught.value)
