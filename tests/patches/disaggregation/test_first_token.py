"""What a prefill server hands over: its encoding, and the inputs that both servers must agree on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_topp.errors import WireError
from sglang_topp_patches.disaggregation.first_token import FirstToken, differing_names, first_token_inputs
from sglang_topp_patches.scheduler_messages import KEY, Entry, PackedSet, pack_set

ASKED = {"top_logprobs_p": "0.9", "prompt": "abc"}


OBJ = SimpleNamespace(
    top_logprobs_p=0.9,
    text=None,
    input_ids=[1, 2],
    logprob_start_len=-1,
    sampling_params={"temperature": 0.7, "max_new_tokens": 8},
)
INPUTS = first_token_inputs(OBJ)


def of_size(size: int) -> PackedSet:
    return pack_set(np.arange(size, dtype=np.int32), np.linspace(-1, -9, size, dtype=np.float32))


def first(token_id: int = 1, size: int = 10) -> FirstToken:
    return FirstToken(token_id, ASKED, Entry(of_size(size), weight_version="7"))


@pytest.mark.parametrize(
    "value",
    [
        FirstToken(
            5, ASKED, Entry(of_size(3), weight_version="7"), (None, of_size(2), of_size(0), of_size(4))
        ),
        FirstToken(5, ASKED, Entry(of_size(151_936))),
        FirstToken(5, ASKED, Entry(None, "it broke")),
        FirstToken(5, ASKED, Entry(None, "too much", 413)),
    ],
    ids=["prompt", "vocabulary", "problem", "refusal"],
)
def test_what_is_read_is_what_was_written(value: FirstToken) -> None:
    assert FirstToken.from_bytes(value.to_bytes()) == value


def test_what_is_not_whole_is_an_error() -> None:
    body = first().to_bytes()
    line, _, arrays = body.partition(b"\n")
    other = json.dumps({**json.loads(line), "version": "0.0.1"}).encode()
    for broken, words in [
        (body[:-1], "79 bytes of arrays, expected 80"),
        (body + b"x", "81 bytes"),
        (b"<html>", "expected a line of JSON"),
        (b"{}\n", "expected a line of JSON"),
        (b"[1]\n", "expected a line of JSON"),
        (other + b"\n" + arrays, "has sglang-topp 0.0.1"),
    ]:
        with pytest.raises(WireError, match=words):
            FirstToken.from_bytes(broken)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"top_logprobs_p": 0.5}, "top_logprobs_p"),
        ({"top_logprobs_p": None, "top_logprobs_source": "sampler"}, "top_logprobs_source"),
        ({"logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": [2, 1]}, "prompt"),
        ({"input_ids": None, "text": "x"}, "prompt"),
        ({"sampling_params": {"temperature": 0.7, "top_p": 0.3}}, "sampling_params"),
        ({"sampling_params": None}, "sampling_params"),
        ({"sampling_params": {"temperature": 0.7, "custom_params": {"of": "others"}}}, "sampling_params"),
        ({"sampling_params": {"temperature": 0.7, "max_new_tokens": 1}}, None),
    ],
)
def test_what_is_asked_for_differs_where_the_sets_may(change: dict[str, Any], name: str | None) -> None:
    other = first_token_inputs(SimpleNamespace(**{**vars(OBJ), **change}))
    assert (other == INPUTS) is (name is None)
    assert name is None or other[name] != INPUTS[name]


def test_a_field_of_ours_is_compared_once() -> None:
    """The patch set leaves a copy of it where the scheduler finds it."""
    given = [
        {**vars(OBJ), "top_logprobs_p": p, "sampling_params": {"custom_params": {"top_logprobs_p": p}}}
        for p in (0.5, 0.9)
    ]
    one, other = (first_token_inputs(SimpleNamespace(**each)) for each in given)
    assert [name for name in one if one[name] != other[name]] == ["top_logprobs_p"]


def test_a_request_without_sets_differs_in_what_it_asks_for_alone() -> None:
    """The patch set puts its fields, and what a candidate costs, into the other request's `custom_params`."""
    sampling = {"temperature": 0.7, "custom_params": {"top_logprobs_p": 0.9, KEY: 1}}
    asks = first_token_inputs(SimpleNamespace(**{**vars(OBJ), "sampling_params": sampling}))
    plain = {"top_logprobs_p": None, "sampling_params": {"temperature": 0.7}}
    other = first_token_inputs(SimpleNamespace(**{**vars(OBJ), **plain}))
    assert differing_names(asks, other) == ("top_logprobs_p",)
