"""Requests that would end the engine are refused; requests that SGLang serves or refuses itself pass."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from sglang_topp.engine_contract.fatal_requests import (
    Model,
    check_sampling_params,
    check_token_ids,
    overlong_param,
    overlong_text,
)
from sglang_topp.errors import InvalidInputError

MODEL = Model(vocab_size=512, context_length=4096, max_token_chars=13)


@pytest.mark.parametrize(
    ("ids", "shown", "position"),
    [
        ([99999], "99999", 0),
        ([3, 512], "512", 1),
        ([3, 4, -1, 600], "-1", 2),
        ([2**63], str(2**63), 0),
        ([1, 2**64], str(2**64), 1),
        ([-(2**63) - 1], str(-(2**63) - 1), 0),
        ([10**5000], "a number of 16610 bits", 0),
        ([1, 2.0], "2.0", 1),
        ([1, "x"], "'x'", 1),
        ([1, None], "None", 1),
        ([True], "True", 0),
        ([[5]], "[5]", 0),
        ([5, [5, 6]], "[5, 6]", 1),
        (np.array([5, 512], np.int32), "512", 1),
        (np.array([5, 2**63], np.uint64), str(2**63), 1),
    ],
)
def test_an_id_beyond_the_vocabulary_is_named(ids: Any, shown: str, position: int) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_token_ids("prompts[3]", ids, 512)
    expected = "expected 0 to 511, the model's vocabulary"
    assert str(caught.value) == f"prompts[3]: got token id {shown} at position {position}, {expected}"


@pytest.mark.parametrize("ids", [[], [0], [511, 0], np.array([], np.int64), np.array([5], np.uint8)])
def test_ids_of_the_vocabulary_pass(ids: Any) -> None:
    check_token_ids("prompts", ids, 512)


def test_no_python_code_runs_per_id() -> None:
    assert steps_of_python([5] * 100_000) == steps_of_python([5] * 10)


def steps_of_python(ids: list[int]) -> int:
    """Return the number of calls and lines of Python that the check of `ids` runs."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        check_token_ids("prompts", ids, 512)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"top_k": 2**31}, ["top_k", "2147483648", "at most 2147483647"]),
        ({"top_k": 2**63}, ["top_k", str(2**63), "64 bits"]),
        ({"max_new_tokens": -(2**63) - 1}, ["max_new_tokens", "64 bits"]),
        ({"sampling_seed": 10**5000}, ["sampling_seed", "a number of 16610 bits"]),
        ({"repetition_penalty": 1e-45}, ["repetition_penalty", "1e-45", "1e-06 to 2"]),
        ({"logit_bias": {"512": 1}}, ["logit_bias", "'512'", "0 to 511"]),
        ({"logit_bias": {"-1": 1}}, ["logit_bias", "'-1'"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias", "'x'"]),
        ({"logit_bias": {"٥": 1}}, ["logit_bias"]),
        ({"logit_bias": {"9" * 5000: 1}}, ["logit_bias", "'9999"]),
        ({"logit_bias": {"5": 10**5000}}, ["logit_bias", "a number of 16610 bits for token 5"]),
        ({"logit_bias": {"5": 1e39}}, ["logit_bias", "1e+39 for token 5", "-1e+30 to 1e+30"]),
        ({"logit_bias": {"5": -1e39}}, ["logit_bias", "-1e+39"]),
        ({"logit_bias": {"5": float("nan")}}, ["logit_bias", "nan"]),
        ({"stop_token_ids": [1, 1000000]}, ["stop_token_ids", "1000000 at position 1", "0 to 511"]),
        ({"stop_token_ids": [[5]], "min_new_tokens": 2}, ["stop_token_ids", "[5] at position 0"]),
        ({"stop_token_ids": [-5], "min_new_tokens": 2}, ["stop_token_ids", "-5 at position 0"]),
        (
            {"stop_token_ids": list(range(300)), "min_new_tokens": 2},
            ["stop_token_ids", "got 300 with min_new_tokens 2", "at most 256"],
        ),
        ({"min_new_tokens": 2, "regex": "a"}, ["min_new_tokens", "got 2 with regex"]),
        ({"min_new_tokens": 2, "json_schema": "{}"}, ["min_new_tokens", "json_schema"]),
        ({"choice": ["a"]}, ["choice", "regex"]),
        ({"stop_regex": "(.*)*x"}, ["stop_regex", "'(.*)*x'", "a bound for every repeat"]),
        ({"stop_regex": "a(?i)"}, ["stop_regex", "no regular expression: global flags"]),
        ({"stop_regex": ["a", "("]}, ["stop_regex", "unterminated subpattern"]),
        (
            {"stop_regex": ["a{0,1000}b", "a{0,1000}c"]},
            ["stop_regex", "2e+07 steps", "answer of 4096 tokens", "at most 2e+07"],
        ),
    ],
)
def test_parameters_that_stop_the_engine_are_refused(params: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_sampling_params("sampling_params[1]", {"temperature": 1.0, **params}, MODEL)
    for word in ["sampling_params[1].", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "n": 4},
        {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"top_k": None, "min_new_tokens": None, "stop": None, "logit_bias": None, "stop_regex": None},
        {"repetition_penalty": 1e-6},
        {"logit_bias": {"0": -100, "511": 1e30}},
        {"stop_token_ids": [0, 511], "min_new_tokens": 5},
        {"stop_token_ids": list(range(512))},
        {"stop": ["END", "\n\n"], "min_new_tokens": 5},
        {"stop_regex": [r"</answer>\s{0,5}", "\\n\\n"]},
        {"json_schema": "{}", "min_new_tokens": 0},
        # SGLang refuses these itself.
        {"top_k": 0},
        {"temperature": -1, "min_p": 7, "no_such_parameter": 1},
        {"top_k": "5", "logit_bias": [1], "stop_token_ids": "abc", "stop": 5},
    ],
)
def test_what_the_engine_serves_or_refuses_by_itself_passes(params: dict[str, Any]) -> None:
    check_sampling_params("sampling_params", params, MODEL)
    assert overlong_param("sampling_params", params) is None


@pytest.mark.parametrize(("depth", "is_refused"), [(63, False), (64, True), (100_000, True)])
def test_parameters_nest_only_so_deep(depth: int, is_refused: bool) -> None:
    value: Any = 1
    for i in range(depth):
        value = [value, 2] if i % 2 else {"a": value}
    params = {"custom_params": {"b": value}}
    if not is_refused:
        return check_sampling_params("sampling_params", params, MODEL)
    with pytest.raises(InvalidInputError, match="custom_params: got more than 64 levels"):
        check_sampling_params("sampling_params", params, MODEL)
    while isinstance(value, list | dict):  # taken apart in a loop, because its destructor would recurse
        value = value[0] if isinstance(value, list) else value["a"]
    return None


def test_texts_have_a_length_that_follows_from_the_context() -> None:
    assert MODEL.max_text_chars == 4096 * 13
    assert overlong_text("prompts", "a" * MODEL.max_text_chars, MODEL) is None
    sentence = overlong_text("prompts[2]", "a" * (MODEL.max_text_chars + 1), MODEL)
    assert sentence is not None
    for word in ("prompts[2]", "53249 characters", "at most 53248", "4096 tokens", "token ids"):
        assert word in sentence
    # A run of blanks can be one token. The bound ignores such long tokens.
    assert Model(512, 131072, 128).max_text_chars == 131072 * 16


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"stop": "x" * 1025}, ["stop", "1025 characters at position 0", "at most 1024"]),
        ({"stop": ["ok", "x" * 60_000_000]}, ["stop", "60000000 characters at position 1"]),
        ({"json_schema": " " * 32769}, ["json_schema", "32769 characters", "at most 32768"]),
        ({"regex": "a" * 32769}, ["regex", "32769"]),
        ({"ebnf": "a" * 32769}, ["ebnf", "32769"]),
        ({"structural_tag": "a" * 32769}, ["structural_tag", "32769"]),
    ],
)
def test_long_texts_among_the_parameters(params: dict[str, Any], words: list[str]) -> None:
    sentence = overlong_param("sampling_params", params)
    assert sentence is not None
    for word in ["sampling_params.", *words]:
        assert word in sentence


@pytest.mark.parametrize(
    "record",
    [
        None,
        {},
        [],
        "yes",
        {"vocab_size": 5, "context_length": 5},
        {"vocab_size": 0, "context_length": 5, "max_token_chars": 1},
        {"vocab_size": True, "context_length": 5, "max_token_chars": 1},
        {"vocab_size": "5", "context_length": 5, "max_token_chars": 1},
    ],
)
def test_a_report_that_is_none_is_none(record: Any) -> None:
    assert Model.from_record(record) is None


def test_a_report_is_read() -> None:
    record = {"vocab_size": 512, "context_length": 4096, "max_token_chars": 13, "later": 1}
    assert Model.from_record(record) == MODEL
