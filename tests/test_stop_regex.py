"""The bound on a stop regex's search: above what Python's `re` really does, infinite where that explodes."""

from __future__ import annotations

import math
import re
import time

import pytest

from sglang_topp.stop_regex import MAX_STEPS, search_steps

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
        r"^(foo|bar|baz)+$",
        "[a-z]+;",
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
    # A bound at the victim's own length too: some 10 million steps a second, at least.
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


def test_alternatives_that_begin_apart_are_gone_into_one_at_a_time() -> None:
    assert search_steps("(?:foo|bar)+x", 100) == pytest.approx(101 * 100)
    assert search_steps("(?:foo|[b]ar){2}x", 100) == pytest.approx(101 * 1)
    assert search_steps("(?:foo|.ar){2}x", 100) == pytest.approx(101 * 4)
