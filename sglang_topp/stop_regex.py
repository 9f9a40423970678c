"""How long may SGLang's search for a stop regex take? Bounded here, before the engine is asked.

SGLang runs `re.search` over the end of every answer after each of its tokens, in the scheduler, where
every other request waits. Python's `re` backtracks: `(.*)*x` takes exponential time, `.*.*x` the third
power of the answer's length. Over a text of `T` characters a search takes at most about

    steps = T x ways

where `ways` counts the paths on which the pattern can match from one place: repetitions give one path
per count, alternatives add up, what stands in sequence multiplies. It is an upper bound: a pattern
beyond it may be harmless, and is brought below it by giving its repetitions bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any

__all__ = ["MAX_STEPS", "search_steps"]

MAX_STEPS = 2e7
"""Steps of one search: a second or two of Python's `re` at its slowest, some 10 million paths a second."""

# Private since 3.11; SGLang itself bounds the length of a match with it.
_parse = re._parser.parse  # type: ignore[attr-defined]  # has no types
_MAX_LOG = 700.0  # the largest that `exp` takes


@lru_cache(maxsize=256)  # of a batch, each prompt may come with the same one
def search_steps(pattern: str, num_chars: int) -> float:
    """An upper bound on the steps of one search, to within a factor; infinite where it nests too deep.

    Args:
        pattern: as Python's `re` takes it.
        num_chars: the length of the longest text that is searched.

    Raises:
        re.error: it is no pattern.
    """
    try:
        log_ways = _in_sequence(_parse(pattern), num_chars)
    except (RecursionError, OverflowError):
        return math.inf
    return (num_chars + 1) * math.exp(log_ways) if log_ways < _MAX_LOG else math.inf


def _in_sequence(items: Any, num_chars: int) -> float:
    """The natural log of the number of paths on which these can match one after the other."""
    return sum(_ways(str(operation), argument, num_chars) for operation, argument in items)


def _ways(operation: str, argument: Any, num_chars: int) -> float:
    match operation:
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            low: int
            low, high, inner = argument
            # A repetition takes a character or more each time: `re` stops at the first that takes none.
            high = min(int(high), max(num_chars, low))
            return math.log(high - low + 1) + high * _in_sequence(inner, num_chars)
        case "BRANCH":
            _, branches = argument
            logs = [_in_sequence(branch, num_chars) for branch in branches]
            highest: float = max(logs)
            if _begin_apart(branches):
                return highest
            return highest + math.log(sum(math.exp(one - highest) for one in logs))
        case "GROUPREF_EXISTS":
            _, first, second = argument
            return max(_in_sequence(first, num_chars), _in_sequence(second or (), num_chars))
        case "SUBPATTERN" | "ASSERT" | "ASSERT_NOT":
            return _in_sequence(argument[-1], num_chars)
        case "ATOMIC_GROUP":
            return _in_sequence(argument, num_chars)
        case _:  # one character, a place, or what a group has matched
            return 0.0


def _begin_apart(branches: Any) -> bool:
    """Whether any two branches begin with different letters, so that at most one of them is gone into."""
    # Folded: the pattern may ignore case.
    starts = sorted("".join(_leading_letters(branch)).casefold() for branch in branches)
    # Where one start begins another, one of those sorted right behind it begins with it too.
    return all(not after.startswith(before) for before, after in pairwise(starts))


def _leading_letters(items: Any) -> Iterator[str]:
    for operation, argument in items:
        if str(operation) != "LITERAL":
            return
        yield chr(argument)
