"""What a prefill server hands over: its encoding, and the inputs that both servers must agree on."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from sglang_topp.errors import WireError
from sglang_topp_patches.disaggregation import FirstToken, first_token_inputs
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


WRITTEN = FirstToken(1, ASKED, sets(of_size(10)))
FIELDS = msgspec.msgpack.decode(WRITTEN.to_bytes())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((WRITTEN.to_bytes()[:end], "expected MessagePack") for end in (0, 1, 50, -1)),
        (WRITTEN.to_bytes() + b"x", "expected MessagePack"),
        (b"<html>", "expected MessagePack"),
        *(
            (msgspec.msgpack.encode(other), "expected MessagePack")
            for other in (
                {},
                [1],
                {**FIELDS, "sets": {**FIELDS["sets"], "generated": [b"1234", b"1234", [2]]}},
                {**FIELDS, "sets": {**FIELDS["sets"], "generated": [b"", b"", 3]}},
                {**FIELDS, "sets": {**FIELDS["sets"], "generated": [b"", b"", [1 << 40]]}},
                {**FIELDS, "sets": {**FIELDS["sets"], "generated": [1 << 33, b"", []]}},
                {**FIELDS, "sets": {**FIELDS["sets"], "generated": [[1, 2, 3, 4], [1, 2, 3, 4], [1]]}},
                {**FIELDS, "sets": {**FIELDS["sets"], "prompt": 3}},
                {**FIELDS, "token_id": "1"},
            )
        ),
        (FirstToken(1, ASKED, sets()).to_bytes(), "got 0 sets, expected one"),
        (msgspec.msgpack.encode({**FIELDS, "sets": {**FIELDS["sets"], "spans": []}}), "expected one"),
        (replace(WRITTEN, version="0.0.1").to_bytes(), "has sglang-topp 0.0.1"),
    ],
)
def test_what_is_not_whole_is_an_error(body: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        FirstToken.from_bytes(body)


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
    assert {**first_token_inputs(SimpleNamespace(**other)), "top_logprobs_p": "0.9"} == INPUTS
