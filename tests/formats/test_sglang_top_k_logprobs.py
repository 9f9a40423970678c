"""Fixed-k sets from every form of `top_logprobs_num` equal those of a plain loop."""

from __future__ import annotations

import base64
import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import InvalidInputError, MissingCandidateSetsError, WireError

LISTS = "output_top_logprobs"
TOKENS = "output_token_logprobs"
LOWEST = float(np.finfo(np.float32).min)

Row = list[tuple[float, int]]


def b64(values: list[Any], code: str) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *values)).decode()


def forms(rows: list[Row], sampled: list[tuple[float, int]]) -> dict[str, dict[str, Any]]:
    """Encode rows of one width in the four forms that patched and unpatched SGLang return."""
    values, ids = ([entry[i] for row in rows for entry in row] for i in (0, 1))
    flat = {f"{LISTS}_shape": [len(rows), len(rows[0]) if rows else 0], f"{LISTS}_null_prefix": 0}
    each = {
        "lists": {LISTS: [[[logprob, token, None] for logprob, token in row] for row in rows]},
        "flat": {f"{LISTS}_val_flat": values, f"{LISTS}_idx_flat": ids, **flat},
        "flat in base64": {
            f"{LISTS}_val_flat_b64": b64(values, "f"),
            f"{LISTS}_idx_flat_b64": b64(ids, "i"),
            f"{LISTS}_val_flat_b64_dtype": "float32",
            f"{LISTS}_idx_flat_b64_dtype": "int32",
            **flat,
        },
        "ours": formats.encode_top_k(
            "output", [[v for v, _ in row] for row in rows], [[i for _, i in row] for row in rows]
        ),
    }
    tokens = [[logprob, token, None] for logprob, token in sampled]
    return {name: json.loads(json.dumps({**form, TOKENS: tokens})) for name, form in each.items()}


def by_definition(rows: list[Row], sampled: list[tuple[float, int]], k: int) -> list[Row]:
    """Return `[(logprob, id)]` in contract order."""
    sets = []
    for row, (own, token) in zip(rows, sampled, strict=True):
        kept = {i: v for v, i in row if sum(other > v for other, _ in row) < k and v > LOWEST}
        kept[token] = own
        sets.append(sorted(((v, i) for i, v in kept.items()), key=lambda entry: (-entry[0], entry[1])))
    return sets


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[Row], list[tuple[float, int]], int]:
    """Draw rows of `num` entries, the sampled tokens with their log-probs, and a k of at most `num`."""
    num = draw(st.integers(1, 6))
    logprob = st.sampled_from([-0.25, -0.5, -0.5, -1.0, -1.5, -3.0, LOWEST])
    rows, sampled = [], []
    for _ in range(draw(st.integers(0, 5))):
        ids = draw(
            st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 20), min_size=num, max_size=num, unique=True)
        )
        values = sorted((draw(logprob) for _ in ids), reverse=True)
        values[0] = max(values[0], -3.0)  # at least one token is possible
        row = list(zip(values, ids, strict=True))
        outside = draw(st.integers(0, 40).filter(lambda token, ids=ids: token not in ids))
        own = draw(st.sampled_from([values[-1], max(values[-1] - 1.0, LOWEST), LOWEST]))
        rows.append(row)
        sampled.append(draw(st.sampled_from([*row, (own, outside)])))
    return rows, sampled, draw(st.integers(1, num))


@given(answers())
@settings(max_examples=200)
def test_every_form_equals_the_definition(answer: tuple[list[Row], list[tuple[float, int]], int]) -> None:
    rows, sampled, k = answer
    expected = by_definition(rows, sampled, k)
    for meta_info in forms(rows, sampled).values():
        sets = formats.decode_top_k(meta_info, [token for _, token in sampled], k)
        got = [list(zip(*pair, strict=True)) for pair in zip(*reversed(sets.to_lists()), strict=True)]
        assert got == expected
        assert sets.sampled_logprobs.tolist() == [own for own, _ in sampled]
        assert CandidateSets(*sets._arrays()) == sets


ROWS: list[Row] = [[(-0.5, 5), (-1.0, 9), (-1.0, 2)], [(-0.25, 7), (-2.0, 1), (-4.0, 3)]]
SAMPLED = [(-1.0, 2), (-5.0, 8)]
IDS = [2, 8]


def test_ties_at_the_kth_place_are_kept_as_far_as_they_are_listed() -> None:
    for meta_info in forms(ROWS, SAMPLED).values():
        assert formats.decode_top_k(meta_info, IDS, 2).to_lists()[0] == [[5, 2, 9], [7, 1, 8]]
        assert formats.decode_top_k(meta_info, IDS, 1).to_lists()[0] == [[5, 2], [7, 8]]
        assert formats.decode_top_k(meta_info, np.array(IDS), np.int64(3), vocab_size=10).sizes.tolist() == [
            3,
            4,
        ]


def test_impossible_tokens_are_no_candidates() -> None:
    rows: list[Row] = [[(-0.1, 5), (LOWEST, 9), (LOWEST, 2)], [(-0.1, 5), (LOWEST, 9), (LOWEST, 2)]]
    for meta_info in forms(rows, [(-0.1, 5), (LOWEST, 9)]).values():
        assert formats.decode_top_k(meta_info, [5, 9], 3).to_lists()[0] == [[5], [5, 9]]
    infinite: list[Row] = [[(-0.1, 5), (-math.inf, 9)]]
    meta_info = {LISTS: [[[-0.1, 5], [-math.inf, 9]]], TOKENS: [[LOWEST, 9, None]]}
    assert formats.decode_top_k(meta_info, [9], 2).to_lists()[0] == [[5, 9]]
    meta_info = forms(infinite, [(-math.inf, 9)])["ours"]
    assert formats.decode_top_k(meta_info, [9], 1).to_lists()[0] == [[5, 9]]


def test_the_intersection_with_a_top_p_set() -> None:
    top_p = CandidateSets([5, 2, 9, 4, 7, 8], [-0.5, -1.0, -1.0, -1.5, -0.25, -5.0], [0, 4, 6], IDS)
    top_k = formats.decode_top_k(forms(ROWS, SAMPLED)["lists"], IDS, 2)
    both = top_k.intersect(top_p)
    assert both.to_lists()[0] == [[5, 2, 9], [7, 8]]
    assert both == top_p.intersect(top_k)


def test_no_token_was_generated() -> None:
    # SGLang may report a log-prob even for `max_new_tokens` 0.
    for meta_info in (*forms([], []).values(), *forms(ROWS[:1], SAMPLED[:1]).values()):
        assert formats.decode_top_k(meta_info, [], 3) == CandidateSets.empty(0)


@pytest.mark.parametrize(
    "meta_info", [{}, {TOKENS: [[-1.0, 2, None]]}, {LISTS: None}, {"input_top_logprobs": [], "id": "x"}]
)
def test_missing_rows(meta_info: dict[str, Any]) -> None:
    with pytest.raises(MissingCandidateSetsError, match="is top_logprobs_num in the request") as caught:
        formats.decode_top_k(meta_info, [2], 1)
    assert caught.value.field == LISTS


def test_missing_rows_for_some_position() -> None:
    good = forms(ROWS, SAMPLED)
    one = forms(ROWS[1:], SAMPLED)
    lacking = [
        good["lists"] | {LISTS: [None, good["lists"][LISTS][1]]},
        good["lists"] | {LISTS: [[], good["lists"][LISTS][1]]},
        one["flat"] | {f"{LISTS}_null_prefix": 1},
        one["flat in base64"] | {f"{LISTS}_null_prefix": 1},
        one["ours"] | {f"{LISTS}_none_positions": [0]},
    ]
    for meta_info in lacking:
        with pytest.raises(
            MissingCandidateSetsError, match="no log-probs at 1 of 2 positions, the first at 0"
        ):
            formats.decode_top_k(meta_info, IDS, 1)


@pytest.mark.parametrize("k", [0, -1, 1.0, "1", None, True])
def test_a_k_that_is_none(k: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"k: got .*, expected an integer of 1 or more"):
        formats.decode_top_k(forms(ROWS, SAMPLED)["lists"], IDS, k)


def in_form(name: str, **change: Any) -> dict[str, Any]:
    fields = {f"{LISTS}_{key}" if key != "rows" else LISTS: value for key, value in change.items()}
    return {k: v for k, v in (forms(ROWS, SAMPLED)[name] | fields).items() if v is not ...}


ENTRY = [-0.25, 7, None]
HUGE = 2**31 - 1


@pytest.mark.parametrize(
    ("meta_info", "field", "problem"),
    [
        (in_form("lists", rows=[[ENTRY] * 3]), "", "got 1 positions for 2 tokens"),
        (in_form("lists", rows=[[ENTRY], [ENTRY], [ENTRY]]), "", "got 3 positions for 2 tokens"),
        (in_form("lists", rows=[[ENTRY], [ENTRY]]), "", "lists 1 tokens at position 0, expected 3 or more"),
        (in_form("lists", rows=[[ENTRY] * 3, [ENTRY] * 3]), "", "7 occurs twice at position 0"),
        (in_form("lists", rows="x"), "", "expected a list"),
        (in_form("lists", rows=[[[None, 7, None]], [ENTRY]]), "", "got None as a log-prob"),
        (in_form("lists", rows=[[[-1.0, -7, None]] * 3] * 2), "", "got -7, expected token ids from 0 on"),
        (in_form("lists", rows=[[[-1e39, 7]], [ENTRY]]), "", "lists 1 tokens"),
        (in_form("lists", rows=[[[-1e39, 7], [-1, 8], [-1, 9]]] * 2), "", "values that float32 can hold"),
        (in_form("lists", rows=[[[math.nan, 7], [-1, 8], [-1, 9]]] * 2), "", "got nan at position 0"),
        (in_form("lists", rows=[[[1.5, 7], [-1.0, 2], [-1, 9]]] * 2), "", "got 1.5 at position 0"),
        (
            in_form("lists", rows=[[[LOWEST, 7], [LOWEST, 5], [-1.0, 2]], [[LOWEST, i] for i in (1, 2, 8)]]),
            TOKENS,
            "at odds",
        ),
        (in_form("flat", val_flat=[-1.0] * 5), "val_flat", "got 5 numbers, expected 2 x 3"),
        (in_form("flat", idx_flat=[1, 2, 3]), "idx_flat", "got 3 numbers, expected 2 x 3"),
        (in_form("flat", idx_flat=[1, 2, 3, 4, 5, 6.0]), "idx_flat", "expected integers of 32 bits"),
        (in_form("flat", val_flat="x"), "val_flat", "got str, expected a list of numbers"),
        (in_form("flat", val_flat=...), "val_flat", "missing beside output_top_logprobs_idx_flat"),
        (in_form("flat", null_prefix=...), "null_prefix", "missing beside output_top_logprobs_val_flat"),
        (in_form("flat", shape=...), "shape", "missing beside"),
        (in_form("flat", shape=[6]), "shape", r"got \[6\], expected \[rows, k\]"),
        (in_form("flat", shape=[-2, -3]), "shape", r"got \[-2, -3\]"),
        (in_form("flat", shape=[3, 2]), "shape", "got 3 positions for 2 tokens"),
        (in_form("flat", shape=[HUGE, 0], val_flat=[], idx_flat=[]), "shape", f"got {HUGE} positions"),
        (in_form("flat", shape=[2, HUGE]), "val_flat", f"expected 2 x {HUGE}"),
        (in_form("flat", null_prefix=HUGE), "shape", "positions for 2 tokens"),
        (in_form("flat", shape=[3, 2], null_prefix=-1), "null_prefix", "expected positions below 2"),
        (in_form("flat", null_prefix="0"), "null_prefix", "got '0'"),
        (in_form("flat in base64", val_flat_b64_dtype="float16"), "val_flat_b64_dtype", "got 'float16'"),
        (
            in_form("flat in base64", idx_flat_b64_dtype=...),
            "idx_flat_b64_dtype",
            "got None, expected 'int32'",
        ),
        (in_form("flat in base64", idx_flat_b64="x"), "idx_flat_b64", "not base64"),
        (in_form("ours", none_positions=...), "none_positions", "missing beside"),
        (in_form("ours", none_positions=[0]), "shape", "got 3 positions for 2 tokens"),
        # Format of an earlier plugin: rows without a distribution are counted and filled.
        (in_form("ours", none_positions=[1]), "shape", "got 3 positions for 2 tokens"),
        (in_form("ours", shape=[1, 3], none_positions=[2]), "none_positions", "expected positions below 2"),
        (in_form("ours", shape=[0, 3], none_positions=[1, 0]), "none_positions", "in ascending order"),
        (in_form("ours", shape=[0, 3], none_positions=[1, 1]), "none_positions", "in ascending order"),
        (in_form("ours", shape=[1, 3], none_positions=[-1]), "none_positions", "expected positions below 2"),
        (in_form("ours", val_base64=b64([-1.0], "f")), "val_base64", "got 1 numbers, expected 2 x 3"),
        (
            in_form("ours", val_base64=b64([-0.5, -1, math.nan] * 2, "f")),
            "val_base64",
            "got nan at position 0",
        ),
        (in_form("lists") | {TOKENS: ...}, TOKENS, "missing"),
        (in_form("lists") | {TOKENS: None}, TOKENS, "missing; it holds the sampled tokens' log-probs"),
        (in_form("lists") | {TOKENS: [[-1.0, 2, None]]}, TOKENS, "got 1 positions for 2 tokens"),
        (in_form("lists") | {TOKENS: [[-1.0, 2], [-5.0, 9]]}, TOKENS, "got token 9 at position 1"),
        (in_form("lists") | {TOKENS: [[-1.0, 2], [None, 8]]}, TOKENS, "got None as a log-prob"),
        (in_form("lists") | {TOKENS: [[-1.0, 2], [math.nan, 8]]}, TOKENS, "got nan at position 1"),
        (in_form("lists") | {TOKENS: [[-1.0, 2], [0.5, 8]]}, TOKENS, "got 0.5 at position 1"),
        (
            in_form("lists") | {TOKENS: [[-1.25, 2], [-5.0, 8]]},
            TOKENS,
            "position 0 the log-prob -1.25, .* at odds",
        ),
        (
            in_form("lists") | {TOKENS: [[-1.0, 2], [-3.0, 8]]},
            TOKENS,
            "position 1 the log-prob -3.0, .* at odds",
        ),
    ],
)
def test_malformed_fields_are_named(meta_info: dict[str, Any], field: str, problem: str) -> None:
    meta_info = {key: value for key, value in meta_info.items() if value is not ...}
    with pytest.raises(WireError, match=problem) as caught:
        formats.decode_top_k(meta_info, IDS, 3)
    assert type(caught.value) is WireError
    assert caught.value.field == (field if field == TOKENS else "_".join(filter(None, (LISTS, field))))


def test_ids_beyond_the_vocabulary() -> None:
    for meta_info in forms(ROWS, SAMPLED).values():
        with pytest.raises(WireError, match="got id 9, expected less than vocab_size 9"):
            formats.decode_top_k(meta_info, IDS, 1, vocab_size=9)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just([2, 3]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=10,
)


@given(st.sampled_from(["lists", "flat", "flat in base64", "ours"]), st.data())
@settings(max_examples=300)
def test_any_field_value_decodes_or_raises_a_wire_error(name: str, data: st.DataObject) -> None:
    meta_info = forms(ROWS, SAMPLED)[name]
    key = data.draw(st.sampled_from(sorted(meta_info)))
    try:
        sets = formats.decode_top_k(meta_info | {key: data.draw(json_values)}, IDS, 2)
    except WireError as error:
        field = error.field
    else:
        assert CandidateSets(*sets._arrays()) == sets
        return
    assert field in (*meta_info, LISTS)


def test_top_k_fields_leave_out_rows_without_a_distribution():
    fields = formats.encode_top_k(
        "output", [[-0.5, -1.0], None, [-0.25, -2.0], []], [[5, 2], None, [7, 1], []]
    )
    assert fields["output_top_logprobs_shape"] == [2, 2]
    assert fields["output_top_logprobs_none_positions"] == [1, 3]
    values = struct.unpack("<4f", base64.b64decode(fields["output_top_logprobs_val_base64"]))
    ids = struct.unpack("<4i", base64.b64decode(fields["output_top_logprobs_idx_base64"]))
    assert values == (-0.5, -1.0, -0.25, -2.0)
    assert ids == (5, 2, 7, 1)
    for rows, none in (([None], [0]), ([], [])):
        nothing = formats.encode_top_k("input", rows, rows)
        assert nothing["input_top_logprobs_shape"] == [0, 0]
        assert nothing["input_top_logprobs_none_positions"] == none
        assert nothing["input_top_logprobs_val_base64"] == nothing["input_top_logprobs_idx_base64"] == ""
