"""The Arrow columns of rollouts: what each holds, and values that no column can hold."""

from dataclasses import fields, replace

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp.candidates import NO_TOKEN
from sglang_topp.errors import InvalidInputError
from sglang_topp_client import Rollout
from sglang_topp_client.storage.parquet_columns import (
    check_rollout,
    num_bytes_of,
    schema,
    to_batch,
    to_rollouts,
)
from tests.client import conftest as fakes


def test_every_field_has_a_column():
    named = {"candidates": "candidate_ids", "weight_spans": "weight_versions"}
    expected = {named.get(field.name, field.name) for field in fields(Rollout)}
    assert set(schema().names) == expected | {"candidate_logprobs", "candidate_sampled_ids"}


def test_a_row_does_not_keep_the_table_in_memory():
    first, *_ = to_rollouts(to_batch([fakes.sample([5], index) for index in range(3)]))
    sets = first.candidates
    arrays = (first.prompt_ids, first.output_ids, first.logprobs, sets.token_ids, sets.logprobs, sets.offsets)
    for array in arrays:
        owner = array if array.base is None else array.base
        assert owner.base is None
        assert owner.nbytes == array.nbytes


def test_equal_sampled_ids_are_not_stored_twice():
    rollout = fakes.sample([5], 0)
    tool = replace(rollout, candidates=CandidateSets.empty(len(rollout.output_ids)))
    column = to_batch([rollout, tool]).column("candidate_sampled_ids").to_pylist()
    assert column == [None, [NO_TOKEN] * len(rollout.output_ids)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_index": -1}, "prompt_index: got -1"),
        (
            {"cached_tokens": 2**63},
            "cached_tokens: got 9223372036854775808, expected int <= 9223372036854775807",
        ),
        ({"sample_index": True}, "sample_index: got True"),
        ({"text": "\ud800"}, "text: got text with a lone surrogate"),
        ({"text": b"raw"}, "text: got"),
        ({"request_id": None}, "request_id"),
        ({"finish_reason": {"type": "stop"}}, "finish_reason"),
        ({"top_logprobs_source": 1}, "top_logprobs_source: got"),
        ({"output_ids": [1, 2, 3]}, "output_ids: got list, expected int32"),
        ({"output_ids": np.zeros(3, np.int64)}, r"output_ids: got int64 \[3\], expected int32"),
        ({"prompt_ids": np.zeros((1, 2), np.int32)}, r"prompt_ids: got int32 \[1, 2\]"),
        ({"logprobs": np.zeros(3, np.float64)}, "logprobs: got float64"),
        ({"logprobs": np.zeros(2, np.float32)}, "logprobs: got 2 for 3 output_ids"),
        ({"latency_s": None}, "latency_s"),
        ({"candidates": CandidateSets.empty(2)}, "candidates: got 2 positions for 3"),
        ({"weight_spans": (("a", 2),)}, "weight_spans: got .* for 3 output_ids"),
        ({"weight_spans": (("a", 4), ("b", -1))}, r"weight_spans\[1\]\[1\]: got -1"),
        ({"weight_spans": (("\ud800", 3),)}, "weight_spans: got text with a lone surrogate"),
        ({"weight_version": 7}, "weight_version: got 7, expected str"),
        ({"routing_key": None}, "routing_key: got"),
        ({"top_logprobs_p": "0.9"}, "top_logprobs_p: got '0.9', expected float"),
        ({"sampling_params": {"stop": {1}}}, "sampling_params: cannot be sent as JSON"),
        ({"sampling_params": {"temperature": np.nan}}, "sampling_params: cannot be sent as JSON"),
        ({"appended_spans": ((0, 4),)}, "appended_spans: got 0 to 4, expected a range from 0 to 3"),
        ({"appended_spans": ((1, 2), (1, 3))}, "appended_spans: got 1 to 3, expected a range from 2 to 3"),
    ],
)
def test_a_value_that_no_column_can_hold_is_named(changes, message):
    with pytest.raises(InvalidInputError, match=message):
        check_rollout(replace(fakes.sample([5], 0), **changes))


def test_numbers_of_numpy_are_stored():
    made = replace(fakes.sample([5], 0), prompt_index=np.int64(3), top_logprobs_p=np.float64(0.5))
    check_rollout(made)
    (back,) = to_rollouts(to_batch([made]))
    assert (back.prompt_index, back.top_logprobs_p) == (3, 0.5)


def test_only_rollouts_are_rows():
    with pytest.raises(InvalidInputError, match="got dict, expected a Rollout"):
        check_rollout({})


def test_bytes_are_those_of_the_arrays():
    rollout = fakes.sample([5, 6], 0)
    num_candidates = len(rollout.candidates.token_ids)
    assert num_bytes_of(rollout) == 4 * (2 + 2 * 3 + 3 + 2 * num_candidates) + len(rollout.text)
    assert num_bytes_of(replace(rollout, candidates=None)) == 4 * (2 + 2 * 3) + len(rollout.text)
