"""The binary codec: the same sample as in JSON, or an error that names the field."""

import json
import struct
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import CandidateSets, errors
from sglang_topp_client import Rollout
from sglang_topp_client.wire.frame import encode_frame
from sglang_topp_client.wire.records import from_frame, to_frame, to_record
from tests.client import conftest as fakes

MIB = 1 << 20


def decoded(raw, max_bytes=MIB):
    return from_frame(Rollout, raw, max_bytes=max_bytes)


def taken_apart(raw):
    """Return the JSON of a frame, and the arrays after it."""
    content = zstandard.decompress(raw)
    (num_text,) = struct.unpack_from("<I", content)
    return json.loads(content[4 : 4 + num_text]), content[4 + num_text :]


def put_together(record, arrays, **options):
    """Return a frame with a valid checksum around any content."""
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    options = {"write_checksum": True} | options
    return zstandard.ZstdCompressor(**options).compress(struct.pack("<I", len(text)) + text + arrays)


@pytest.fixture
def rollout():
    return fakes.sample([5, 6], 1, 40)


# Lengths around a block of 65,536 numbers, and ids that use each of their four bytes.
@pytest.mark.parametrize("num_candidates", [1, 65_535, 65_536, 65_537, 200_000])
def test_arrays_of_several_blocks(rollout, num_candidates):
    rng = np.random.default_rng(num_candidates)
    ids = np.unique(rng.integers(0, 2**31 - 1, num_candidates, endpoint=True).astype(np.int32))
    logprobs = -np.sort(rng.random(len(ids)).astype(np.float32))
    sets = CandidateSets(ids, logprobs, [0, len(ids)], ids[-1:])
    made = replace(
        rollout, output_ids=ids[-1:], logprobs=logprobs[-1:], candidates=sets, weight_spans=None, text=""
    )
    assert decoded(to_frame(made), 8 * MIB).candidates == sets


def test_a_frame_is_at_most_half_as_long_as_the_json():
    made = fakes.sample([5, 6], 0, 1000)
    sizes = np.full(1000, 8)
    logprobs = np.sort(np.log(np.random.default_rng(0).dirichlet(np.ones(8), 1000)))[:, ::-1]
    ids = (np.arange(1000)[:, None] + 19_000 * np.arange(8)) % 151_936
    sets = CandidateSets(ids.ravel(), logprobs.astype(np.float32).ravel(), np.cumsum([0, *sizes]), ids[:, 3])
    made = replace(
        made, output_ids=sets.sampled_ids, logprobs=sets.sampled_logprobs, candidates=sets, weight_spans=None
    )
    assert len(to_frame(made)) <= 0.5 * len(json.dumps(to_record(made), separators=(",", ":")))


@pytest.mark.parametrize(("t", "value"), [(3, -1.0), (3, 0.5), (3, -1e30), (3, -np.inf), (0, np.nan)])
def test_sets_of_other_log_probs_are_errors(rollout, t, value):
    logprobs = rollout.logprobs.copy()
    logprobs[t] = value
    with pytest.raises(errors.WireError):
        decoded(to_frame(replace(rollout, logprobs=logprobs)))


# -- altered, cut, or hostile ----------------------------------------------------------------------


@given(data=st.data())
def test_any_changed_byte_is_noticed(data):
    sample = fakes.sample([5, 6], 1)
    raw = bytearray(to_frame(sample))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        back = decoded(bytes(raw))
    except errors.WireError:
        return
    # Zstandard ignores one bit of its header.
    assert at == 4
    assert to_record(back) == to_record(sample)


def test_every_other_length_is_noticed(rollout):
    raw = to_frame(rollout)
    for wrong in [*(raw[:stop] for stop in range(0, len(raw), 7)), raw[:-1], raw + b"\0", raw + raw, b""]:
        with pytest.raises(errors.WireError, match="frame: "):
            decoded(wrong)


def test_unknown_fields_are_ignored(rollout):
    record, arrays = taken_apart(to_frame(rollout))
    back = decoded(put_together(record | {"added_later": 1, "candidates": "x"}, arrays))
    assert to_record(back) == to_record(rollout)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_tokens": 1}, r"candidates\.offsets: run from 0 to \d+"),
        ({"completion_tokens": 41}, "output_ids: got -"),
        ({"completion_tokens": 2**62}, "frame: got .* bytes, too few for 4611686018427387904 output_ids"),
        ({"num_candidates": 2**62}, "frame: got .* bytes, too few for candidate ids"),
        ({"num_candidates": 1}, r"candidates\.offsets: run from 0 to \d+"),
        ({"num_candidates": None}, "frame: got .* bytes, expected"),
        ({"num_candidates": -1}, "num_candidates"),
        ({"num_candidates": "8"}, "num_candidates"),
        ({"prompt_tokens": -1}, "prompt_tokens"),
        ({"prompt_tokens": 10**30}, "prompt_tokens"),
        ({"prompt_tokens": True}, "prompt_tokens"),
        ({"completion_tokens": None}, "completion_tokens"),
        ({"text": "\ud800"}, "frame: got .* invalid utf-16 surrogate|frame: got .* surrogate pair"),
        ({"timing": {}}, "latency_s"),
        ({"weight_versions": [{"version": "7", "start": 0, "end": 2}]}, "weight_versions"),
        ({"top_logprobs_source": "nucleus"}, "top_logprobs_source"),
    ],
)
def test_values_at_odds_are_errors(rollout, changes, field):
    record, arrays = taken_apart(to_frame(rollout))
    with pytest.raises(errors.WireError, match=field):
        decoded(put_together(record | changes, arrays))


@pytest.mark.parametrize("text", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000])
def test_json_that_is_not_an_object_is_an_error(text):
    with pytest.raises(errors.WireError, match="frame: got"):
        decoded(put_together(text, b""))


@pytest.mark.parametrize("content", [b"", b"\1", struct.pack("<I", 2**32 - 1) + b"{}"])
def test_content_without_its_json_is_an_error(content):
    with pytest.raises(errors.WireError, match="frame: got"):
        decoded(zstandard.ZstdCompressor(write_checksum=True).compress(content))


@pytest.mark.parametrize("name", ["prompt_ids", "output_ids"])
def test_a_negative_id_is_named(rollout, name):
    record, _ = taken_apart(to_frame(rollout))
    ids = {"prompt_ids": rollout.prompt_ids.copy(), "output_ids": rollout.output_ids.copy()}
    ids[name][0] = -3
    raw = encode_frame(record, [*ids.values(), rollout.logprobs])
    with pytest.raises(errors.WireError, match=f"{name}: got -3, expected token ids"):
        decoded(raw)


def test_a_frame_without_checksum_or_size_is_refused(rollout):
    record, arrays = taken_apart(to_frame(rollout))
    for options in ({"write_checksum": False}, {"write_content_size": False}):
        with pytest.raises(errors.WireError, match="states no content size or has no checksum"):
            decoded(put_together(record, arrays, **options))


def test_a_frame_that_states_too_much_content_is_not_decompressed():
    raw = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1 << 28))
    assert len(raw) < 1 << 15
    # The header states a size that the frame does not have.
    stated = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(bytes(1000)))
    tracemalloc.start()
    with pytest.raises(errors.WireError, match="max_message_bytes: got 268435456 bytes of one sample"):
        decoded(raw)
    size = stated.index(struct.pack("<H", 1000 - 256))
    stated[size : size + 2] = struct.pack("<H", 65_535)
    with pytest.raises(errors.WireError, match="frame: cannot be decompressed"):
        decoded(bytes(stated))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MIB


def test_content_of_exactly_the_limit_is_accepted(rollout):
    raw = to_frame(rollout)
    size = len(zstandard.decompress(raw))
    assert to_record(decoded(raw, size)) == to_record(rollout)
    with pytest.raises(errors.WireError, match="max_message_bytes"):
        decoded(raw, size - 1)


@given(data=st.data())
def test_hostile_arrays_are_a_valid_sample_or_an_error(data):
    record, arrays = taken_apart(to_frame(fakes.sample([5, 6], 1)))
    arrays = bytearray(arrays)
    for _ in range(data.draw(st.integers(1, 4))):
        arrays[data.draw(st.integers(0, len(arrays) - 1))] = data.draw(st.integers(0, 255))
    del arrays[len(arrays) - data.draw(st.integers(0, 3)) :]
    try:
        back = decoded(put_together(record, bytes(arrays)))
    except errors.WireError:
        return
    assert back.candidates is None or len(back.candidates) == len(back.output_ids)
