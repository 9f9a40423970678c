r"""Compute an upper bound on the search time of a stop regex, so that slow patterns can be refused.

After each token, SGLang runs `re.search` over the end of the answer. The regex search runs in the scheduler,
while all other requests wait. Python's `re` backtracks: the search time of `(.*)*x` is exponential in the
answer's length, and the search time of `.*.*x` is cubic. To be accepted, a stop regex must follow four rules:

1. Every quantifier has an upper bound: `?`, `{n}`, or `{m,n}`. The quantifiers `*`, `+`, and `{m,}` are
   refused.
2. A quantifier may repeat only a character, a character class, or an escape. A quantifier may make a group
   optional, `(...)?`, but must not repeat the group.
3. The regex has no backreferences, and no verbose syntax (`(?x)`).
4. After each token, the searches for all stop regexes of a request take at most `MAX_STEPS` steps in total.

A step is one try to match one element of a regex, such as a character or a group, at one position in the
text. The elements inside a group count too. `search_steps` computes an upper bound on the steps of one
search. A character with a quantifier `{m,n}` can match in n - m + 1 ways, and a group with k alternatives in
k ways. From one start position, the search can therefore reach an element several times. The number of times
is at most the product of the ways of all earlier elements. Each time, the element takes one step, or up to n
steps with a quantifier `{m,n}`. `search_steps` adds the steps of all elements, and multiplies the sum by the
number of start positions.

The bound also counts combinations of matches that cannot occur together. It can therefore be too high, so
some harmless regexes are refused.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

__all__ = ["MAX_STEPS", "search_steps"]

MAX_STEPS = 2e7
"""The maximum total of `search_steps` for all stop regexes of a request.

After each token, SGLang searches for all stop regexes of the request. On 4,000 random patterns within this
limit, Python's `re` took at most 11 ns per step, which is 0.2 s for `MAX_STEPS` steps.
"""

_TOKEN = re.compile(
    r"""
      (?P<nothing> \(\?\#[^)]*\) | \(\?[a-zA-Z]+\) )  # a comment, or flags
    | (?P<backreference> \\[1-9] | \(\?P= )
    | (?P<open> \( (?: \? (?: [a-zA-Z-]*: | <?[=!] | > | P<\w+> | \(\w+\) ) )? )
    | (?P<close> \) )
    | (?P<bar> \| )
    | (?P<repeat> (?: [*+?] | \{(?!\}) (?P<low>\d*) (?P<comma>,?) (?P<high>\d*) \} ) [?+]? )
    | \[\^?\]? (?: \\. | [^\\\]] )* \]  # a class
    | \\. | .
    """,
    re.VERBOSE | re.DOTALL,
)


@lru_cache(maxsize=256)  # the requests of a batch often share one stop regex
def search_steps(pattern: str, num_chars: int) -> float:
    """Return an upper bound on the steps of one `re.search` for `pattern`.

    The bound is infinity if the pattern breaks one of rules 1 to 3 in the module's docstring.

    Args:
        pattern: a regular expression in the syntax of Python's `re`.
        num_chars: the length of the longest text to search.

    Raises:
        re.error: the pattern is not valid.
    """
    try:
        is_verbose = re.compile(pattern).flags & re.VERBOSE or re.search(r"\(\?\w*x", pattern)
    except (RecursionError, OverflowError):
        return math.inf
    if is_verbose:
        return math.inf
    # `ways` counts the ways to match the pattern up to `token`, from one start position. `steps` counts the
    # steps that the regex engine needs to try all these ways.
    ways, steps = 1.0, 1.0
    alternatives, after_group = [1], False
    for token in _TOKEN.finditer(pattern):
        low, high = 1.0, 1.0
        if token["nothing"]:
            continue
        if token["backreference"]:
            return math.inf
        if token["open"]:
            alternatives.append(1)
        elif token["bar"]:
            alternatives[-1] += 1
        elif token["close"]:
            ways *= alternatives.pop()
        elif token["repeat"]:
            low, high = _counts(token)
            if high == math.inf or (high > 1 and after_group):
                return math.inf
            low, high = min(low, num_chars), min(high, num_chars)
        steps += ways * max(1, high)
        ways *= high - low + 1
        after_group = bool(token["close"])
    return (num_chars + 1) * (steps + ways * alternatives[0])


def _counts(repeat: re.Match[str]) -> tuple[float, float]:
    """Return the smallest and the largest number of repetitions that a quantifier allows."""
    if repeat["low"] is None:
        return 0, 1 if repeat["repeat"][0] == "?" else math.inf
    low = int(repeat["low"] or 0)
    if not repeat["comma"]:
        return low, low
    return low, int(repeat["high"]) if repeat["high"] else math.inf
