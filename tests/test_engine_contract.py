"""Requests that would end the engine are refused; requests that SGLang serves or refuses itself pass.

The bound on a stop regex's search is never below the steps of `re`, and infinite if a rule is broken.
"""

from __future__ import annotations

import math
import random
import re
import sys
import time
from typing import Any

import numpy as np
import pytest

from sglang_topp.engine_contract import (
    MAX_STEPS,
    Model,
    check_sampling_params,
    check_token_ids,
    overlong_param,
    overlong_text,
    search_steps,
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


@pytest.mark.parametrize(
    "ids", [[], [0], [511, 0], np.array([], np.int64), np.array([5], np.uint8), [np.int64(5)]]
)
def test_ids_of_the_vocabulary_pass(ids: Any) -> None:
    check_token_ids("prompts", ids, 512)


def test_no_python_code_runs_per_id() -> None:
    assert steps_of_python([5] * 100_000) == steps_of_python([5] * 10)


def steps_of_python(ids: list[int]) -> int:
    """Return the number of calls and lines of Python that the check of `ids` runs."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        # Finalizers of other tests' objects may run too.
        count += frame.f_globals["__name__"].startswith("sglang_topp.")
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


NUM_CHARS = 4096


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "END",
        r"\n\n",
        r"</answer>\s{0,20}",
        "(Question|Observation|Human):",
        r"\n(Q|A)\d{1,3}[.:]",
        r"^(foo|bar|baz)$",
        "[a-z]{1,20};",
        r"(?:the )?answer(?: is)??:",
        r"[^][|*+?]{0,9}\]",
        "a{b}{2}",
        r"\*{3}|\+",
        r"(?i:stop|halt)\b",
        "(?=END)E",
        "(a)?(?(1)b|c)",
        "a{4294967294}",
    ],
)
def test_stop_patterns_that_people_write_pass(pattern: str) -> None:
    assert search_steps(pattern, NUM_CHARS) <= MAX_STEPS


@pytest.mark.parametrize(
    ("pattern", "victim"),
    [
        ("(a+)+b", "a" * 22),
        ("(?:a|a)*b", "a" * 20),
        ("(?:a|.)*b", "a" * 20),
        ("(?i:aa|Aa)*b", "a" * 40),
        ("(?:.|\\s)" * 20 + "~", "a" * 30),
        ("(.*)*(.*)*x", ""),
        (".*.*.*.*x", "a" * 60),
        ("(?=(a+)+b)c", "a" * 22),
        ("(?:a?){60}a{60}b", "a" * 24),
        ("((((a{1,99}){1,99}){1,99}){1,99})", ""),
        ("(?:ab|)*(?:ab|)*(?:ab|)*c", ""),
    ],
)
def test_patterns_that_explode_do_not(pattern: str, victim: str) -> None:
    assert search_steps(pattern, NUM_CHARS) > MAX_STEPS
    # The bound for this text holds too: `re` makes at least 10 million steps per second.
    start = time.thread_time()
    re.search(pattern, victim)
    assert time.thread_time() - start < search_steps(pattern, len(victim)) / 1e6 + 1


@pytest.mark.parametrize("pattern", ["(" * 5000 + ")" * 5000, "(?:a|b" * 3000 + ")" * 3000])
def test_nesting_that_cannot_be_told_is_infinite(pattern: str) -> None:
    assert search_steps(pattern, NUM_CHARS) == math.inf


@pytest.mark.parametrize("pattern", ["(", "[", "a{2,1}", "(?P<n>a)(?P<n>b)", "\\"])
def test_what_is_no_pattern_is_an_error(pattern: str) -> None:
    with pytest.raises(re.error):
        search_steps(pattern, NUM_CHARS)


@pytest.mark.parametrize(
    "pattern",
    [
        "a*",
        "a+?",
        "a{3,}",
        "a{,}",
        "(?:a){2}",
        "(?P<n>ab){0,2}?",
        "(ab)(?#no part of the pattern){2}",
        "(?x)(ab) {2}",
        "(?sx:(ab) {2})",
        r"(a)\1",
        "(?P<n>a)(?P=n)",
    ],
)
def test_what_the_rules_exclude_is_infinite(pattern: str) -> None:
    re.compile(pattern)
    assert search_steps(pattern, NUM_CHARS) == math.inf


def test_steps_count_the_ways_to_match() -> None:
    def ways(pattern: str) -> float:
        return search_steps(pattern, 999) / 1000

    assert ways("ab") == 1 + 2 + 1
    assert ways("a{2,5}b") == 1 + 1 + 5 + 4 + 4
    assert ways("a{0,9}b{0,9}c") == 1 + 1 + 9 + 10 + 90 + 100 + 100
    assert ways("a|b|c") == 1 + 5 + 3
    assert ways("(?:a|b)?") == 1 + 1 + 1 + 1 + 1 + 2 + 2 + 4


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    """Return a random pattern that rules 1 to 3 allow."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        if depth and rng.random() < 0.35:
            branches = "|".join(random_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3)))
            opened = rng.choice(["(", "(?:", "(?=", "(?!", "(?>", "(?i:"])
            parts.append(f"{opened}{branches}){rng.choice(['', '', '?', '??'])}")
        else:
            low = rng.choice([0, 0, 1, 5, 100])
            high = low + rng.choice([0, 1, 9, 50, 1000])
            repeat = f"{{{low},{high}}}{rng.choice(['', '?', '+'])}"
            parts.append(rng.choice(["a", "b", "[ab]", "[^c]", ".", r"\w"]) + rng.choice(["", "?", repeat]))
    return "".join(parts)


def test_a_search_takes_no_more_time_than_its_steps() -> None:
    """The slowest measured step took some 10 ns. The limit is ten times that, for busy machines."""
    rng, num_chars, num_tried = random.Random(0), 2000, 0
    texts = ["a" * num_chars, "ab" * (num_chars // 2), "".join(rng.choice("ab ") for _ in range(num_chars))]
    while num_tried < 300:
        pattern = random_pattern(rng) + rng.choice(["~", ""])
        steps = search_steps(pattern, num_chars)
        assert steps < math.inf
        if steps > MAX_STEPS:
            continue
        num_tried += 1
        for text in texts:
            start = time.thread_time()
            re.search(pattern, text)
            assert time.thread_time() - start < steps * 1e-7 + 0.01, pattern
