"""Arguments of `generate` and `score`: every accepted form becomes requests, and wrong values are named."""

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from types import MappingProxyType

import numpy as np
import pytest
import torch

from sglang_topp.errors import InvalidInputError
from sglang_topp_client.requests import build_sample_requests, build_score_requests
from tests.client.conftest import sample

USER = {"role": "user", "content": "Hi"}
TOOL_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
HUGE = 10**400


def values_of(groups: Mapping[str, list]) -> list:
    return [value for group in groups.values() for value in group]


# -- prompts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("hi", ["hi"]),
        (["hi", "there"], ["hi", "there"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        ([[1, 2], (3,)], [[1, 2], [3]]),
        (np.array([1, 2], np.int64), [[1, 2]]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([np.array([1, 2], np.int32)], [[1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        (torch.tensor([1, 2]), [[1, 2]]),
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([torch.tensor([1, 2])], [[1, 2]]),
        ([USER], [(USER,)]),
        ((USER, USER), [(USER, USER)]),
        ([[USER]], [(USER,)]),
        ([[USER], (USER, TOOL_CALL)], [(USER,), (USER, TOOL_CALL)]),
        ([MappingProxyType(USER)], [(USER,)]),
        ([{"role": "user", "content": []}], [({"role": "user", "content": []},)]),
    ],
)
def test_every_form_of_prompts(prompts, expected):
    planned = build_sample_requests(prompts, {"n": 2}, None)
    assert [one.prompt for one in planned] == expected
    assert [one.prompt_index for one in planned] == list(range(len(expected)))
    assert all(one.samples == (0, 1) for one in planned)
    assert all(type(token) is int for one in planned if isinstance(one.prompt, list) for token in one.prompt)


WRONG_PROMPTS = {
    "of no kind": [None, 5, b"hi", {"a": 1}, [None], [["a"]], [[None]], [[[1]]]],
    "empty": [[], "", ["hi", ""], [[]], [[1], []]],
    "mixed": [["hi", [1]], [[1], "hi"], [[1], 2]],
    "no ids": [[1.5], [[1.0]], [-1], [2**31], [[1, 2**31]]],
    "arrays": [np.array(5), torch.tensor(5), torch.zeros(2, device="meta")],
}


@pytest.mark.parametrize("prompts", values_of(WRONG_PROMPTS))
def test_wrong_prompts_are_named(prompts):
    with pytest.raises(InvalidInputError, match="prompts"):
        build_sample_requests(prompts, None, None)


@pytest.mark.parametrize("prompts", [[True, False], [[True]], [True, 2], [[1, 2], [3, False]]])
def test_booleans_are_no_token_ids(prompts):
    with pytest.raises(InvalidInputError, match=r"prompts.*got a boolean, expected token ids"):
        build_sample_requests(prompts, None, None)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([USER, "Hi"], "prompts[1]: got str, expected a chat message with role and content"),
        ([[USER], "Hi"], "prompts[1]: got 'Hi' among chats, expected a list of messages"),
        ([[USER], [1, 2]], "prompts[1][0]: got int, expected a chat message"),
        ([[1, 2], [USER]], "prompts[1]: got object of shape [1], expected one or more token ids"),
        ([[USER], []], "prompts[1]: got [] among chats"),
        ([{"content": "Hi"}], "prompts[0].role: got None, expected text, such as 'user'"),
        ([{"role": 1, "content": "Hi"}], "prompts[0].role: got 1"),
        ([{"role": "user", "content": 5}], "prompts[0].content: got int, expected text or parts of text"),
        ([{"role": "user", "content": ["Hi"]}], "prompts[0].content[0]: got a part of type None"),
        ([{"role": "user", "content": "\ud800"}], "prompts[0]: got text with a lone surrogate"),
        ([{"role": "user", "content": "", "x": float("nan")}], "prompts[0]: cannot be sent as JSON"),
        ([{"role": "user", "content": "", "x": {1}}], "prompts[0]: cannot be sent as JSON"),
    ],
)
def test_wrong_messages_are_named(prompts, message):
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)}"):
        build_sample_requests(prompts, None)


@pytest.mark.parametrize(
    "kind", ["image_url", "image", "video_url", "video", "input_audio", "audio_url", "audio", "file"]
)
def test_media_parts_are_refused_by_name(kind):
    chat = [USER, {"role": "user", "content": [{"type": "text", "text": "What is it?"}, {"type": kind}]}]
    message = f"prompts[0][1].content[1]: got a part of type '{kind}', expected 'text'; the client sends no"
    with pytest.raises(InvalidInputError, match=f"^{re.escape(message)} images, audio, or video"):
        build_sample_requests([chat], None)


@pytest.mark.parametrize(
    "name", ["image_data", "video_data", "audio_data", "images", "modalities", "multi_modal_data"]
)
def test_media_fields_are_refused_by_name(name):
    media = {name: ["a.png"]}
    for field, prompts, params in (
        ("sampling_params", [1], media),
        (r"sampling_params\[1\]", [[1], [2]], [{}, media]),
        (r"prompts\[0\]", [{"prompt": "What is it?", **media}], None),
    ):
        with pytest.raises(InvalidInputError, match=f"^{field}: got {name}, expected text only; the client"):
            build_sample_requests(prompts, params)
    assert build_sample_requests([1], {name: None})[0].sampling_params == {name: None}


# -- parameters ------------------------------------------------------------------------------------


def test_sampling_params_for_all_or_one_each():
    given = {"n": 3, "temperature": 0.5}
    shared = build_sample_requests([[1], [2]], given, 0.9)
    assert [one.samples for one in shared] == [(0, 1, 2)] * 2
    assert all(one.sampling_params == {"temperature": 0.5} for one in shared)
    assert given == {"n": 3, "temperature": 0.5}
    each = build_sample_requests([[1], [2]], [{"n": 2}, {"top_p": 0.5}], [0.9, None])
    assert [one.samples for one in each] == [(0, 1), (0,)]
    assert [one.top_logprobs_p for one in each] == [0.9, None]
    assert build_sample_requests([1], {"n": None}, None)[0].samples == (0,)


WRONG_PARAMS = {
    "n": [{"n": 0}, {"n": -1}, {"n": 1.5}, {"n": "2"}, {"n": True}, [{}, {"n": 0}]],
    "no JSON": [{"stop": object()}, {"temperature": float("nan")}, {"logit_bias": {"1": float("inf")}}],
    "no mappings": ["top_p", 3, [{}], [{}, {}, {}], [{}, None]],
}


@pytest.mark.parametrize("params", values_of(WRONG_PARAMS))
def test_wrong_sampling_params_are_named(params):
    with pytest.raises(InvalidInputError, match="sampling_params"):
        build_sample_requests([[1], [2]], params, None)


@pytest.mark.parametrize(
    ("p", "expected"),
    [
        *((none, None) for none in (None, 0, 0.0, [0, None])),
        *((one, 1.0) for one in (1, 1.0, np.float32(1.0), [1.0, 1])),
    ],
)
def test_thresholds_for_all_or_one_each(p, expected):
    assert [one.top_logprobs_p for one in build_sample_requests([[1], [2]], None, p)] == [expected] * 2


WRONG_THRESHOLDS = {
    "no numbers": ["0.9", True, {}, np.complex64(0.5), {0.5: 1}, {0.5}],
    "out of range": [-0.1, 1.1, float("nan"), HUGE, -HUGE, 10**5000, Fraction(HUGE, 3)],
    "lists": [[0.9], [0.9] * 3, [0.9, "x"], [0.9, 2]],
}


@pytest.mark.parametrize("p", values_of(WRONG_THRESHOLDS), ids=lambda p: type(p).__name__)
@pytest.mark.parametrize(
    "make",
    [lambda p: build_sample_requests([[5], [6]], None, p), lambda p: build_score_requests([[5], [6]], p)],
)
def test_wrong_thresholds_are_named(p, make):
    with pytest.raises(InvalidInputError, match="top_logprobs_p"):
        make(p)


def test_a_threshold_array_without_a_dimension_is_named():
    with pytest.raises(InvalidInputError, match="top_logprobs_p: got ndarray, expected a number from 0 to 1"):
        build_sample_requests([1], None, np.array(0.9))


def test_a_threshold_or_the_sampler_makes_the_sets():
    def sources(*given):
        return [one.top_logprobs_source for one in build_sample_requests(["a", "b"], None, *given)]

    assert sources() == [None, None]
    assert sources(0.9) == ["distribution"] * 2
    assert sources([0.9, 0], "distribution") == ["distribution", None]
    assert sources(None, "sampler") == ["sampler"] * 2
    assert sources([None, 0.5], ["sampler", None]) == ["sampler", "distribution"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0.9, "sampler"), "got 'sampler' and top_logprobs_p 0.9, expected one of them"),
        (([None, 0.9], ["distribution", "sampler"]), "expected one of them"),
        ((None, "nucleus"), "got 'nucleus', expected 'distribution', 'sampler', or None"),
        ((None, 7), "top_logprobs_source"),
        ((None, ["sampler"]), "got 1 values for 2 prompts"),
        ((None, ["sampler", 1.0]), "got 1.0, expected"),
    ],
)
def test_a_source_that_makes_no_sense_is_named(given, message):
    with pytest.raises(InvalidInputError, match=message):
        build_sample_requests(["a", "b"], None, *given)


# -- scores ----------------------------------------------------------------------------------------


def starts(*args, **kwargs):
    return [one.start for one in build_score_requests(*args, **kwargs)]


def test_one_request_for_each_sequence():
    first, second = build_score_requests([[5, 6], [7, 8, 9]], [0.5, None], [1, 2])
    assert (first.prompt_index, first.prompt, first.start, first.samples) == (0, [5, 6], 1, (0,))
    assert (second.prompt_index, second.prompt, second.start, second.samples) == (1, [7, 8, 9], 2, (0,))
    assert [one.top_logprobs_p for one in (first, second)] == [0.5, None]
    assert [one.top_logprobs_source for one in (first, second)] == ["distribution", None]
    # The request generates no token. Scores are at temperature 1.
    assert first.sampling_params == {"max_new_tokens": 0, "temperature": 1.0}


def test_everything_but_the_first_token_is_scored_unless_told():
    assert starts("text") == starts([5]) == [1]
    assert starts([[5, 6], [7, 8]]) == [1, 1]
    assert starts([[5, 6], [7, 8]], start=2) == starts([[5, 6], [7, 8]], start=np.int64(2)) == [2, 2]
    assert starts([[5, 6], [7, 8], [9]], start=[None, 2, None]) == [1, 2, 1]
    assert starts(["a", "b"], start=np.array([3, 4])) == [3, 4]


def test_a_rollout_is_scored_from_its_first_generated_token():
    rollouts = [sample([5, 6], 0), sample([7, 8, 9], 1)]
    first, second = build_score_requests(rollouts, 0.9)
    assert first.prompt == [5, 6, *rollouts[0].output_ids]
    assert (first.start, second.start) == (2, 3)
    assert build_score_requests(rollouts[0])[0] == build_score_requests([rollouts[0]])[0]
    assert starts(rollouts, start=1) == [1, 1]
    assert starts(tuple(rollouts), start=[None, 4]) == [2, 4]
    # The prefix is in the cache of the server that generated the rollout.
    made = replace(rollouts[0], routing_key="key")
    assert [one.routing_key for one in build_score_requests([made, rollouts[1]])] == ["key", ""]
    # The rollout has no generated token, so there is no position to score.
    empty = replace(rollouts[0], output_ids=np.empty(0, np.int32))
    assert starts(empty) == [2]


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (0, "start: got 0, expected a position of 1 or more, or None: the token at position 0 has no"),
        (-1, "start: got -1, expected a position"),
        (4, "start: got 4, expected at most 3, the number of the sequence's tokens"),
        (HUGE, "start: got a number of"),
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
        build_score_requests([[5, 6, 7], [5, 6, 7]], start=start)


@pytest.mark.parametrize(
    ("sequences", "words"),
    [
        ([], "sequences: got none"),
        (None, "sequences: got NoneType"),
        (5, "sequences: got int"),
        ("", "sequences: got an empty text"),
        (["a", ""], r"sequences\[1\]: got an empty text"),
        ("\ud800", "sequences: got text with a lone surrogate"),
        (["a", [5]], r"sequences\[1\]: got list among texts"),
        ([[5], []], r"sequences\[1\]: got"),
        ([[5], [-1]], r"sequences\[1\]: got ids from -1"),
        ([[True]], r"sequences\[0\]: got a boolean"),
        (b"ab", "sequences: got bytes"),
        ([sample([5], 0), [5, 6]], r"sequences\[1\]: got list among Rollouts"),
        ([[USER]], "sequences: got chat messages"),
    ],
)
def test_wrong_sequences_are_named(sequences, words):
    with pytest.raises(InvalidInputError, match=words):
        build_score_requests(sequences)
