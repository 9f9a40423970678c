"""Native sampling masks of SGLang and vLLM decode to the sets of a plain loop."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import MissingCandidateSetsError, SampledTokenMissingError, WireError

MASK, LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"
LENGTH, TOKENS = "output_token_sampling_mask_length", "output_token_logprobs"
LOWEST = float(np.finfo(np.float32).min)


@st.composite
def distributions(draw: st.DrawFn) -> tuple[list[dict[int, float]], list[int], list[float]]:
    """Draw weights `{id: weight}` of the support, the sampled token, and the weight of the rest."""
    weight = st.floats(2**-14, 1.0, width=32) | st.sampled_from([0.5, 0.25])
    rows = draw(
        st.lists(
            st.dictionaries(st.integers(0, 2**31 - 1) | st.integers(0, 9), weight, min_size=1, max_size=6),
            max_size=6,
        )
    )
    sampled = [draw(st.sampled_from(sorted(row))) for row in rows]
    return rows, sampled, [draw(st.sampled_from([0.0, 0.01, 0.5, 20.0])) for _ in rows]


def answer(
    rows: list[dict[int, float]],
    sampled: list[int],
    rest: list[float],
    *,
    support: bool = True,
    reported: bool = True,
) -> dict[str, Any]:
    """Build SGLang's response: log-probs of the sampling distribution, and those of the sampled tokens."""
    within = [{i: math.log(w / sum(row.values())) for i, w in row.items()} for row in rows]
    own = [math.log(row[s] / (sum(row.values()) + r)) for row, s, r in zip(rows, sampled, rest, strict=True)]
    return json.loads(
        json.dumps(
            {
                MASK: [list(row) for row in rows],
                LOGPROBS: [
                    [f32(v) for v in row.values()] if support else f32(row[s])
                    for row, s in zip(within, sampled, strict=True)
                ],
                LENGTH: len(rows),
            }
            | ({TOKENS: [[f32(v), s, None] for v, s in zip(own, sampled, strict=True)]} if reported else {})
        )
    )


def f32(value: float) -> float:
    return float(np.float32(value))


@given(distributions())
@settings(max_examples=200)
def test_support_logprobs_become_those_under_the_vocabulary(made: Any) -> None:
    rows, sampled, rest = made
    meta_info = answer(rows, sampled, rest)
    sets = formats.decode_sampling_mask(meta_info, sampled)
    assert sets.has_logprobs
    assert CandidateSets(*sets._arrays()) == sets
    # The sampled log-probs equal the reported ones bit for bit, however the sums round.
    assert sets.sampled_logprobs.tolist() == [logprob for logprob, _, _ in meta_info[TOKENS]]
    for t, (ids, logprobs) in enumerate(sets):
        total = sum(rows[t].values()) + rest[t]
        assert sorted(ids.tolist()) == sorted(rows[t])
        expected = [math.log(rows[t][i] / total) for i in ids.tolist()]
        np.testing.assert_allclose(logprobs, expected, rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(sets.log_kept_mass[t], math.log(sum(rows[t].values()) / total), atol=2e-6)
        within = math.log(rows[t][sampled[t]] / sum(rows[t].values()))
        np.testing.assert_allclose(sets.sampled_logprobs[t] - sets.log_kept_mass[t], within, atol=3e-6)


@given(distributions(), st.sampled_from(["selected", "not reported", "ids alone", "vLLM"]))
def test_unknown_kept_mass_gives_sets_without_logprobs(made: Any, kind: str) -> None:
    rows, sampled, rest = made
    meta_info = answer(rows, sampled, rest, support=kind != "selected", reported=kind != "not reported")
    if kind == "ids alone":
        del meta_info[LOGPROBS]
    elif kind == "vLLM":
        meta_info = {"index": 0, "token_ids": sampled, "sampling_mask": meta_info[MASK], "logprobs": None}
    sets = formats.decode_sampling_mask(meta_info, np.array(sampled, np.int64), vocab_size=2**31)
    assert sets.has_logprobs == (not rows)
    assert sets.to_lists()[0] == [sorted(row) for row in rows]
    assert sets.sampled_ids.tolist() == sampled
    assert CandidateSets(*sets._arrays()) == sets


def test_a_mask_and_sets_with_logprobs_intersect_both_ways() -> None:
    meta_info = answer([{5: 0.5, 2: 0.25, 9: 0.25}], [2], [0.25])
    mask = formats.decode_sampling_mask({MASK: meta_info[MASK]}, [2])
    known = formats.decode_sampling_mask(meta_info, [2])
    top_p = CandidateSets([5, 2, 8], [-0.9, -1.6, -2.0], [0, 3], [2])
    assert mask.intersect(top_p).to_lists() == ([[2, 5]], None)
    assert top_p.intersect(mask) == CandidateSets([5, 2], [-0.9, -1.6], [0, 2], [2])
    assert known.intersect(mask) == known
    assert mask.intersect(known) == mask


def test_tokens_without_any_weight_are_no_candidates() -> None:
    meta_info = {MASK: [[5, 2, 9]], LOGPROBS: [[0.0, -math.inf, LOWEST]], TOKENS: [[-0.5, 5, None]]}
    assert formats.decode_sampling_mask(meta_info, [5]).to_lists() == ([[5]], [[-0.5]])


def test_an_incremental_chunk_counts_the_rows_of_earlier_ones() -> None:
    meta_info = answer([{5: 0.5, 2: 0.5}], [2], [0.0]) | {LENGTH: 17}
    assert formats.decode_sampling_mask(meta_info, [2]).sizes.tolist() == [2]


def test_no_token_was_generated() -> None:
    # SGLang may report a log-prob even for `max_new_tokens` 0.
    for meta_info in (answer([], [], []), answer([{5: 0.5, 2: 0.5}], [2], [0.0])):
        assert formats.decode_sampling_mask(meta_info, []) == CandidateSets.empty(0)


@pytest.mark.parametrize(
    ("meta_info", "field"),
    [
        ({}, "sampling_mask"),
        ({TOKENS: [[-0.5, 2, None]]}, "sampling_mask"),
        ({"sampling_mask": None}, "sampling_mask"),
        ({MASK: None}, MASK),
    ],
)
def test_missing_mask(meta_info: dict[str, Any], field: str) -> None:
    with pytest.raises(MissingCandidateSetsError, match="there is no sampling mask") as caught:
        formats.decode_sampling_mask(meta_info, [2])
    assert caught.value.field == field


@pytest.mark.parametrize("name", [MASK, "sampling_mask"])
@pytest.mark.parametrize("row", [None, []])
def test_missing_mask_for_some_position(name: str, row: Any) -> None:
    with pytest.raises(
        MissingCandidateSetsError, match="no sampling mask at 1 of 2 positions, the first at 1"
    ):
        formats.decode_sampling_mask({name: [[2, 5], row]}, [2, 7])


@pytest.mark.parametrize("change", [{}, {LOGPROBS: [-0.5, -0.5]}, {TOKENS: ...}])
def test_missing_sampled_token(change: dict[str, Any]) -> None:
    meta_info = answer([{5: 0.5, 2: 0.5}, {7: 1.0}], [2, 7], [0.0, 0.0]) | change
    meta_info = {key: value for key, value in meta_info.items() if value is not ...}
    if TOKENS in meta_info:
        meta_info[TOKENS][1] = [-0.5, 5, None]
    with pytest.raises(SampledTokenMissingError, match=r"5 is not among the 1 .* at position 1") as caught:
        formats.decode_sampling_mask(meta_info, [2, 5])
    assert caught.value.field == MASK


GOOD = answer([{5: 0.5, 2: 0.25}, {7: 1.0}], [2, 7], [0.25, 0.5])
HALF, QUARTER, THIRD = math.log(0.5), math.log(0.25), math.log(1 / 3)


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({MASK: "x"}, MASK, "expected a list with one list of token ids"),
        ({MASK: [[5, 2], 7]}, MASK, "expected a list with one list"),
        ({MASK: [[5, 2]]}, MASK, "got 1 positions for 2 tokens"),
        ({MASK: [[5, 2], [7], [7]]}, MASK, "got 3 positions for 2 tokens"),
        ({MASK: [[5, 2], [7.0]]}, MASK, "expected integers of 32 bits"),
        ({MASK: [[5, 2], ["7"]]}, MASK, "expected integers of 32 bits"),
        ({MASK: [[5, 2], [None]]}, MASK, "expected integers of 32 bits"),
        ({MASK: [[True, 2], [7]]}, MASK, "got True"),
        ({MASK: [[5, 2], [2**31]]}, MASK, "got 2147483648, expected integers of 32 bits"),
        ({MASK: [[5, 2], [10**9999]]}, MASK, "got a number of 33216 bits"),
        ({MASK: [[5, 2], [-7]]}, MASK, "got -7, expected token ids from 0 to 2147483647"),
        ({MASK: [[2, 2], [7]]}, MASK, "2 then 2 at position 0; .* without duplicates"),
        ({MASK: [[5, 11], [7]]}, MASK, "got id 11, expected less than vocab_size 10"),
        ({LOGPROBS: "x"}, LOGPROBS, "got str, expected a list"),
        ({LOGPROBS: [[HALF, HALF]]}, LOGPROBS, "got 1 positions for 2 tokens"),
        ({LOGPROBS: [-0.5]}, LOGPROBS, "got 1 positions for 2 tokens"),
        ({LOGPROBS: [-0.5, None]}, LOGPROBS, "got None, expected log-probs"),
        ({LOGPROBS: [-0.5, "x"]}, LOGPROBS, "got 'x', expected log-probs"),
        ({LOGPROBS: [[HALF, HALF], 0.0]}, LOGPROBS, "got float for the 1 tokens at position 1"),
        ({LOGPROBS: [-0.5, [0.0]]}, LOGPROBS, "got float for the 2 tokens at position 0"),
        ({LOGPROBS: [[HALF], [0.0]]}, LOGPROBS, "got 1 log-probs for the 2 tokens at position 0"),
        ({LOGPROBS: [[HALF, HALF], [None]]}, LOGPROBS, "got None, expected log-probs"),
        ({LOGPROBS: [[HALF, math.nan], [0.0]]}, LOGPROBS, "probability of nan at position 0, expected 1"),
        ({LOGPROBS: [[HALF, math.inf], [0.0]]}, LOGPROBS, "probability of inf at position 0"),
        # Log-probs over the whole vocabulary, or of a mask that lost some of its tokens.
        ({LOGPROBS: [[HALF, QUARTER], [0.0]]}, LOGPROBS, "probability of 0.7500 at position 0, expected 1"),
        ({LOGPROBS: [[0.0, -math.inf], [0.0]]}, LOGPROBS, "position 0 -inf, and output_token_logprobs"),
        ({TOKENS: [[THIRD + 0.01, 2], [0.0, 7]]}, LOGPROBS, "which are not of one distribution"),
        ({TOKENS: [[LOWEST, 2], [0.0, 7]]}, LOGPROBS, "which are not of one distribution"),
        ({TOKENS: [[-math.inf, 2], [0.0, 7]]}, LOGPROBS, "which are not of one distribution"),
        ({TOKENS: [[math.nan, 2], [0.0, 7]]}, TOKENS, "got nan at position 0"),
        ({TOKENS: [[None, 2], [0.0, 7]]}, TOKENS, "got None, expected log-probs"),
        ({TOKENS: [[-2.0, 5], [0.0, 7]]}, TOKENS, "got token 5 at position 0; the output is 2"),
        ({TOKENS: [[-2.0, 2]]}, TOKENS, "got 1 positions for 2 tokens"),
        ({TOKENS: "x"}, TOKENS, "expected a list"),
    ],
)
def test_malformed_fields_are_named(change: dict[str, Any], field: str, problem: str) -> None:
    assert formats.decode_sampling_mask(GOOD, [2, 7], vocab_size=10).has_logprobs
    with pytest.raises(WireError, match=problem) as caught:
        formats.decode_sampling_mask(GOOD | change, [2, 7], vocab_size=10)
    assert type(caught.value) is WireError
    assert caught.value.field == field


def test_malformed_masks_of_vllm_are_named_by_their_own_field() -> None:
    with pytest.raises(WireError, match=r"^sampling_mask: 2 then 2 at position 0"):
        formats.decode_sampling_mask({"sampling_mask": [[2, 2]]}, [2])
    with pytest.raises(SampledTokenMissingError, match=r"^sampling_mask: 3 is not among"):
        formats.decode_sampling_mask({"sampling_mask": [[2, 4]]}, [3])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just([[5, 2], [7]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=10,
)


@given(st.sampled_from([MASK, LOGPROBS, TOKENS, LENGTH]), json_values)
@settings(max_examples=300)
def test_any_field_value_decodes_or_raises_a_wire_error(key: str, value: Any) -> None:
    try:
        sets = formats.decode_sampling_mask(GOOD | {key: value}, [2, 7])
    except WireError as error:
        field = error.field
    else:
        assert CandidateSets(*sets._arrays()) == sets
        return
    assert field in (MASK, LOGPROBS, TOKENS)
