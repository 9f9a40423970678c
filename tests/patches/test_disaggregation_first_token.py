"""What a prefill server hands over: its encoding, and the inputs that both servers must agree on."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_topp.errors import WireError
from sglang_topp_patches.disaggregation import FirstToken, differing_names, first_token_inputs
from sglang_topp_patches.request import NOTHING, SetsRequest
from sglang_topp_patches.set_buffer import PackedSet, Problem, SetBuffer

ASKED = {"top_logprobs_p": "0.9", "prompt": "abc"}


OBJ = SimpleNamespace(
    sglang_topp_request=SetsRequest(threshold=0.9),
    text=None,
    input_ids=[1, 2],
    logprob_start_len=-1,
    sampling_params={"temperature": 0.7, "max_new_tokens": 8},
)
INPUTS = first_token_inputs(OBJ)


def of_size(size: int) -> PackedSet:
    return np.arange(size, dtype=np.int32).tobytes(), np.linspace(-1, -9, size, dtype=np.float32).tobytes()


def sets(
    generated: PackedSet | None = None,
    prompt: tuple[PackedSet | None, ...] = (),
    problem: Problem | None = None,
) -> SetBuffer:
    buffer = SetBuffer()
    if generated is not None:
        buffer.append(generated, "7")
    for row in prompt:
        buffer.prompt.append(row)
        buffer.prompt_version = "6"
    buffer.problem = problem
    return buffer


@pytest.mark.parametrize(
    "value",
    [
        sets(of_size(3), (None, of_size(2), None, of_size(4))),
        sets(of_size(151_936)),
        sets(problem=Problem("it broke")),
        sets(problem=Problem("too much", 413)),
    ],
    ids=["prompt", "vocabulary", "problem", "refusal"],
)
def test_what_is_read_is_what_was_written(value: SetBuffer) -> None:
    read = FirstToken.from_bytes(FirstToken(5, ASKED, value).to_bytes())
    assert (read.token_id, read.inputs, read.sets.problem) == (5, ASKED, value.problem)
    assert read.sets.generated.sets() == value.generated.sets()
    assert read.sets.prompt.sets() == value.prompt.sets()
    if value.problem is None:
        assert (read.sets.spans, read.sets.prompt_version) == (value.spans, value.prompt_version)


def test_what_is_not_whole_is_an_error() -> None:
    body = FirstToken(1, ASKED, sets(of_size(10))).to_bytes()
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
        ({"sglang_topp_request": SetsRequest(threshold=0.5)}, "top_logprobs_p"),
        ({"sglang_topp_request": SetsRequest(is_from_sampler=True)}, "top_logprobs_source"),
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


def test_a_request_without_sets_differs_in_what_it_asks_for_alone() -> None:
    """Custom parameters that held the plugin's fields alone are left out, or None on the OpenAI routes."""
    sampling = {**OBJ.sampling_params, "custom_params": None}
    other = {**vars(OBJ), "sampling_params": sampling, "sglang_topp_request": NOTHING}
    assert differing_names(INPUTS, first_token_inputs(SimpleNamespace(**other))) == ("top_logprobs_p",)
