"""The soak's answer checks detect each kind of fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp.formats import encode_top_p
from tests.soak.answer_checks import check_chunk, check_support
from tests.soak.random_requests import Ask
from tests.soak.report import Report, table

ASK = Ask("ab", 0.9, {"n": 1, "max_new_tokens": 2})
SETS = (([7, 3, 5], [0.6, 0.25, 0.1]), ([4, 9], [0.7, 0.25]))


def chunk(sets: Any = SETS, with_sets: bool = True) -> dict[str, Any]:
    """Return a rollout of the tokens 3 and 4 with these sets."""
    reported = [[float(np.log(np.float32(p))), token, None] for token, p in ((3, 0.25), (4, 0.7))]
    meta_info: dict[str, Any] = {
        "completion_tokens": 2,
        "finish_reason": {"type": "length"},
        "output_token_logprobs": reported,
    }
    if with_sets:
        ids = np.concatenate([np.array(ids, np.int32) for ids, _ in sets])
        logprobs = np.concatenate([np.log(np.array(probs, np.float32)) for _, probs in sets])
        meta_info |= encode_top_p("output", ids, logprobs, [len(ids) for ids, _ in sets])
    return {"output_ids": [3, 4], "meta_info": meta_info}


def counted(answer: dict[str, Any]) -> tuple[int, int, int]:
    """Return how the checks count it: faults, misses, misplaced."""
    report = Report("test")
    try:
        assert check_chunk(answer, ASK)
    except Exception as error:
        report.failed(error, ASK)
        assert report.problems()
        assert "test" in table([report])
    return report.faults, report.misses, report.misplaced


def test_an_answer_as_it_should_be_passes() -> None:
    assert counted(chunk()) == (0, 0, 0)


@pytest.mark.parametrize(
    "sets",
    [
        SETS[::-1],  # each position has the other's set
        (([7, 3, 5], [0.6, 0.2, 0.1]), SETS[1]),  # another log-prob than the reported one
        (([7, 2, 5], [0.6, 0.25, 0.1]), SETS[1]),  # without its token
        (([7, 3], [0.6, 0.25]), SETS[1]),  # less than p
        (([7, 3, 5, 1, 2], [0.6, 0.25, 0.1, 0.03, 0.02]), SETS[1]),  # more than p
    ],
)
def test_sets_that_are_not_this_tokens_are_misplaced(sets: Any) -> None:
    assert counted(chunk(sets)) == (0, 0, 1)


def test_no_sets_are_a_miss() -> None:
    assert counted(chunk(with_sets=False)) == (0, 1, 0)


@pytest.mark.parametrize(
    ("sampling", "probs", "is_right"),
    [
        ({"top_p": 0.9}, [0.6, 0.25, 0.1], True),
        ({"top_p": 0.8}, [0.6, 0.25, 0.1], False),  # the last token is below the cutoff
        ({"top_p": 1.0}, [0.6, 0.25, 0.1], False),  # here some tokens are missing
        ({"top_p": 1.0, "top_k": 3}, [0.6, 0.25, 0.1], True),
        ({"top_p": 1.0, "top_k": 2}, [0.6, 0.25, 0.1], False),
        ({"top_p": 1.0, "min_p": 0.15}, [0.6, 0.25, 0.1], True),
        ({"top_p": 1.0, "min_p": 0.2}, [0.6, 0.25, 0.1], False),
        ({"top_p": 0.9, "temperature": 0.0}, [0.6], True),
        ({"top_p": 0.9, "temperature": 0.0}, [0.6, 0.25, 0.1], False),
    ],
)
def test_what_the_filters_keep(sampling: dict[str, Any], probs: list[float], is_right: bool) -> None:
    sets = CandidateSets(range(len(probs)), np.log(np.array(probs)), [0, len(probs)], [0])
    try:
        check_support(sets, {"temperature": 1.0, **sampling})
    except AssertionError:
        assert not is_right
    else:
        assert is_right
