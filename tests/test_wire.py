"""The wire: what is written can be read by anyone, what is read is exact, and what is malformed is named."""

from __future__ import annotations

import base64
import json
import math
import struct
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_topp import CandidateSets, wire
from sglang_topp.candidates import NO_TOKEN
from sglang_topp.errors import MissingCandidateSetsError, SampledTokenMissingError, WireError

VAL, IDX, LENGTHS = (f"output_top_p_logprobs_{kind}" for kind in ("val_base64", "idx_base64", "lengths"))
LISTS = "output_top_p_logprobs"


@st.composite
def candidate_sets(draw, *, empty_spans=False):
    """Valid sets; ids up to int32's end, ties, float32's lowest value, and every size from 1 on."""
    logprob = st.floats(-60, 0, width=32) | st.sampled_from([0.0, -1.0])
    token = st.integers(0, 2**31 - 1) | st.integers(0, 9)
    span = st.dictionaries(token, logprob, min_size=0 if empty_spans else 1, max_size=10)
    spans = [
        sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))
        for entries in draw(st.lists(span, max_size=8))
    ]
    sampled = [draw(st.sampled_from(span))[0] if span else 0 for span in spans]
    for span, drawn in zip(spans, sampled, strict=True):
        if len(span) > 1 and drawn == span[-1][0] and draw(st.booleans()):
            span[-1] = (drawn, float(np.finfo(np.float32).min))
    return CandidateSets(
        [token for span in spans for token, _ in span],
        np.array([logprob for span in spans for _, logprob in span], np.float32),
        np.cumsum([0, *map(len, spans)]),
        sampled,
    )


def encoded(sets, side="output"):
    return wire.encode_sets(side, sets.token_ids, sets.logprobs, sets.sizes.tolist())


def listed(sets, side="output"):
    return {
        f"{side}_top_p_logprobs": [
            [[logprob, token, None] for logprob, token in zip(values, ids, strict=True)] or None
            for ids, values in zip(*sets.to_lists(), strict=True)
        ]
    }


SETS = CandidateSets([5, 2, 9, 7], [-0.5, -1.0, -1.0, -0.25], [0, 3, 4], [2, 7])


def b64(numbers, code):
    return base64.b64encode(struct.pack(f"<{len(numbers)}{code}", *numbers)).decode()


# -- round trips -----------------------------------------------------------------------------------


@given(candidate_sets())
def test_meta_info_of_generated_tokens(sets):
    output_ids = sets.sampled_ids.tolist()
    for fields in (encoded(sets), listed(sets)):
        meta_info = json.loads(json.dumps({"id": "x", **fields}))
        assert wire.has_output_sets(meta_info)
        assert CandidateSets.from_meta_info(meta_info, output_ids) == sets
        assert wire.decode_output_sets(meta_info, sets.sampled_ids, vocab_size=2**31) == sets


@given(candidate_sets(empty_spans=True))
def test_meta_info_of_prompt_tokens(sets):
    fields = encoded(sets, "input")
    fields["input_top_p_logprobs_lengths"] = [
        size or wire.NO_DISTRIBUTION for size in fields["input_top_p_logprobs_lengths"]
    ]
    for meta_info in (fields, listed(sets, "input")):
        assert wire.decode_input_sets(json.loads(json.dumps(meta_info)), sets.sampled_ids.tolist()) == sets
    assert not wire.has_output_sets(fields)


@given(candidate_sets(empty_spans=True))
def test_packed(sets):
    packed = wire.pack(sets)
    assert len(packed) == 24 + 8 * len(sets) + 8 * len(sets.token_ids)
    for buffer in (packed, bytearray(packed), memoryview(packed), np.frombuffer(packed, np.uint8)):
        assert wire.unpack(buffer) == sets
    assert wire.unpack_base64(wire.pack_base64(sets)) == sets


@given(candidate_sets(empty_spans=True))
def test_packed_without_logprobs(sets):
    ids_only = sets.without_logprobs()
    packed = wire.pack(ids_only)
    if not len(sets.token_ids):
        assert packed == wire.pack(sets)
        return
    # Who knows version 1 alone refuses it by its version, not by its length.
    assert struct.unpack_from("<4sIQQ", packed) == (b"TPCS", 2, len(sets), len(sets.token_ids))
    assert len(packed) == 24 + 8 * len(sets) + 4 * len(sets.token_ids)
    again = wire.unpack(packed)
    assert again == ids_only != sets
    assert not again.has_logprobs
    assert wire.unpack_base64(wire.pack_base64(ids_only)) == ids_only


def test_packed_empty_spans_and_no_token():
    sets = CandidateSets.concat([SETS, CandidateSets.empty(2), SETS[1:]])
    again = wire.unpack(wire.pack(sets))
    assert again == sets
    assert again.sampled_ids.tolist() == [2, 7, NO_TOKEN, NO_TOKEN, 7]
    assert wire.unpack(wire.pack(CandidateSets.empty(0))) == CandidateSets.empty(0)


def test_unpacked_arrays_are_views_of_the_buffer():
    packed = wire.pack(SETS)
    sets = wire.unpack(packed)
    whole = np.frombuffer(packed, np.uint8)
    for array in (sets.token_ids, sets.logprobs, sets.sampled_ids):
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable
    assert not wire.unpack(bytearray(packed)).token_ids.flags.writeable


# -- the encoding itself ---------------------------------------------------------------------------


@given(candidate_sets())
def test_fields_are_read_with_nothing_of_ours(sets):
    # As a client that knows the field names alone would: little-endian float32 and int32, lengths.
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


def test_packed_layout_is_the_documented_one():
    expected = struct.pack(
        "<4sIQQ 2i 2i 4i 4f", b"TPCS", 1, 2, 4, 3, 1, 2, 7, 5, 2, 9, 7, -0.5, -1.0, -1.0, -0.25
    )
    assert wire.pack(SETS) == expected


def test_top_k_fields_leave_out_rows_without_a_distribution():
    fields = wire.encode_top_k("output", [[-0.5, -1.0], None, [-0.25, -2.0], []], [[5, 2], None, [7, 1], []])
    assert fields["output_top_logprobs_shape"] == [2, 2]
    assert fields["output_top_logprobs_none_positions"] == [1, 3]
    values = struct.unpack("<4f", base64.b64decode(fields["output_top_logprobs_val_base64"]))
    ids = struct.unpack("<4i", base64.b64decode(fields["output_top_logprobs_idx_base64"]))
    assert values == (-0.5, -1.0, -0.25, -2.0)
    assert ids == (5, 2, 7, 1)
    for rows, none in (([None], [0]), ([], [])):
        nothing = wire.encode_top_k("input", rows, rows)
        assert nothing["input_top_logprobs_shape"] == [0, 0]
        assert nothing["input_top_logprobs_none_positions"] == none
        assert nothing["input_top_logprobs_val_base64"] == nothing["input_top_logprobs_idx_base64"] == ""


@given(st.lists(candidate_sets(), min_size=1, max_size=4))
def test_chunks_merge_into_what_one_chunk_would_hold(parts):
    whole = CandidateSets.concat(parts)
    assert wire.merge_output_fields([encoded(part) for part in parts]) == encoded(whole)
    assert wire.merge_output_fields([listed(part) for part in parts]) == listed(whole)


def test_merged_chunks_know_where_rows_without_a_distribution_go():
    rows = [[[-0.5, -1.0]], [None, None], [[-0.25, -2.0], None]]
    ids = [[[5, 2]], [None, None], [[7, 1], None]]
    chunks = [wire.encode_top_k("output", *chunk) for chunk in zip(rows, ids, strict=True)]
    whole = wire.encode_top_k("output", [*chain(*rows)], [*chain(*ids)])
    assert whole["output_top_logprobs_none_positions"] == [1, 2, 4]
    assert wire.merge_output_fields(chunks) == whole


def test_a_chunk_that_lacks_a_field_leaves_the_merge_without_it():
    merged = wire.merge_output_fields([encoded(SETS), {"id": "x"}])
    assert merged == {}
    with pytest.raises(MissingCandidateSetsError):
        wire.decode_output_sets(merged, [2, 7])


# -- malformed meta_info ---------------------------------------------------------------------------

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
    "val is shorter": (VAL, {VAL: b64(LOGPROBS[:3], "f")}, "got 3 log-probs for 4 token ids"),
    "idx is shorter": (VAL, {IDX: b64(IDS[:3], "i")}, "got 4 log-probs for 3 token ids"),
    "lengths add up to less": (LENGTHS, {LENGTHS: [2, 1]}, "add up to 3, but there are 4 token ids"),
    "lengths add up to more": (LENGTHS, {LENGTHS: [4, 1]}, "add up to 5"),
    "lengths add up to more than int64": (LENGTHS, {LENGTHS: [2**63 - 1, 6]}, "got 9223372036854775807"),
    "lengths are too few": (LENGTHS, {LENGTHS: [4]}, "got 1 positions for 2 tokens"),
    "lengths are too many": (LENGTHS, {LENGTHS: [3, 1, 0]}, "got 3 positions for 2 tokens"),
    "lengths are none": (LENGTHS, {LENGTHS: []}, "got 0 positions for 2 tokens"),
    "lengths hold a float": (LENGTHS, {LENGTHS: [3.0, 1]}, "expected a list of integers"),
    "lengths hold a string": (LENGTHS, {LENGTHS: ["3", 1]}, "expected a list of integers"),
    "lengths hold a boolean": (LENGTHS, {LENGTHS: [3, True]}, "got a boolean"),
    "lengths hold false": (LENGTHS, {LENGTHS: [4, False]}, "got a boolean"),
    "lengths hold a null": (LENGTHS, {LENGTHS: [3, None]}, "expected a list of integers"),
    "lengths hold a list": (LENGTHS, {LENGTHS: [3, [1]]}, "expected a list of integers"),
    "lengths hold NaN": (LENGTHS, {LENGTHS: [3, math.nan]}, "expected a list of integers"),
    "lengths hold a huge number": (LENGTHS, {LENGTHS: [2**70, 1]}, "expected a list of integers"),
    "lengths are below -1": (LENGTHS, {LENGTHS: [6, -2]}, "got -2, expected set sizes"),
    "lengths are a string": (LENGTHS, {LENGTHS: "31"}, "got str, expected a list"),
    "lengths are an object": (LENGTHS, {LENGTHS: {"0": 3}}, "got dict, expected a list"),
    "lengths are null": (LENGTHS, {LENGTHS: None}, "got NoneType, expected a list"),
    "an id is negative": (IDX, {IDX: b64([5, 2, 9, -7], "i")}, "got -7 at position 1, expected 0 or more"),
    "an id stands twice, adjacent": (IDX, {IDX: b64([5, 2, 2, 7], "i")}, "2 then 2 .* at position 0"),
    "an id stands twice, apart": (IDX, {IDX: b64([9, 2, 9, 7], "i")}, "9 stands twice at position 0"),
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
    assert wire.decode_output_sets(FIELDS, [2, 7]) == SETS
    field, change, problem = MALFORMED[case]
    with pytest.raises(WireError, match=problem) as caught:
        wire.decode_output_sets(without_ellipsis(FIELDS | change), [2, 7])
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert type(caught.value) is WireError

    as_input = {key.replace("output", "input"): value for key, value in (FIELDS | change).items()}
    with pytest.raises(WireError, match=problem) as caught:
        wire.decode_input_sets(without_ellipsis(as_input), [2, 7])
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
        ([ENTRIES[0], [["-0.25", 7, None]]], "got '-0.25' as a log-prob"),
        ([ENTRIES[0], [[None, 7, None]]], "got None as a log-prob"),
        ([ENTRIES[0], [[True, 7, None]]], "got True as a log-prob"),
        ([ENTRIES[0], [[-0.25, 7.0, None]]], "got 7.0 as a token id"),
        ([ENTRIES[0], [[-0.25, "7", None]]], "got '7' as a token id"),
        ([ENTRIES[0], [[-0.25, True, None]]], "got True as a token id"),
        ([ENTRIES[0], [[-0.25, 2**31, None]]], "too large"),
        ([ENTRIES[0], [[-(10**400), 7, None]]], "too large"),
        ([ENTRIES[0], [[-0.25, -7, None]]], "got -7 at position 1"),
        ([ENTRIES[0], [[math.nan, 7, None]]], "got nan at position 1"),
        ([ENTRIES[0], [[0.25, 7, None]]], "got 0.25 at position 1"),
        ([ENTRIES[0], [[-1e39, 7, None]]], "expected values that float32 can hold"),
        ([ENTRIES[0][::-1], ENTRIES[1]], "highest first"),
        ([ENTRIES[0] + ENTRIES[0][:1], ENTRIES[1]], "highest first"),
        ([[*ENTRIES[0], [-2.0, 5, None]], ENTRIES[1]], "5 stands twice at position 0"),
    ],
)
def test_malformed_lists_are_named(rows, problem):
    assert wire.decode_output_sets({LISTS: ENTRIES}, [2, 7]) == SETS
    with pytest.raises(WireError, match=problem) as caught:
        wire.decode_output_sets({LISTS: rows}, [2, 7])
    assert caught.value.field == LISTS
    assert type(caught.value) is WireError


@pytest.mark.parametrize(
    ("output_ids", "problem"),
    [
        ([2, -1], "got -1, expected token ids from 0 on"),
        ([2, 2**31], "got 2147483648, expected a list of integers of 32 bits"),
        ([2, 10**9999], "got a number of 33216 bits, expected a list of integers of 32 bits"),
        ([2, 2**70], "expected a list of integers"),
        ([2, 7.0], "expected a list of integers"),
        ([2, "7"], "expected a list of integers"),
        ([2, None], "expected a list of integers"),
        ([2, True], "got a boolean"),
        ([[2, 7]], "expected a list of integers"),
        ((2, "7"), "expected a list of integers"),
        (np.array([2.0, 7.0]), "got 1-D float64"),
        (np.array([[2, 7]]), "got 2-D int64"),
        (np.array(2), "got 0-D int64"),
        (None, "got 0-D object"),
        (((2,), (2, 7)), "expected a list of integers"),
    ],
)
def test_malformed_output_ids_are_named(output_ids, problem):
    with pytest.raises(WireError, match=problem) as caught:
        wire.decode_output_sets(FIELDS, output_ids)
    assert caught.value.field == "output_ids"


def test_ids_from_the_vocabulary_size_on():
    for fields, field in ((FIELDS, IDX), ({LISTS: ENTRIES}, LISTS)):
        assert wire.decode_output_sets(fields, [2, 7], vocab_size=10) == SETS
        with pytest.raises(WireError, match="got id 9, expected less than vocab_size 9") as caught:
            CandidateSets.from_meta_info(fields, [2, 7], vocab_size=9)
        assert caught.value.field == field


@pytest.mark.parametrize("fields", [FIELDS, {LISTS: ENTRIES}], ids=["base64", "lists"])
def test_a_sampled_token_that_is_not_in_its_set(fields):
    with pytest.raises(SampledTokenMissingError, match="5 is not among the 1 candidates at position 1"):
        wire.decode_output_sets(fields, [2, 5])


@pytest.mark.parametrize("meta_info", [{}, {"output_token_logprobs": [], "id": "x"}])
def test_no_sets_at_all(meta_info):
    assert not wire.has_output_sets(meta_info)
    with pytest.raises(MissingCandidateSetsError, match="holds no candidate sets; is top_logprobs_p in"):
        wire.decode_output_sets(meta_info, [2, 7])


@pytest.mark.parametrize(
    "fields",
    [{VAL: b64(LOGPROBS[:3], "f"), IDX: b64(IDS[:3], "i"), LENGTHS: [3, length]} for length in (0, -1)]
    + [{LISTS: [ENTRIES[0], row]} for row in ([], None)],
)
def test_no_set_at_a_generated_position(fields):
    with pytest.raises(
        MissingCandidateSetsError, match="no candidate set at 1 of 2 positions, the first at 1"
    ):
        wire.decode_output_sets(fields, [2, 7])
    as_input = {key.replace("output", "input"): value for key, value in fields.items()}
    assert wire.decode_input_sets(as_input, [2, 7]).sizes.tolist() == [3, 0]


def outcome(decode, *args):
    """What `decode` made of it, or the field that its WireError names."""
    try:
        return decode(*args), None
    except WireError as error:
        return None, error.field


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(FIELDS[VAL]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=10,
)


@given(st.fixed_dictionaries({}, optional={VAL: json_values, IDX: json_values, LENGTHS: json_values}))
@settings(max_examples=300)
def test_no_value_of_a_field_raises_anything_else(change):
    got, field = outcome(wire.decode_output_sets, FIELDS | change, [2, 7])
    assert got == SETS if field is None else field in (VAL, IDX, LENGTHS)


@given(json_values | st.lists(st.lists(st.lists(json_values, max_size=3), max_size=3), max_size=3))
@settings(max_examples=300)
def test_no_list_form_raises_anything_else(rows):
    got, field = outcome(wire.decode_output_sets, {LISTS: rows}, [2, 7])
    if field is None:
        assert got.to_lists()[0] == [[entry[1] for entry in row] for row in rows]
    else:
        assert field in (LISTS, LENGTHS)


@given(candidate_sets(), st.data())
@settings(max_examples=300)
def test_flipped_bytes_are_found_or_make_other_valid_sets(sets, data):
    # The arrays carry no checksum, so a flip may give another valid value; never an invalid one.
    fields = encoded(sets)
    key = data.draw(st.sampled_from([VAL, IDX]))
    raw = bytearray(base64.b64decode(fields[key]))
    if not raw:
        return
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    fields[key] = base64.b64encode(raw).decode()
    got, field = outcome(wire.decode_output_sets, fields, sets.sampled_ids)
    if field is None:
        assert encoded(got) == fields
        assert CandidateSets(*got._arrays()) == got
    else:
        assert field in (VAL, IDX)


# -- malformed packed buffers ----------------------------------------------------------------------

PACKED = wire.pack(SETS)


def packed(*, magic=b"TPCS", version=1, positions=2, candidates=4, sizes=(3, 1), sampled=(2, 7), ids=IDS):
    header = struct.pack("<4sIQQ", magic, version, positions, candidates)
    return header + struct.pack("<2i2i4i4f", *sizes, *sampled, *ids, *LOGPROBS)


@pytest.mark.parametrize(
    ("buffer", "field", "problem"),
    [
        (b"", "candidates", "got 0 bytes, expected at least the 24"),
        (PACKED[:23], "candidates", "got 23 bytes"),
        (PACKED[:24], "candidates", "got 24 bytes, expected 72"),
        (PACKED[:-1], "candidates", "got 71 bytes, expected 72 for 2 positions, 4 candidates"),
        (PACKED + b"\0", "candidates", "got 73 bytes, expected 72"),
        (packed(magic=b"TPCX"), "candidates", "got b'TPCX' version 1, expected b'TPCS' version 1"),
        (packed(version=3), "candidates", "got b'TPCS' version 3, expected b'TPCS' version 1, or 2"),
        (packed(version=0), "candidates", "got b'TPCS' version 0"),
        (packed(version=2), "candidates", "got 72 bytes, expected 56 for 2 positions, 4 candidates"),
        (packed(version=2)[:56], "candidates.token_ids", "5 then 2 at position 0; without log-probs"),
        (struct.pack("<4sIQQ", b"TPCS", 2, 0, 0), "candidates", "got version 2 without a candidate"),
        (packed(positions=2**64 - 1), "candidates", "got 72 bytes, expected"),
        (packed(candidates=2**64 - 1), "candidates", "got 72 bytes, expected"),
        (packed(positions=2**61, candidates=6), "candidates", "got 72 bytes, expected"),
        (packed(positions=4, candidates=2), "candidates.offsets", "run from 0 to 13, expected from 0 to 2"),
        (packed(sizes=(-1, 5)), "candidates.offsets", "decrease after position 0"),
        (packed(sizes=(5, -1)), "candidates.offsets", "decrease after position 1"),
        (packed(sizes=(3, 2)), "candidates.offsets", "run from 0 to 5"),
        (packed(sizes=(2**31 - 1, 2**31 - 1)), "candidates.offsets", "run from 0 to 4294967294"),
        (packed(ids=[5, 2, 9, -7]), "candidates.token_ids", "got -7 at position 1"),
        (packed(ids=[9, 2, 9, 7]), "candidates.token_ids", "9 stands twice at position 0"),
        (packed(sampled=(8, 7)), "candidates.sampled_ids", "8 is not among the 3 candidates"),
        (packed(sampled=(-1, 7)), "candidates.sampled_ids", "-1 is not among the 3 candidates"),
    ],
)
def test_malformed_buffers_are_named(buffer, field, problem):
    assert packed() == PACKED
    with pytest.raises(WireError, match=problem) as caught:
        wire.unpack(buffer)
    assert caught.value.field == field
    assert isinstance(caught.value, SampledTokenMissingError) == (field == "candidates.sampled_ids")
    with pytest.raises(WireError, match=problem) as caught:
        wire.unpack_base64(base64.b64encode(buffer).decode(), field="sets")
    assert caught.value.field == field.replace("candidates", "sets", 1)


@pytest.mark.parametrize("text", ["!", "TPC", None, 5, b"TPCS"])
def test_packed_text_that_is_no_base64(text):
    with pytest.raises(WireError, match=r"candidates: (not base64|got \w+, expected base64 text)"):
        wire.unpack_base64(text)


@given(candidate_sets(empty_spans=True), st.booleans(), st.data())
@settings(max_examples=300)
def test_no_buffer_raises_anything_else(sets, with_logprobs, data):
    buffer = bytearray(wire.pack(sets if with_logprobs else sets.without_logprobs()))
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    buffer = buffer[: data.draw(st.integers(0, len(buffer)) | st.just(len(buffer)))]
    got, field = outcome(wire.unpack, buffer)
    if field is None:
        assert wire.pack(got) == buffer
    else:
        assert field.split(".")[0] == "candidates"


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(raw):
    with pytest.raises(WireError):
        wire.unpack(raw)
