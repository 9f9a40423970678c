"""Packed records: the same sample as in JSON, or a named error."""

import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import CandidateSets, compact, errors
from sglang_topp_client.packed_record import PackedRecord, from_packed
from sglang_topp_client.record import to_record

HEADER = struct.Struct("<4sII")


def packed(rollout, bits=32):
    return b"".join(PackedRecord(rollout, logprob_bits=bits))


def taken_apart(raw):
    """`(JSON, what is behind it)` of a packed record."""
    _, _, num_text = HEADER.unpack_from(raw)
    return json.loads(raw[HEADER.size : HEADER.size + num_text]), raw[HEADER.size + num_text : -4]


def put_together(record, rest, *, version=1):
    """A packed record that no transport has altered, whoever made it."""
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    raw = HEADER.pack(b"TPCR", version, len(text)) + text + rest
    return raw + struct.pack("<I", zlib.crc32(raw))


@pytest.fixture
def rollout(fakes):
    return fakes.sample([5, 6], 1, 40)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"candidates": None, "top_logprobs_source": None},
        {"text": 'é"\n 中文 \x00', "weight_spans": None},
        {"prompt_ids": np.empty(0, np.int32), "prompt_index": 7, "sample_index": 9, "cached_tokens": 0},
    ],
    ids=["as it is", "no sets", "text", "no prompt"],
)
def test_round_trip_is_exact(rollout, changes):
    rollout = replace(rollout, **changes)
    record = PackedRecord(rollout)
    raw = b"".join(record)

    back = from_packed(raw)

    assert to_record(back) == to_record(rollout)
    assert len(record) == len(raw)
    assert back.prompt_ids.dtype == back.output_ids.dtype == np.int32
    assert back.logprobs.flags.aligned


def test_a_sample_of_no_token(fakes):
    made = fakes.sample([5], 0)
    none = replace(
        made,
        output_ids=made.output_ids[:0],
        logprobs=made.logprobs[:0],
        candidates=CandidateSets.empty(0),
        weight_spans=(),
    )
    assert to_record(from_packed(packed(none))) == to_record(none)


def test_no_part_is_longer_than_a_piece(fakes):
    assert max(map(len, PackedRecord(fakes.sample([5, 6], 0, 40_000)))) <= 1 << 16


def test_it_is_at_most_three_fifths_of_the_json(fakes):
    made = fakes.sample([5, 6], 0, 1000)
    sizes = np.full(1000, 8)
    logprobs = np.sort(np.log(np.random.default_rng(0).dirichlet(np.ones(8), 1000)))[:, ::-1]
    ids = (np.arange(1000)[:, None] + 19_000 * np.arange(8)) % 151_936
    sets = CandidateSets(ids.ravel(), logprobs.astype(np.float32).ravel(), np.cumsum([0, *sizes]), ids[:, 3])
    made = replace(
        made, output_ids=sets.sampled_ids, logprobs=sets.sampled_logprobs, candidates=sets, weight_spans=None
    )
    assert len(packed(made)) <= 0.6 * len(json.dumps(to_record(made), separators=(",", ":")))
    assert len(packed(made, 16)) <= 0.45 * len(json.dumps(to_record(made), separators=(",", ":")))


def test_rounded_log_probs(rollout):
    raw = packed(rollout, 16)
    with pytest.raises(errors.WireError, match="candidates: holds log-probs that are rounded"):
        from_packed(raw)

    back = from_packed(raw, logprob_bits=16)

    assert np.array_equal(back.logprobs, rollout.logprobs)
    step = compact.logprob_step(compact.pack(rollout.candidates, logprob_bits=16))
    off = np.abs(back.candidates.sampled_logprobs - rollout.logprobs.astype(np.float64))
    assert 0 < off.max() <= step / 2
    assert np.abs(back.masked_logprobs - rollout.masked_logprobs).max() <= step / 2 + 1e-6


@pytest.mark.parametrize(("t", "value"), [(3, -1.0), (3, 0.5), (3, -1e30), (3, -np.inf), (0, np.nan)])
@pytest.mark.parametrize("bits", [32, 16])
def test_sets_of_other_log_probs_are_errors(rollout, bits, t, value):
    logprobs = rollout.logprobs.copy()
    logprobs[t] = value
    with pytest.raises(errors.WireError):
        from_packed(packed(replace(rollout, logprobs=logprobs), bits), logprob_bits=bits)


def test_a_sampled_token_of_no_probability_is_one_in_sixteen_bits_too(rollout):
    sets = CandidateSets([1, 2], np.array([-0.5, np.finfo(np.float32).min]), [0, 2], [2])
    rollout = replace(
        rollout,
        output_ids=sets.sampled_ids,
        logprobs=sets.sampled_logprobs,
        candidates=sets,
        weight_spans=None,
    )
    assert from_packed(packed(rollout, 16), logprob_bits=16).candidates.logprobs[1] == -np.inf


def test_sets_of_other_tokens_are_errors(rollout, fakes):
    with pytest.raises(errors.WireError):
        from_packed(packed(replace(rollout, candidates=fakes.sample([5, 6], 2, 40).candidates)))


# -- what is altered, or hostile -------------------------------------------------------------------


@given(data=st.data())
def test_any_changed_byte_is_noticed(fakes_once, data):
    raw = bytearray(packed(fakes_once.sample([5, 6], 1)))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(errors.WireError, match="frame: "):
        from_packed(bytes(raw))


def test_every_other_length_is_noticed(rollout):
    raw = packed(rollout)
    for wrong in [*(raw[:stop] for stop in range(0, len(raw), 7)), raw[:-1], raw + b"\0", b""]:
        with pytest.raises(errors.WireError, match="frame: "):
            from_packed(wrong)


def test_unknown_fields_are_passed_over(rollout):
    record, rest = taken_apart(packed(rollout))
    back = from_packed(put_together(record | {"added_later": 1, "candidates": "x"}, rest))
    assert to_record(back) == to_record(rollout)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_tokens": 1}, "candidates: got "),
        ({"completion_tokens": 41}, "output_ids: got -"),
        ({"completion_tokens": 2**62}, "frame: got .* too few for 2 and 4611686018427387904 tokens"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"prompt_tokens": 10**30}, "prompt_tokens"),
        ({"prompt_tokens": True}, "prompt_tokens"),
        ({"completion_tokens": None}, "completion_tokens"),
        ({"text": "\ud800"}, "text"),
        ({"timing": {}}, "latency_s"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 2}]}, "weight_versions"),
        ({"top_logprobs_source": "nucleus"}, "top_logprobs_source"),
    ],
)
def test_values_at_odds_are_errors(rollout, changes, field):
    record, rest = taken_apart(packed(rollout))
    with pytest.raises(errors.WireError, match=field):
        from_packed(put_together(record | changes, rest))


@pytest.mark.parametrize("text", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000])
def test_json_that_is_no_record_is_an_error(text):
    with pytest.raises(errors.WireError, match="frame: its JSON"):
        from_packed(put_together(text, b""))


def test_another_version_is_named(rollout):
    with pytest.raises(errors.WireError, match="version 2, expected b'TPCR' version 1"):
        from_packed(put_together(*taken_apart(packed(rollout)), version=2))


@pytest.mark.parametrize("at", [0, 4 * 2])
def test_a_negative_id_is_named(rollout, at):
    record, rest = taken_apart(packed(rollout))
    rest = rest[:at] + struct.pack("<i", -3) + rest[at + 4 :]
    with pytest.raises(errors.WireError, match=r"(prompt|output)_ids: got -3, expected token ids"):
        from_packed(put_together(record, rest))


@given(data=st.data())
def test_hostile_arrays_are_a_valid_sample_or_an_error(fakes_once, data):
    record, rest = taken_apart(packed(fakes_once.sample([5, 6], 1), data.draw(st.sampled_from([16, 32]))))
    rest = bytearray(rest)
    for _ in range(data.draw(st.integers(1, 4))):
        rest[data.draw(st.integers(0, len(rest) - 1))] = data.draw(st.integers(0, 255))
    del rest[len(rest) - data.draw(st.integers(0, 3)) :]
    try:
        back = from_packed(put_together(record, bytes(rest)), logprob_bits=16)
    except errors.WireError:
        return
    assert back.candidates is None or len(back.candidates) == len(back.output_ids)
