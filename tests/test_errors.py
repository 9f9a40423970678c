"""The exception tree equals its docstring, and every exception survives pickling."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from sglang_topp import errors

TREE = {
    "SglangToppError": "Exception",
    "InvalidInputError": "SglangToppError",
    "InvalidCandidateSetsError": "InvalidInputError",
    "WireError": "SglangToppError",
    "MissingCandidateSetsError": "WireError",
    "SampledTokenMissingError": "WireError",
    "PatchError": "SglangToppError",
    "RequestError": "SglangToppError",
    "TransportError": "RequestError",
    "RequestTimeoutError": "TransportError",
    "WeightPushError": "RequestError",
    "ResponseError": "RequestError",
    "BadRequestError": "ResponseError",
    "AuthenticationError": "ResponseError",
    "OverloadedError": "ResponseError",
    "ServerError": "ResponseError",
    "RolloutError": "ResponseError",
    "AbortedError": "RolloutError",
}
MADE = [
    errors.SglangToppError("what was got"),
    errors.InvalidInputError("p: got 2"),
    errors.InvalidCandidateSetsError("offsets", "decrease after position 3"),
    errors.WireError("output_ids", "got -1"),
    errors.MissingCandidateSetsError("output_top_p_logprobs", "none"),
    errors.SampledTokenMissingError("output_top_p_logprobs_idx_base64", "7 is not among them"),
    errors.PatchError("a seam is gone"),
    errors.RequestError("failed"),
    errors.TransportError("refused"),
    errors.RequestTimeoutError("5 s passed"),
    errors.WeightPushError("1 of 2", weight_versions={"http://a": "3", "http://b": None}),
    errors.ResponseError("odd", status=None, body="half an answer"),
    errors.BadRequestError("400: top_logprobs_p", status=400, body='{"error": 1}'),
    errors.AuthenticationError("401", status=401),
    errors.OverloadedError("429", retry_after_s=2.5, body="busy"),
    errors.ServerError("503", status=503, body="down"),
    errors.RolloutError("failed", status=200, body="abort"),
    errors.AbortedError("aborted", body="abort"),
]


def test_a_time_limit_is_a_timeout_error():
    with pytest.raises(TimeoutError, match="5 s"):
        raise errors.RequestTimeoutError("5 s passed")


def test_the_tree_is_the_documented_one():
    drawn: dict[str, str] = {}
    ancestors: list[tuple[int, str]] = []
    for line in errors.__doc__.splitlines():
        if match := re.match(r"( {4}[ │├└─]*)(\w+Error)\b", line):
            depth, name = len(match[1]), match[2]
            ancestors = [(d, n) for d, n in ancestors if d < depth]
            drawn[name] = ancestors[-1][1] if ancestors else "Exception"
            ancestors.append((depth, name))
    assert drawn == TREE
    assert sorted(drawn) == sorted(errors.__all__)
    for name, parent in TREE.items():
        assert getattr(errors, name).__bases__[0].__name__ == parent


def test_wrong_values_are_value_errors_too():
    value_errors = {name for name in TREE if issubclass(getattr(errors, name), ValueError)}
    assert value_errors == {
        "InvalidInputError",
        "InvalidCandidateSetsError",
        "WireError",
        "MissingCandidateSetsError",
        "SampledTokenMissingError",
    }


def test_every_exception_is_made_here_once():
    assert [type(error).__name__ for error in MADE] == list(TREE)


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_keeps_everything(error, protocol):
    for again in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.__dict__ == error.__dict__
        assert again.args == error.args


def test_a_field_stands_in_front_of_its_problem():
    assert str(errors.WireError("output_ids", "got -1")) == "output_ids: got -1"
    error = errors.InvalidCandidateSetsError("offsets", "decrease")
    assert (error.field, error.problem, str(error)) == ("offsets", "decrease", "offsets: decrease")


def test_what_the_server_said_is_kept():
    error = errors.OverloadedError("slow down", retry_after_s=1.5, body="busy")
    assert (error.status, error.body, error.retry_after_s) == (429, "busy", 1.5)
    assert errors.ServerError("x").status is None
