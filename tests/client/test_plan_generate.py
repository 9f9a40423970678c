"""Arguments of `generate`: every accepted form becomes requests, and wrong values are named."""

import numpy as np
import pytest
import torch

from sglang_topp.errors import InvalidInputError
from sglang_topp_client.requests import plan


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
    ],
)
def test_every_form_of_prompts(prompts, expected):
    planned = plan(prompts, None, None)
    assert [one.prompt for one in planned] == expected
    assert [one.prompt_index for one in planned] == list(range(len(expected)))
    assert all(
        type(token) is int for one in planned for token in one.prompt if not isinstance(one.prompt, str)
    )


@pytest.mark.parametrize(
    "prompts",
    [
        None,
        5,
        [],
        "",
        ["hi", ""],
        [[]],
        [[1], []],
        ["hi", [1]],
        [[1], "hi"],
        [1.5],
        [[1.0]],
        [True, False],
        [[True]],
        [-1],
        [2**31],
        [[1, 2**31]],
        [[[1]]],
        [None],
        [[None]],
        [[1], 2],
        b"hi",
        {"a": 1},
        [["a"]],
    ],
)
def test_wrong_prompts_are_named(prompts):
    with pytest.raises(InvalidInputError, match="prompts"):
        plan(prompts, None, None)


def test_sampling_params_for_all_or_one_each():
    shared = plan([[1], [2]], {"n": 3, "temperature": 0.5}, 0.9)
    assert [one.samples for one in shared] == [(0, 1, 2)] * 2
    assert all(one.sampling_params == {"temperature": 0.5} for one in shared)
    each = plan([[1], [2]], [{"n": 2}, {"top_p": 0.5}], [0.9, None])
    assert [one.samples for one in each] == [(0, 1), (0,)]
    assert [one.top_logprobs_p for one in each] == [0.9, None]
    assert plan([1], {"n": None}, None)[0].samples == (0,)


def test_the_callers_mapping_is_not_changed():
    given = {"n": 2, "top_p": 0.5}
    plan([1], given, None)
    assert given == {"n": 2, "top_p": 0.5}


@pytest.mark.parametrize(
    "params",
    [
        {"n": 0},
        {"n": -1},
        {"n": 1.5},
        {"n": "2"},
        {"n": True},
        {"stop": object()},
        {"temperature": float("nan")},
        {"logit_bias": {"1": float("inf")}},
        "top_p",
        3,
        [{}],
        [{}, {}, {}],
        [{}, None],
        [{}, {"n": 0}],
    ],
)
def test_wrong_sampling_params_are_named(params):
    with pytest.raises(InvalidInputError, match="sampling_params"):
        plan([[1], [2]], params, None)


@pytest.mark.parametrize("p", [None, 0, 0.0, [0, None]])
def test_no_threshold_means_no_sets(p):
    assert [one.top_logprobs_p for one in plan([[1], [2]], None, p)] == [None, None]


@pytest.mark.parametrize("p", [1, 1.0, np.float32(1.0), [1.0, 1]])
def test_thresholds_for_all_or_one_each(p):
    assert [one.top_logprobs_p for one in plan([[1], [2]], None, p)] == [1.0, 1.0]


@pytest.mark.parametrize(
    "p", [-0.1, 1.1, float("nan"), "0.9", True, [0.9], [0.9] * 3, [0.9, "x"], [0.9, 2], {}]
)
def test_wrong_thresholds_are_named(p):
    with pytest.raises(InvalidInputError, match="top_logprobs_p"):
        plan([[1], [2]], None, p)


@pytest.mark.parametrize("prompts", [[True, 2], [[1, 2], [3, False]]])
def test_booleans_are_no_token_ids(prompts):
    with pytest.raises(InvalidInputError, match="got a boolean, expected token ids"):
        plan(prompts, None, None)


@pytest.mark.parametrize("prompts", [np.array(5), torch.tensor(5), torch.zeros(2, device="meta")])
def test_arrays_that_are_not_prompts_are_refused(prompts):
    with pytest.raises(InvalidInputError, match="prompts: "):
        plan(prompts, None, None)


def test_a_threshold_array_without_a_dimension_is_named():
    with pytest.raises(InvalidInputError, match="top_logprobs_p: got ndarray, expected a number from 0 to 1"):
        plan([1], None, np.array(0.9))


def test_a_threshold_or_the_sampler_makes_the_sets():
    def sources(*given):
        return [one.top_logprobs_source for one in plan(["a", "b"], None, *given)]

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
        plan(["a", "b"], None, *given)
