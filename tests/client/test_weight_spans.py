"""Weight spans round-trip through SGLang's form, and spans that do not cover each token once are refused."""

import pytest

from sglang_topp.errors import WireError
from sglang_topp_client.rollout import expand_spans, spans_from_json, spans_to_json


@pytest.mark.parametrize("spans", [(), (("a", 1),), (("a", 2), ("b", 3), ("a", 1))])
def test_round_trip(spans):
    num_tokens = sum(count for _, count in spans)
    assert spans_from_json(spans_to_json(spans), num_tokens) == spans
    assert len(expand_spans(spans)) == num_tokens


def test_spans_to_json_has_sglangs_form():
    spans = (("7", 2), ("8", 1))
    assert spans_to_json(spans) == [
        {"version": "7", "start": 0, "end": 2},
        {"version": "8", "start": 2, "end": 3},
    ]
    assert expand_spans(spans) == ("7", "7", "8")


def test_a_sample_without_tokens_has_no_versions():
    assert spans_from_json([{"version": "7", "start": 0, "end": 0}], 0) == ()
    assert spans_from_json(None, 3) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "expected a list"),
        ("7", "expected a list"),
        ([], "got versions of 0 tokens, expected 3"),
        ([None], "expected an object"),
        ([{"start": 0, "end": 3}], "got None as a version"),
        ([{"version": 7, "start": 0, "end": 3}], "got 7 as a version"),
        ([{"version": "\ud800", "start": 0, "end": 3}], "as a version"),
        ([{"version": "7", "start": 0, "end": 2}], "got versions of 2 tokens, expected 3"),
        ([{"version": "7", "start": 0, "end": 4}], "got versions of 4 tokens"),
        ([{"version": "7", "start": 0, "end": 10**400}], "got versions of a number of 1329 bits tokens"),
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
def test_spans_that_do_not_cover_each_token_once_are_errors(value, words):
    with pytest.raises(WireError, match="weight_versions") as caught:
        spans_from_json(value, 3)
    assert words in str(caught.value)
