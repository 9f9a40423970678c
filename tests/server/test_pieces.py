import json
import random

import numpy as np
import pytest

from sglang_topp import CandidateSets
from sglang_topp_client import Rollout
from sglang_topp_client.record import from_record, to_record
from sglang_topp_server.pieces import PIECE_BYTES, Record, in_pieces


def rollout(sizes, text='é"\n'):
    """One sample whose sets have these sizes; None: no sets were asked for."""
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

    raw = b"".join(Record(sample))

    assert json.loads(raw) == to_record(sample)
    assert len(Record(sample)) == len(raw)
    assert from_record(json.loads(raw)).candidates == sample.candidates


def test_no_part_of_a_record_is_longer_than_a_piece():
    assert max(map(len, Record(rollout([200_000])))) <= PIECE_BYTES


def test_pieces_are_full_but_for_the_last():
    draw = random.Random(0)
    for _ in range(50):
        sizes = [
            draw.choice([0, 1, 100, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 7]) for _ in range(9)
        ]
        chunks = [draw.randbytes(size) for size in sizes]

        pieces = list(in_pieces(chunks))

        assert b"".join(pieces) == b"".join(chunks)
        assert all(len(piece) == PIECE_BYTES for piece in pieces[:-1])
        assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces[-1:])
