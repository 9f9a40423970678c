"""Bodies of `POST /rollouts`: every accepted form, and errors that name the field."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sglang_topp.errors import BadRequestError
from sglang_topp_client import Rollout, TokenField
from sglang_topp_server.limits import num_bytes_of
from sglang_topp_server.requests import parse_rollouts
from sglang_topp_server.settings import Limits
from tests.server.conftest import refusal

CHAT = {"role": "user", "content": "Hi"}


def parse(limits=None, **fields):
    return parse_rollouts(json.dumps(fields).encode(), limits or Limits())


@pytest.mark.parametrize("prompts", ["a", ["a"], [[97]], [97]])
def test_every_way_to_give_one_prompt(prompts):
    (one,) = parse(prompts=prompts).wanted
    assert one.prompt in ("a", [97])
    assert one.samples == (0,)
    assert one.top_logprobs_p is None


def test_fields_of_tokens_and_where_they_begin():
    fields = {"prompts": [[1, 2], [3]], "top_logprobs_p": 0.9, "return_fields": ["routed_experts"]}
    for given, starts in (([2, None], [2, 0]), (1, [1, 1])):
        wanted = parse(**fields, fields_start=given).wanted
        assert [one.fields_start for one in wanted] == starts
        assert [one.return_fields for one in wanted] == [("routed_experts",)] * 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"return_fields": ["x"]}, "return_fields[0]: got 'x', expected one of 'routed_experts'"),
        ({"on_abort": "x"}, "on_abort: got 'x', expected one of 'raise', 'resume', 'return'"),
        ({"return_fields": ["routed_experts"], "top_logprobs_p": None}, "for prompt 0 without sets"),
        ({"fields_start": -1}, "fields_start: got -1"),
        ({"fields_start": 3}, "fields_start: got 3 with 2 ids"),
        ({"fields_start": [0, 0]}, "fields_start: got 2 values for 1 prompts"),
        ({"prompts": "a", "fields_start": 1}, "fields_start: got 1 with a text"),
        ({"prompts": None, "rollouts": [], "fields_start": 1}, "fields_start: got fields_start and rollouts"),
    ],
)
def test_fields_of_tokens_that_do_not_fit(fields, words):
    with refusal(words):
        parse(**{"prompts": [[1, 2]], "top_logprobs_p": 0.9, **fields})


def test_fields_of_tokens_count_as_memory():
    one, none = np.array([1], np.int32), np.zeros(1, np.float32)
    made = Rollout(0, 0, "r", one, one, "", none, None, "stop", "", 0, 0.0)
    fields = {"routed_experts": TokenField(np.zeros((1, 48, 8), np.uint8), 0)}
    assert num_bytes_of(replace(made, token_fields=fields)) == num_bytes_of(made) + 384


@pytest.mark.parametrize("prompts", [[CHAT], [[CHAT]]])
def test_chat_messages_are_one_prompt(prompts):
    (one,) = parse(prompts=prompts, sampling_params={"n": 3}).wanted
    assert one.prompt == (CHAT,)
    assert one.samples == (0, 1, 2)


def test_samples_of_chats_are_counted_per_conversation():
    limits = Limits(max_samples=8)
    assert len(parse(limits, prompts=[CHAT] * 4, sampling_params={"n": 8}).wanted) == 1
    with pytest.raises(BadRequestError, match="got 16, expected at most 8 samples"):
        parse(limits, prompts=[[CHAT], [CHAT]], sampling_params={"n": 8})


def test_parameters_and_thresholds_are_spread_over_the_prompts():
    request = parse(
        prompts=[[1], [2, 3]], sampling_params=[{"n": 2}, {"temperature": 0}], top_logprobs_p=[0.5, None]
    )
    assert [one.samples for one in request.wanted] == [(0, 1), (0,)]
    assert [one.top_logprobs_p for one in request.wanted] == [0.5, None]
    assert [dict(one.sampling_params) for one in request.wanted] == [{}, {"temperature": 0}]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ["prompts: missing"]),
        ({"prompts": None}, ["prompts", "NoneType"]),
        ({"prompts": [[1], [1.5]]}, ["prompts[1]", "float"]),
        ({"prompts": [[2**31]]}, ["prompts[0]", "2147483648"]),
        ({"prompts": [CHAT], "resumed_tokens": 2}, ["resumed_tokens: got 2 with chat messages as prompt 0"]),
        ({"prompts": "a", "sampling_params": {"image_data": "a.png"}}, ["sampling_params: got image_data"]),
        ({"prompts": "a", "sampling_params": 3}, ["sampling_params", "got 3"]),
        ({"prompts": "a", "sampling_params": [{}, {}]}, ["sampling_params", "2", "1 prompt"]),
        ({"prompts": "a", "sampling_params": {"n": 1.5}}, ["sampling_params", "n: got 1.5"]),
        ({"prompts": "a", "top_logprobs_p": 1.01}, ["top_logprobs_p", "1.01", "from 0 to 1"]),
        ({"prompts": "a", "top_logprobs_p": True}, ["top_logprobs_p", "bool"]),
        (
            {"prompts": "a", "top_logprobs_p": float("nan")},
            ["the body: got", "top_logprobs_p", "JSON is malformed"],
        ),
        ({"prompts": "a", "top_logprobs_p": [0.1, 0.2]}, ["top_logprobs_p", "2", "1 prompt"]),
        ({"prompts": "a", "stream": "yes"}, ["stream: got 'yes', expected bool"]),
        ({"prompts": "a", "request_id": "x" * 513}, ["request_id", "expected at most 512"]),
        ({"prompts": "a", "request_id": "a\nb"}, [r"request_id: got the character '\n', expected printable"]),
        (
            {"prompts": "a", "top_logprobs_p": 10**400},
            ["top_logprobs_p: got a number of 1329 bits", "expected a number from 0 to 1"],
        ),
        ({"prompts": "a", "top_logprobs_p": [-(10**400)]}, ["top_logprobs_p[0]", "from 0 to 1"]),
        ({"prompts": "a", "timeout_s": 10**400}, ["timeout_s: got a number of", "number"]),
        ({"prompts": "a", "timeout_s": 0}, ["timeout_s: got 0, expected float > 0"]),
        ({"prompts": "a", "timeout_s": "5"}, ["timeout_s: got '5', expected float"]),
        ({"prompts": "a", "timeout_s": float("inf")}, ["the body: got", "timeout_s", "JSON is malformed"]),
        ({"prompts": "a", "top_logprob_p": 0.9}, ["top_logprob_p: no such field", "top_logprobs_p"]),
        (
            {"prompts": "a", "sampling_params": {"custom_params": {"top_logprobs_p": 0.9}}},
            ["custom_params.top_logprobs_p"],
        ),
    ],
)
def test_a_wrong_field_is_named(fields, words):
    with refusal(*words):
        parse(**fields)


@pytest.mark.parametrize("body", [b"null", b"3", b'"a"', b"[]"])
def test_a_body_that_is_not_an_object_is_refused(body):
    with refusal("the body: got"):
        parse_rollouts(body, Limits())


@pytest.mark.parametrize(
    ("prompts", "params", "samples"),
    [
        ("a", {"n": 6}, 6),
        ([1, 2, 3], {"n": 6}, 6),
        ([[1], [2]], {"n": 3}, 6),
        (["a", "b"], [{"n": 5}, {}], 6),
    ],
)
def test_samples_are_counted_before_they_are_created(prompts, params, samples):
    assert sum(len(one.samples) for one in parse(prompts=prompts, sampling_params=params).wanted) == samples
    with refusal(f"got {samples}, expected at most 5 samples", status=413):
        parse(Limits(max_samples=5), prompts=prompts, sampling_params=params)


def test_counts_that_would_not_fit_into_memory():
    for params in ({"n": 10**15}, [{"n": 10**15}, {"n": -(10**15)}]):
        with pytest.raises(BadRequestError, match="expected at most 8192"):
            parse(prompts=["a", "b"], sampling_params=params)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": "y" * 10_000},
        {"y" * 10_000: 1},
        {"sampling_params": {"n": 10**400}},
        {"sampling_params": [1] * 10_000},
        {f"field_{i}": 1 for i in range(10_000)},
    ],
)
def test_wrong_values_are_abbreviated(fields):
    with pytest.raises(BadRequestError) as raised:
        parse(prompts="a", **fields)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("deep", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100_000 + "1" + "}" * 100_000])
def test_deep_nesting_is_refused(deep):
    with pytest.raises(BadRequestError, match=r"^the body: got .*, which is not JSON: maximum recursion"):
        parse_rollouts(b'{"prompts":"a","sampling_params":{"x":%s}}' % deep.encode(), Limits())
