"""The compact form: exact where nothing is rounded, within its bound where something is; what is malformed is
named."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_topp import CandidateSets, compact
from sglang_topp.candidates import NO_TOKEN
from sglang_topp.errors import InvalidInputError, SampledTokenMissingError, WireError

HEADER = struct.Struct("<4sBBBBiQQ")
SETS = CandidateSets([5, 200_000, 9, 7], [-0.5, -1.0, -3.0, -0.25], [0, 3, 3, 4], [9, NO_TOKEN, 7])


@st.composite
def candidate_sets(draw, *, highest=2**31 - 1, lowest=-60.0):
    """Valid sets, with and without log-probs: ties, empty spans, float32's lowest value."""
    logprob = st.floats(lowest, 0, width=32) | st.sampled_from([0.0, -1.0])
    token = st.integers(0, draw(st.sampled_from([9, highest >> 15, highest]))) | st.integers(0, 9)
    span = st.dictionaries(token, logprob, max_size=10)
    spans = [
        sorted(entries.items(), key=lambda entry: (-entry[1], entry[0]))
        for entries in draw(st.lists(span, max_size=8))
    ]
    sampled = [draw(st.sampled_from(span))[0] if span else NO_TOKEN for span in spans]
    for span, drawn in zip(spans, sampled, strict=True):
        if len(span) > 1 and drawn == span[-1][0] and draw(st.booleans()):
            span[-1] = (drawn, draw(st.sampled_from([float(np.finfo(np.float32).min), -np.inf])))
    sets = CandidateSets(
        [token for span in spans for token, _ in span],
        np.array([logprob for span in spans for _, logprob in span], np.float32),
        np.cumsum([0, *map(len, spans)]),
        sampled,
    )
    return sets if draw(st.booleans()) else sets.without_logprobs()


@given(candidate_sets())
def test_round_trip_is_exact(sets):
    packed = compact.Packed(sets)
    raw = b"".join(packed)
    assert len(packed) == len(raw)
    assert compact.unpack(raw, sets.sampled_ids) == sets
    assert compact.logprob_step(raw) is None


@pytest.mark.parametrize("highest", [9, 65_535, 65_536, 131_072, 262_143, 2**20 - 1, 2**24, 2**31 - 1])
@pytest.mark.parametrize("num_candidates", [1, 2, 3, 7, 8, 9, 16_385, 70_000])
def test_ids_of_every_width(highest, num_candidates):
    rng = np.random.default_rng(num_candidates)
    ids = rng.integers(0, highest, num_candidates, endpoint=True).astype(np.int32)
    ids[-1] = highest
    sets = CandidateSets(ids, -np.ones(num_candidates), np.arange(num_candidates + 1), ids)

    raw = compact.pack(sets)

    assert compact.unpack(raw, ids) == sets
    bits = next(b for b in (0, 1, 2, 4, 8, 16) if highest >> 16 < 1 << b)
    assert len(raw) == HEADER.size + num_candidates * (1 + 2 + 4) + -(-num_candidates * bits // 8)


@pytest.mark.parametrize(("size", "num_bytes"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4), (151_936, 4)])
def test_sets_of_every_size(size, num_bytes):
    sets = CandidateSets(np.arange(size), -np.ones(size), [0, size, size], [3, NO_TOKEN])
    raw = compact.pack(sets)
    assert raw[5] == num_bytes
    assert compact.unpack(raw, sets.sampled_ids) == sets
    assert max(map(len, compact.Packed(sets))) <= 1 << 16


def test_bytes_are_those_of_the_docstring():
    assert compact.pack(SETS) == (
        HEADER.pack(b"TPCC", 1, 1, 2, 4, 0, 3, 4)
        + bytes([3, 0, 1])
        + struct.pack("<4H", 5, 200_000 & 0xFFFF, 9, 7)
        + bytes([(200_000 >> 16) << 2])
        + struct.pack("<4f", -0.5, -1.0, -3.0, -0.25)
    )
    rounded = compact.pack(SETS, logprob_bits=16)
    assert HEADER.unpack_from(rounded)[4:6] == (2, -14)  # 3 / 65,534 is just above 2^-15
    assert rounded.endswith(struct.pack("<4H", 8192, 16384, 3 * 16384, 4096))


# -- rounded ---------------------------------------------------------------------------------------


@given(candidate_sets(lowest=-127.0))
def test_rounded_log_probs_are_within_half_a_step(sets):
    assume(sets.has_logprobs)
    raw = compact.pack(sets, logprob_bits=16)
    step = compact.logprob_step(raw)
    back = compact.unpack(raw, sets.sampled_ids)

    known = sets.logprobs[sets.logprobs > np.finfo(np.float32).min].astype(np.float64)
    lowest = -known.min(initial=0)
    assert (lowest <= step * 65_534 and step == 2.0**-24) or step / 2 * 65_534 < lowest <= step * 65_534
    assert step / 2 <= compact.MAX_ERROR
    # Each row has the same ids, and each id its own log-prob, off by half a step at most.
    assert np.array_equal(back.offsets, sets.offsets)
    for (ids, was), (same_ids, now) in zip(sets, back, strict=True):
        order, same_order = np.argsort(ids), np.argsort(same_ids)
        assert np.array_equal(ids[order], same_ids[same_order])
        exact, near = was[order].astype(np.float64), now[same_order].astype(np.float64)
        has_mass = exact > np.finfo(np.float32).min
        assert np.all(np.abs(exact[has_mass] - near[has_mass]) <= step / 2)
        assert np.all(near[~has_mass] == -np.inf)


def test_what_becomes_equally_likely_is_in_the_order_of_ids():
    sets = CandidateSets([9, 4, 1], np.array([-12, -12.00001, -15], np.float32), [0, 3], [4])
    back = compact.unpack(compact.pack(sets, logprob_bits=16), [4])
    assert back.to_lists() == ([[4, 9, 1]], [[-12.0, -12.0, -15.0]])
    # Not across positions.
    sets = CandidateSets([9, 4], np.array([-12, -12.00001], np.float32), [0, 1, 1, 2], [9, NO_TOKEN, 4])
    back = compact.unpack(compact.pack(sets, logprob_bits=16), sets.sampled_ids)
    assert back.to_lists() == ([[9], [], [4]], [[-12.0], [], [-12.0]])


@pytest.mark.parametrize(
    "logprobs", [[-0.1, -128.0], [-0.1, -1e30], [9e-4, -0.5]], ids=["low", "very low", "above"]
)
def test_what_cannot_be_held_within_the_bound_is_not_rounded(logprobs):
    sets = CandidateSets([0, 1], np.array(logprobs, np.float32), [0, 2], [1])
    assert compact.pack(sets, logprob_bits=16) == compact.pack(sets)


def test_no_other_number_of_bits():
    with pytest.raises(InvalidInputError, match="logprob_bits: got 8, expected 32 or 16"):
        compact.pack(SETS, logprob_bits=8)


# -- what is malformed -----------------------------------------------------------------------------


@pytest.mark.parametrize("logprob_bits", [16, 32])
def test_every_other_length_is_an_error(logprob_bits):
    raw = compact.pack(SETS, logprob_bits=logprob_bits)
    for wrong in [*(raw[:stop] for stop in range(len(raw))), raw + b"\0"]:
        with pytest.raises(WireError, match=r"sets: got \d+ bytes, expected"):
            compact.unpack(wrong, SETS.sampled_ids, field="sets")


@pytest.mark.parametrize(
    ("place", "value", "sentence"),
    [
        (0, b"TPCS", "got b'TPCS' version 1"),
        (1, 2, "version 2, expected b'TPCC' version 1"),
        (2, 3, "got 3 bytes of a size"),
        (3, 3, "3 upper bits"),
        (4, 3, "3 bytes of a log-prob"),
        (5, -1, r"a step of 2\^-1, expected 2\^0 to 2\^0"),
        (6, 2**63, f"for {2**63} positions"),
        (7, 2**63, f"{2**63} candidates"),
        (7, 2**64 - 1, "candidates"),
        (6, 2**64 - 1, "positions"),
    ],
)
def test_a_wrong_header_is_named_and_allocates_nothing(place, value, sentence):
    raw = compact.pack(SETS)
    numbers = [*HEADER.unpack_from(raw)]
    numbers[place] = value
    with pytest.raises(WireError, match=sentence):
        compact.unpack(HEADER.pack(*numbers) + raw[HEADER.size :], SETS.sampled_ids)


@pytest.mark.parametrize("exponent", [-25, -8, 0, 2**31 - 1, -(2**31)])
def test_a_step_beyond_the_bound_is_refused(exponent):
    raw = bytearray(compact.pack(SETS, logprob_bits=16))
    struct.pack_into("<i", raw, 8, exponent)
    with pytest.raises(WireError, match="a step of"):
        compact.unpack(raw, SETS.sampled_ids)


def test_sizes_that_do_not_add_up():
    raw = bytearray(compact.pack(SETS))
    raw[HEADER.size] = 255
    with pytest.raises(WireError, match="sum to 256, expected 4"):
        compact.unpack(raw, SETS.sampled_ids)


def test_the_sets_of_other_tokens():
    raw = compact.pack(SETS)
    with pytest.raises(SampledTokenMissingError, match="6 is not among the 3 candidates at position 0"):
        compact.unpack(raw, [6, NO_TOKEN, 7])
    with pytest.raises(WireError, match="offsets"):
        compact.unpack(raw, [9, NO_TOKEN])


@given(candidate_sets(), st.data())
def test_damage_is_a_valid_value_or_a_wire_error(sets, data):
    raw = bytearray(compact.pack(sets, logprob_bits=data.draw(st.sampled_from([16, 32]))))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        back = compact.unpack(raw, sets.sampled_ids)
    except WireError:
        return
    CandidateSets(
        back.token_ids, back.logprobs if back.has_logprobs else None, back.offsets, back.sampled_ids
    )


def test_the_arrays_do_not_hold_the_buffer():
    raw = bytearray(compact.pack(SETS))
    back = compact.unpack(raw, SETS.sampled_ids)
    raw[:] = bytes(len(raw))
    assert back == SETS
    assert back.logprobs.flags.aligned
