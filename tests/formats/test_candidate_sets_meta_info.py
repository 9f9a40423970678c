"""Sets in `meta_info` round-trip exactly, follow their documented layout, and name malformed fields."""

from __future__ import annotations

import base64
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import MissingCandidateSetsError, SampledTokenMissingError, WireError
from tests.formats.hypothesis_candidate_sets import SETS, b64, candidate_sets, encoded, listed, outcome

VAL, IDX, LENGTHS = (f"output_top_p_logprobs_{kind}" for kind in ("val_base64", "idx_base64", "lengths"))
LISTS = "output_top_p_logprobs"


@given(candidate_sets())
def test_meta_info_of_generated_tokens(sets):
    output_ids = sets.sampled_ids.tolist()
    for fields in (encoded(sets), listed(sets)):
        meta_info = json.loads(json.dumps({"id": "x", **fields}))
        assert formats.has_top_p(meta_info)
        assert formats.decode_top_p(meta_info, output_ids) == sets
        assert formats.decode_top_p(meta_info, sets.sampled_ids, vocab_size=2**31) == sets


@given(candidate_sets(empty_spans=True))
def test_meta_info_of_prompt_tokens(sets):
    fields = encoded(sets, "input")
    fields["input_top_p_logprobs_lengths"] = [
        size or formats.NO_DISTRIBUTION for size in fields["input_top_p_logprobs_lengths"]
    ]
    for meta_info in (fields, listed(sets, "input")):
        assert (
            formats.decode_top_p(json.loads(json.dumps(meta_info)), sets.sampled_ids.tolist(), side="input")
            == sets
        )
    assert not formats.has_top_p(fields)


@given(candidate_sets())
def test_fields_can_be_decoded_without_this_package(sets):
    # Decode as a client that knows only the field names: little-endian float32 and int32, and lengths.
    meta_info = json.loads(json.dumps(encoded(sets)))
    assert sorted(meta_info) == [
        "output_top_p_logprobs_idx_base64",
        "output_top_p_logprobs_lengths",
        "output_top_p_logprobs_val_base64",
    ]
    values = base64.b64decode(meta_info["output_top_p_logprobs_val_base64"], validate=True)
    ids = base64.b64decode(meta_info["output_top_p_logprobs_idx_base64"], validate=True)
    lengths = meta_info["output_top_p_logprobs_lengths"]
    assert len(values) == len(ids) == 4 * sum(lengths)
    start = 0
    for t, length in enumerate(lengths):
        expected_ids, expected_logprobs = sets[t]
        got_ids = struct.unpack_from(f"<{length}i", ids, 4 * start)
        got_logprobs = np.frombuffer(values, "<f4", length, 4 * start)
        assert list(got_ids) == expected_ids.tolist()
        assert got_logprobs.tolist() == expected_logprobs.tolist()
        assert sets.sampled_ids[t] in got_ids
        start += length


IDS = [5, 2, 9, 7]
LOGPROBS = [-0.5, -1.0, -1.0, -0.25]
FIELDS = {VAL: b64(LOGPROBS, "f"), IDX: b64(IDS, "i"), LENGTHS: [3, 1]}


MALFORMED = {
    "val is no base64": (VAL, {VAL: "not base64!"}, "not base64"),
    "val has a bad padding": (VAL, {VAL: FIELDS[VAL][:-1]}, "not base64"),
    "val holds a newline": (VAL, {VAL: FIELDS[VAL][:4] + "\n" + FIELDS[VAL][4:]}, "not base64"),
    "val is not ASCII": (VAL, {VAL: "äöüß"}, "not base64"),
    "val uses the other alphabet": (VAL, {VAL: base64.urlsafe_b64encode(b"\xff" * 16).decode()}, "not base"),
    "val is a list": (VAL, {VAL: LOGPROBS}, "got list, expected base64 text"),
    "val is null": (VAL, {VAL: None}, "got NoneType, expected base64 text"),
    "idx is no base64": (IDX, {IDX: "====" * 4}, "not base64"),
    "idx is a number": (IDX, {IDX: 5}, "got int, expected base64 text"),
    "val is cut inside a number": (
        VAL,
        {VAL: base64.b64encode(b"1234567").decode()},
        "got 7 bytes, expected a multiple of 4",
    ),
    "idx is cut inside a number": (IDX, {IDX: base64.b64encode(b"123").decode()}, "got 3 bytes"),
    "val is shorter": (VAL, {VAL: b64(LOGPROBS[:3], "f")}, "got 3 entries for 4 token_ids"),
    "idx is shorter": (VAL, {IDX: b64(IDS[:3], "i")}, "got 4 entries for 3 token_ids"),
    "lengths add up to less": (
        LENGTHS,
        {LENGTHS: [2, 1]},
        "run from 0 to 3, expected from 0 to 4",
    ),
    "lengths add up to more": (LENGTHS, {LENGTHS: [4, 1]}, "run from 0 to 5"),
    "lengths add up to more than int64": (LENGTHS, {LENGTHS: [2**63 - 1, 6]}, "got 9223372036854775807"),
    "lengths are too few": (LENGTHS, {LENGTHS: [4]}, "got 1 positions for 2 tokens"),
    "lengths are too many": (LENGTHS, {LENGTHS: [3, 1, 0]}, "got 3 positions for 2 tokens"),
    "lengths are none": (LENGTHS, {LENGTHS: []}, "got 0 positions for 2 tokens"),
    "lengths hold a float": (LENGTHS, {LENGTHS: [3.0, 1]}, "expected integers of 32 bits"),
    "lengths hold a string": (LENGTHS, {LENGTHS: ["3", 1]}, "expected integers of 32 bits"),
    "lengths hold a boolean": (LENGTHS, {LENGTHS: [3, True]}, "got True, expected integers of 32"),
    "lengths hold false": (LENGTHS, {LENGTHS: [4, False]}, "got False, expected integers of 32"),
    "lengths hold a null": (LENGTHS, {LENGTHS: [3, None]}, "expected integers of 32 bits"),
    "lengths hold a list": (LENGTHS, {LENGTHS: [3, [1]]}, "expected integers of 32 bits"),
    "lengths hold NaN": (LENGTHS, {LENGTHS: [3, math.nan]}, "expected integers of 32 bits"),
    "lengths hold a huge number": (LENGTHS, {LENGTHS: [2**70, 1]}, "expected integers of 32 bits"),
    "lengths are below -1": (LENGTHS, {LENGTHS: [6, -2]}, "got -2, expected set sizes"),
    "lengths are a string": (LENGTHS, {LENGTHS: "31"}, "got str, expected a list"),
    "lengths are an object": (LENGTHS, {LENGTHS: {"0": 3}}, "got dict, expected a list"),
    "lengths are null": (LENGTHS, {LENGTHS: None}, "got NoneType, expected a list"),
    "an id is negative": (IDX, {IDX: b64([5, 2, 9, -7], "i")}, "got -7 at position 1, expected 0 or more"),
    "an id occurs twice, adjacent": (IDX, {IDX: b64([5, 2, 2, 7], "i")}, "2 then 2 .* at position 0"),
    "an id occurs twice, apart": (IDX, {IDX: b64([9, 2, 9, 7], "i")}, "9 occurs twice at position 0"),
    "tied ids fall": (IDX, {IDX: b64([5, 9, 2, 7], "i")}, "9 then 2 .* at position 0"),
    "log-probs rise": (IDX, {VAL: b64([-1.0, -0.5, -1.0, -0.25], "f")}, "5 then 2 .* highest first"),
    "a log-prob is NaN": (VAL, {VAL: b64([-0.5, math.nan, -1.0, -0.25], "f")}, "got nan at position 0"),
    "a log-prob is positive": (VAL, {VAL: b64([-0.5, -1, -1, 0.5], "f")}, "got 0.5 at position 1"),
    "a log-prob is infinite": (VAL, {VAL: b64([math.inf, -1, -1, -1], "f")}, "got inf at position 0"),
    "an impossible token": (VAL, {VAL: b64([-0.5, -1, -math.inf, -1], "f")}, "got -inf at position 0"),
    "no val": (VAL, {VAL: ...}, "missing beside"),
    "no idx": (IDX, {IDX: ...}, "missing beside"),
    "no lengths": (LENGTHS, {LENGTHS: ...}, "missing beside"),
}


def without_ellipsis(fields):
    return {key: value for key, value in fields.items() if value is not ...}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_fields_are_named(case):
    assert formats.decode_top_p(FIELDS, [2, 7]) == SETS
    field, change, problem = MALFORMED[case]
    with pytest.raises(WireError, match=problem) as caught:
        formats.decode_top_p(without_ellipsis(FIELDS | change), [2, 7])
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert type(caught.value) is WireError

    as_input = {key.replace("output", "input"): value for key, value in (FIELDS | change).items()}
    with pytest.raises(WireError, match=problem) as caught:
        formats.decode_top_p(without_ellipsis(as_input), [2, 7], side="input")
    assert caught.value.field == field.replace("output", "input")


ENTRIES = [[[-0.5, 5, None], [-1.0, 2, " a"], [-1.0, 9]], [[-0.25, 7, None]]]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ("x", "expected a list"),
        (None, "expected a list"),
        ({"0": []}, "expected a list"),
        ([ENTRIES[0], "x"], "expected a list"),
        ([ENTRIES[0], 5], "expected a list"),
        ([ENTRIES[0]], "got 1 positions for 2 tokens"),
        ([*ENTRIES, []], "got 3 positions for 2 tokens"),
        ([ENTRIES[0], [-0.25, 7, None]], "expected every candidate as"),
        ([ENTRIES[0], [[-0.25]]], "expected every candidate as"),
        ([ENTRIES[0], [[-0.25, 7, None, 0]]], "expected every candidate as"),
        ([ENTRIES[0], [{"logprob": -0.25, "id": 7}]], "expected every candidate as"),
        ([ENTRIES[0], [["-0.25", 7, None]]], "got '-0.25', expected log-probs"),
        ([ENTRIES[0], [[None, 7, None]]], "got None, expected log-probs"),
        ([ENTRIES[0], [[True, 7, None]]], "got True, expected log-probs"),
        ([ENTRIES[0], [[-0.25, 7.0, None]]], "got 7.0, expected integers of 32 bits"),
        ([ENTRIES[0], [[-0.25, "7", None]]], "got '7', expected integers of 32 bits"),
        ([ENTRIES[0], [[-0.25, True, None]]], "got True, expected integers of 32 bits"),
        ([ENTRIES[0], [[-0.25, 2**31, None]]], "got 2147483648, expected integers of 32 bits"),
        ([ENTRIES[0], [[-(10**400), 7, None]]], "got a number of 1329 bits, expected log-probs"),
        ([ENTRIES[0], [[-0.25, -7, None]]], "got -7 at position 1"),
        ([ENTRIES[0], [[math.nan, 7, None]]], "got nan at position 1"),
        ([ENTRIES[0], [[0.25, 7, None]]], "got 0.25 at position 1"),
        ([ENTRIES[0], [[-1e39, 7, None]]], "expected values that float32 can hold"),
        ([ENTRIES[0][::-1], ENTRIES[1]], "highest first"),
        ([ENTRIES[0] + ENTRIES[0][:1], ENTRIES[1]], "highest first"),
        ([[*ENTRIES[0], [-2.0, 5, None]], ENTRIES[1]], "5 occurs twice at position 0"),
    ],
)
def test_malformed_lists_are_named(rows, problem):
    assert formats.decode_top_p({LISTS: ENTRIES}, [2, 7]) == SETS
    with pytest.raises(WireError, match=problem) as caught:
        formats.decode_top_p({LISTS: rows}, [2, 7])
    assert caught.value.field == LISTS
    assert type(caught.value) is WireError


@pytest.mark.parametrize(
    ("output_ids", "problem"),
    [
        ([2, -1], "got -1, expected token ids from 0 to 2147483647"),
        ([2, 2**31], "got 2147483648, expected integers of 32 bits"),
        ([2, 10**9999], "got a number of 33216 bits, expected integers of 32 bits"),
        ([2, 2**70], "expected integers of 32 bits"),
        ([2, 7.0], "expected integers of 32 bits"),
        ([2, "7"], "expected integers of 32 bits"),
        ([2, None], "expected integers of 32 bits"),
        ([2, True], "got True"),
        ([[2, 7]], "expected integers of 32 bits"),
        ((2, "7"), "expected integers of 32 bits"),
        (np.array([2.0, 7.0]), "got 1-D float64"),
        (np.array([[2, 7]]), "got 2-D int64"),
        (np.array(2), "got 0-D int64"),
        (None, "got 0-D object"),
        (((2,), (2, 7)), "expected integers of 32 bits"),
    ],
)
def test_malformed_output_ids_are_named(output_ids, problem):
    with pytest.raises(WireError, match=problem) as caught:
        formats.decode_top_p(FIELDS, output_ids)
    assert caught.value.field == "output_ids"


def test_ids_from_the_vocabulary_size_on():
    for fields, field in ((FIELDS, IDX), ({LISTS: ENTRIES}, LISTS)):
        assert formats.decode_top_p(fields, [2, 7], vocab_size=10) == SETS
        with pytest.raises(WireError, match="got id 9, expected less than vocab_size 9") as caught:
            formats.decode_top_p(fields, [2, 7], vocab_size=9)
        assert caught.value.field == field


@pytest.mark.parametrize("fields", [FIELDS, {LISTS: ENTRIES}], ids=["base64", "lists"])
def test_a_sampled_token_that_is_not_in_its_set(fields):
    with pytest.raises(SampledTokenMissingError, match="5 is not among the 1 candidates at position 1"):
        formats.decode_top_p(fields, [2, 5])


@pytest.mark.parametrize("meta_info", [{}, {"output_token_logprobs": [], "id": "x"}])
def test_no_sets_at_all(meta_info):
    assert not formats.has_top_p(meta_info)
    with pytest.raises(MissingCandidateSetsError, match="holds no candidate sets; is top_logprobs_p in"):
        formats.decode_top_p(meta_info, [2, 7])


@pytest.mark.parametrize(
    "fields",
    [{VAL: b64(LOGPROBS[:3], "f"), IDX: b64(IDS[:3], "i"), LENGTHS: [3, length]} for length in (0, -1)]
    + [{LISTS: [ENTRIES[0], row]} for row in ([], None)],
)
def test_no_set_at_a_generated_position(fields):
    with pytest.raises(
        MissingCandidateSetsError, match="no candidate set at 1 of 2 positions, the first at 1"
    ):
        formats.decode_top_p(fields, [2, 7])
    as_input = {key.replace("output", "input"): value for key, value in fields.items()}
    assert formats.decode_top_p(as_input, [2, 7], side="input").sizes.tolist() == [3, 0]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(FIELDS[VAL]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=10,
)


@given(st.fixed_dictionaries({}, optional={VAL: json_values, IDX: json_values, LENGTHS: json_values}))
@settings(max_examples=300)
def test_any_field_value_decodes_or_raises_a_wire_error(change):
    got, field = outcome(formats.decode_top_p, FIELDS | change, [2, 7])
    assert got == SETS if field is None else field in (VAL, IDX, LENGTHS)


@given(json_values | st.lists(st.lists(st.lists(json_values, max_size=3), max_size=3), max_size=3))
@settings(max_examples=300)
def test_any_list_form_decodes_or_raises_a_wire_error(rows):
    got, field = outcome(formats.decode_top_p, {LISTS: rows}, [2, 7])
    if field is None:
        assert got.to_lists()[0] == [[entry[1] for entry in row] for row in rows]
    else:
        assert field in (LISTS, LENGTHS)


@given(candidate_sets(), st.data())
@settings(max_examples=300)
def test_flipped_bytes_raise_or_decode_to_valid_sets(sets, data):
    # The arrays have no checksum, so a flip may give another valid value, but never an invalid one.
    fields = encoded(sets)
    key = data.draw(st.sampled_from([VAL, IDX]))
    raw = bytearray(base64.b64decode(fields[key]))
    if not raw:
        return
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    fields[key] = base64.b64encode(raw).decode()
    got, field = outcome(formats.decode_top_p, fields, sets.sampled_ids)
    if field is None:
        assert encoded(got) == fields
        assert CandidateSets(*got._arrays()) == got
    else:
        assert field in (VAL, IDX)
