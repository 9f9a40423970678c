"""Arguments of `score`: every accepted form becomes requests, and wrong values are named."""

from dataclasses import replace

import numpy as np
import pytest

from sglang_topp.errors import InvalidInputError
from sglang_topp_client.requests import plan_scores


def starts(*args, **kwargs):
    return [one.start for one in plan_scores(*args, **kwargs)]


def test_one_request_for_each_sequence():
    first, second = plan_scores([[5, 6], [7, 8, 9]], [0.5, None], [1, 2])
    assert (first.prompt_index, first.prompt, first.start, first.samples) == (0, [5, 6], 1, (0,))
    assert (second.prompt_index, second.prompt, second.start, second.samples) == (1, [7, 8, 9], 2, (0,))
    assert [one.top_logprobs_p for one in (first, second)] == [0.5, None]
    assert [one.top_logprobs_source for one in (first, second)] == ["distribution", None]
    # The request generates no token. Scores are at temperature 1.
    assert first.sampling_params == {"max_new_tokens": 0, "temperature": 1.0}


def test_everything_but_the_first_token_is_scored_unless_told():
    assert starts("text") == starts([5]) == [1]
    assert starts([[5, 6], [7, 8]]) == [1, 1]
    assert starts([[5, 6], [7, 8]], start=2) == [2, 2]
    assert starts([[5, 6], [7, 8], [9]], start=[None, 2, None]) == [1, 2, 1]
    assert starts(["a", "b"], start=np.array([3, 4])) == [3, 4]
    assert starts([[5, 6], [7, 8]], start=np.int64(2)) == [2, 2]


def test_a_rollout_is_scored_from_its_first_generated_token(fakes):
    rollouts = [fakes.sample([5, 6], 0), fakes.sample([7, 8, 9], 1)]
    first, second = plan_scores(rollouts, 0.9)
    assert first.prompt == [5, 6, *rollouts[0].output_ids]
    assert (first.start, second.start) == (2, 3)
    assert plan_scores(rollouts[0])[0] == plan_scores([rollouts[0]])[0]
    assert starts(rollouts, start=1) == [1, 1]
    assert starts(tuple(rollouts), start=[None, 4]) == [2, 4]
    # The prefix is in the cache of the server that generated the rollout.
    made = replace(rollouts[0], routing_key="key")
    assert [one.routing_key for one in plan_scores([made, rollouts[1]])] == ["key", ""]
    # The rollout has no generated token, so there is no position to score.
    empty = replace(rollouts[0], output_ids=np.empty(0, np.int32))
    assert starts(empty) == [2]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (0, "start: got 0, expected a position of 1 or more, or None: the token at position 0 has no"),
        (-1, "start: got -1, expected a position"),
        (4, "start: got 4, expected at most 3, the number of the sequence's tokens"),
        (10**400, "start: got a number of"),
        (True, "start: got True, expected a position"),
        (1.0, "start: got 1.0, expected a position"),
        ("1", "start: got '1', expected a position"),
        ([1], "start: got 1 values for 2 sequences"),
        ([1, 0], r"start\[1\]: got 0, expected a position of 1 or more"),
        ([1, True], r"start\[1\]: got True, expected a position"),
        ([1, [2]], r"start\[1\]: got \[2\], expected a position"),
        ([4, 1], r"start\[0\]: got 4, expected at most 3"),
        ({1: 1, 2: 2}, "start: got {1: 1, 2: 2}, expected a position of 1 or more"),
        (np.array(1.5), r"start: got array\(1.5\), expected a position of 1 or more"),
        (np.array([1.0, 1.0]), r"start\[0\]: got .*1.0.*, expected a position"),
    ],
)
def test_a_wrong_start_is_named(start, words):
    with pytest.raises(InvalidInputError, match=words):
        plan_scores([[5, 6, 7], [5, 6, 7]], start=start)


@pytest.mark.parametrize(
    ("sequences", "words"),
    [
        ([], "sequences: got none"),
        (None, "sequences: got NoneType"),
        (5, "sequences: got int"),
        ("", "sequences: got an empty text"),
        (["a", ""], r"sequences\[1\]: got an empty text"),
        ("\ud800", "sequences: got text with a lone surrogate"),
        (["a", [5]], "sequences: got text and token ids"),
        ([[5], []], r"sequences\[1\]: got"),
        ([[5], [-1]], r"sequences\[1\]: got ids from -1"),
        ([[True]], r"sequences\[0\]: got a boolean"),
        (b"ab", "sequences: got bytes"),
    ],
)
def test_wrong_sequences_are_named(sequences, words):
    with pytest.raises(InvalidInputError, match=words):
        plan_scores(sequences)


def test_rollouts_and_texts_in_one_request_are_refused(fakes):
    with pytest.raises(InvalidInputError, match=r"sequences\[1\]: got list among Rollouts"):
        plan_scores([fakes.sample([5], 0), [5, 6]])


@pytest.mark.parametrize("p", [1.5, "0.5", [0.5], True, float("nan")])
def test_a_wrong_threshold_is_named(p):
    with pytest.raises(InvalidInputError, match="top_logprobs_p"):
        plan_scores([[5], [6]], p)
