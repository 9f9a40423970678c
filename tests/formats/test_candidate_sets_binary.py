"""The packed form round-trips exactly, follows its documented layout, and names malformed buffers."""

from __future__ import annotations

import base64
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_topp import CandidateSets, formats
from sglang_topp.candidates import NO_TOKEN
from sglang_topp.errors import SampledTokenMissingError, WireError
from tests.formats.hypothesis_candidate_sets import SETS, candidate_sets, outcome


@given(candidate_sets(empty_spans=True))
def test_round_trip(sets):
    packed = formats.pack(sets)
    assert len(packed) == 24 + 8 * len(sets) + 8 * len(sets.token_ids)
    for buffer in (packed, bytearray(packed), memoryview(packed), np.frombuffer(packed, np.uint8)):
        assert formats.unpack(buffer) == sets
    assert formats.unpack_base64(formats.pack_base64(sets)) == sets


@given(candidate_sets(empty_spans=True))
def test_round_trip_without_logprobs(sets):
    ids_only = sets.without_logprobs()
    packed = formats.pack(ids_only)
    if not len(sets.token_ids):
        assert packed == formats.pack(sets)
        return
    # A reader of version 1 alone refuses the buffer by its version, not by its length.
    assert struct.unpack_from("<4sIQQ", packed) == (b"TPCS", 2, len(sets), len(sets.token_ids))
    assert len(packed) == 24 + 8 * len(sets) + 4 * len(sets.token_ids)
    again = formats.unpack(packed)
    assert again == ids_only != sets
    assert not again.has_logprobs
    assert formats.unpack_base64(formats.pack_base64(ids_only)) == ids_only


def test_round_trip_of_empty_spans():
    sets = CandidateSets.concat([SETS, CandidateSets.empty(2), SETS[1:]])
    again = formats.unpack(formats.pack(sets))
    assert again == sets
    assert again.sampled_ids.tolist() == [2, 7, NO_TOKEN, NO_TOKEN, 7]
    assert formats.unpack(formats.pack(CandidateSets.empty(0))) == CandidateSets.empty(0)


def test_unpacked_arrays_are_views_of_the_buffer():
    packed = formats.pack(SETS)
    sets = formats.unpack(packed)
    whole = np.frombuffer(packed, np.uint8)
    for array in (sets.token_ids, sets.logprobs, sets.sampled_ids):
        assert np.shares_memory(array, whole)
        assert not array.flags.writeable
    assert not formats.unpack(bytearray(packed)).token_ids.flags.writeable


def test_layout_is_as_documented():
    expected = struct.pack(
        "<4sIQQ 2i 2i 4i 4f", b"TPCS", 1, 2, 4, 3, 1, 2, 7, 5, 2, 9, 7, -0.5, -1.0, -1.0, -0.25
    )
    assert formats.pack(SETS) == expected


PACKED = formats.pack(SETS)


def packed(
    *, magic=b"TPCS", version=1, positions=2, candidates=4, sizes=(3, 1), sampled=(2, 7), ids=(5, 2, 9, 7)
):
    header = struct.pack("<4sIQQ", magic, version, positions, candidates)
    return header + struct.pack("<2i2i4i4f", *sizes, *sampled, *ids, *SETS.logprobs)


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
        (packed(ids=[9, 2, 9, 7]), "candidates.token_ids", "9 occurs twice at position 0"),
        (packed(sampled=(8, 7)), "candidates.sampled_ids", "8 is not among the 3 candidates"),
        (packed(sampled=(-1, 7)), "candidates.sampled_ids", "-1 is not among the 3 candidates"),
    ],
)
def test_malformed_buffers_are_named(buffer, field, problem):
    assert packed() == PACKED
    with pytest.raises(WireError, match=problem) as caught:
        formats.unpack(buffer)
    assert caught.value.field == field
    assert isinstance(caught.value, SampledTokenMissingError) == (field == "candidates.sampled_ids")
    with pytest.raises(WireError, match=problem) as caught:
        formats.unpack_base64(base64.b64encode(buffer).decode(), field="sets")
    assert caught.value.field == field.replace("candidates", "sets", 1)


@pytest.mark.parametrize("text", ["!", "TPC", None, 5, b"TPCS"])
def test_text_that_is_not_base64(text):
    with pytest.raises(WireError, match=r"candidates: (not base64|got \w+, expected base64 text)"):
        formats.unpack_base64(text)


@given(candidate_sets(empty_spans=True), st.booleans(), st.data())
@settings(max_examples=300)
def test_any_buffer_decodes_or_raises_a_wire_error(sets, with_logprobs, data):
    buffer = bytearray(formats.pack(sets if with_logprobs else sets.without_logprobs()))
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    buffer = buffer[: data.draw(st.integers(0, len(buffer)) | st.just(len(buffer)))]
    got, field = outcome(formats.unpack, buffer)
    if field is None:
        assert formats.pack(got) == buffer
    else:
        assert field.split(".")[0] == "candidates"


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise_a_wire_error(raw):
    with pytest.raises(WireError):
        formats.unpack(raw)
