"""Records that are encoded in chunks equal those that the client writes, and no chunk is too long."""

import json
import random

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp_client import Rollout
from sglang_topp_client.wire.records import from_record, to_record
from sglang_topp_server.api.encodings import CHUNK_BYTES, SampleJson, rechunk


def rollout(sizes, text='é"\n'):
    """Return one sample whose sets have these sizes, or no sets for None."""
    sampled = np.arange(len(sizes or [1]), dtype=np.int32)
    candidates = None
    if sizes is not None:
        ids = [np.r_[s, 1000 : 999 + size] for s, size in zip(sampled, sizes, strict=True)]
        rows = [np.linspace(-1, -2, size) for size in sizes]
        candidates = CandidateSets(np.concatenate(ids), np.concatenate(rows), np.cumsum([0, *sizes]), sampled)
    return Rollout(
        prompt_index=1,
        sample_index=2,
        request_id="r",
        prompt_ids=np.array([3, 4], np.int32),
        output_ids=sampled,
        text=text,
        logprobs=np.full(len(sampled), -1, np.float32),
        candidates=candidates,
        finish_reason="stop",
        weight_version="7",
        cached_tokens=0,
        latency_s=0.5,
    )


# 24 + 8 T + 8 n bytes: every remainder of a division by three, and more than one piece.
@pytest.mark.parametrize("sizes", [None, [1], [2], [3], [1, 1], [50_000], [20_000, 1, 30_001], [6144] * 4])
def test_a_record_is_what_the_client_writes(sizes):
    sample = rollout(sizes)

    raw = b"".join(SampleJson(sample))

    assert json.loads(raw) == to_record(sample)
    assert len(SampleJson(sample)) == len(raw)
    assert from_record(Rollout, json.loads(raw)).candidates == sample.candidates


def test_no_part_of_a_record_is_longer_than_a_chunk():
    assert max(map(len, SampleJson(rollout([200_000])))) <= CHUNK_BYTES


def test_no_piece_but_the_last_is_short():
    draw = random.Random(0)
    for _ in range(50):
        sizes = [
            draw.choice([0, 1, 100, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 7]) for _ in range(9)
        ]
        chunks = [draw.randbytes(size) for size in sizes]

        pieces = list(rechunk(chunks))

        assert b"".join(pieces) == b"".join(chunks)
        assert all(CHUNK_BYTES <= len(piece) < 2 * CHUNK_BYTES for piece in pieces[:-1])
        assert all(0 < len(piece) < 2 * CHUNK_BYTES for piece in pieces[-1:])
