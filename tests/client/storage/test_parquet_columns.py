"""Rollouts round-trip through Arrow columns without losing a bit."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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

INT32 = st.integers(0, 2**31 - 1)
LOGPROBS = st.sampled_from([-0.0, 0.0, -0.5, -1e-30, -7.0])
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


def bits(rollout):
    """Return every field in a form that is equal only if all bits are."""
    values = {field.name: getattr(rollout, field.name) for field in fields(rollout)}
    sets = values.pop("candidates")
    if sets is not None:
        logprobs = sets.logprobs.tobytes() if sets.has_logprobs else None
        ids = (sets.token_ids.tobytes(), sets.offsets.tobytes(), sets.sampled_ids.tobytes())
        values["candidates"] = (len(sets), sets.has_logprobs, logprobs, *ids)
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            values[name] = (value.dtype, value.shape, value.tobytes())
        elif isinstance(value, float):
            values[name] = value.hex()
    return values


@st.composite
def candidate_sets(draw, output_ids):
    """Draw sets or None: with or without log-probs, with empty spans, impossible tokens, ties, and -0.0."""
    kind = draw(st.sampled_from(["none", "with", "without"]))
    if kind == "none":
        return None
    token_ids, logprobs, offsets, sampled = [], [], [0], []
    for token in output_ids:
        if draw(st.booleans()):
            others = draw(st.sets(INT32, max_size=3)) | {token}
            values = draw(st.lists(LOGPROBS, min_size=len(others), max_size=len(others)))
            pairs = sorted(zip(values, others, strict=True), key=lambda pair: (-pair[0], pair[1]))
            if len(pairs) > 1 and draw(st.booleans()):
                pairs = [pair for pair in pairs if pair[1] != token] + [(-np.inf, token)]
            token_ids += [one for _, one in pairs]
            logprobs += [value for value, _ in pairs]
        offsets.append(len(token_ids))
        is_empty = offsets[-1] == offsets[-2]
        sampled.append(NO_TOKEN if is_empty and draw(st.booleans()) else token)
    sets = CandidateSets(token_ids, logprobs, offsets, sampled)
    return sets.without_logprobs() if kind == "without" else sets


@st.composite
def made(draw):
    output_ids = draw(st.lists(INT32, max_size=4))
    cuts = sorted(draw(st.lists(st.integers(0, len(output_ids)), max_size=3)))
    counts = np.diff([0, *cuts, len(output_ids)]).tolist()
    spans = tuple((draw(TEXT), count) for count in counts)
    return Rollout(
        prompt_index=draw(st.integers(0, 2**63 - 1)),
        sample_index=draw(st.integers(0, 2**63 - 1)),
        request_id=draw(TEXT),
        prompt_ids=np.array(draw(st.lists(INT32, max_size=4)), np.int32),
        output_ids=np.array(output_ids, np.int32),
        text=draw(TEXT),
        logprobs=np.array(
            draw(st.lists(st.integers(0, 2**32 - 1), min_size=len(output_ids), max_size=len(output_ids))),
            np.uint32,
        ).view(np.float32),
        candidates=draw(candidate_sets(output_ids)),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", ""])),
        weight_version=draw(st.none() | TEXT),
        cached_tokens=draw(st.integers(0, 2**63 - 1)),
        latency_s=draw(st.floats(0, 1e12)),
        top_logprobs_source=draw(st.sampled_from([None, "distribution", "sampler"])),
        weight_spans=draw(st.sampled_from([None, spans])),
        routing_key=draw(TEXT),
        top_logprobs_p=draw(st.none() | st.floats(0, 1, exclude_min=True)),
        sampling_params=draw(
            st.none() | st.dictionaries(TEXT, st.none() | st.floats(0, 1) | TEXT, max_size=2)
        ),
        appended_spans=draw(st.sampled_from([(), ((0, len(output_ids)),) if output_ids else ()])),
    )


@given(rollouts=st.lists(made(), max_size=5))
def test_every_bit_comes_back(rollouts):
    for rollout in rollouts:
        check_rollout(rollout)
    back = list(to_rollouts(to_batch(rollouts)))
    assert [bits(one) for one in back] == [bits(one) for one in rollouts]


def test_every_field_has_a_column():
    named = {"candidates": "candidate_ids", "weight_spans": "weight_versions"}
    expected = {named.get(field.name, field.name) for field in fields(Rollout)}
    assert set(schema().names) == expected | {"candidate_logprobs", "candidate_sampled_ids"}


def test_a_row_does_not_keep_the_table_in_memory(fakes):
    first, *_ = to_rollouts(to_batch([fakes.sample([5], index) for index in range(3)]))
    sets = first.candidates
    arrays = (first.prompt_ids, first.output_ids, first.logprobs, sets.token_ids, sets.logprobs, sets.offsets)
    for array in arrays:
        owner = array if array.base is None else array.base
        assert owner.base is None
        assert owner.nbytes == array.nbytes


def test_equal_sampled_ids_are_not_stored_twice(fakes):
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
def test_a_value_that_no_column_can_hold_is_named(fakes, changes, message):
    with pytest.raises(InvalidInputError, match=message):
        check_rollout(replace(fakes.sample([5], 0), **changes))


def test_only_rollouts_are_rows():
    with pytest.raises(InvalidInputError, match="got dict, expected a Rollout"):
        check_rollout({})


def test_bytes_are_those_of_the_arrays(fakes):
    rollout = fakes.sample([5, 6], 0)
    num_candidates = len(rollout.candidates.token_ids)
    assert num_bytes_of(rollout) == 4 * (2 + 2 * 3 + 3 + 2 * num_candidates) + len(rollout.text)
    assert num_bytes_of(replace(rollout, candidates=None)) == 4 * (2 + 2 * 3) + len(rollout.text)
