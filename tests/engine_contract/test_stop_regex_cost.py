"""The bound on a stop regex's search: never below the steps of `re`, infinite if a rule is broken."""

from __future__ import annotations

import math
import random
import re
import time

import pytest

from sglang_topp.engine_contract.stop_regex_cost import MAX_STEPS, search_steps

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
    start = time.monotonic()
    re.search(pattern, victim)
    assert time.monotonic() - start < search_steps(pattern, len(victim)) / 1e6 + 1


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
