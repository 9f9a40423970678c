"""Scores as the sidecar's JSON and as its frames, both ways: what the server writes, the client reads.

One scored sequence is one record::

    sequence_index                      an integer, in the order of the request
    request_id                          the engine's id
    token_ids                           list of integers, the whole sequence
    start                               the first position that is scored
    logprobs                            base64 of little-endian float32, one per position from `start` on
    candidates                          base64 of `sglang_topp.wire.pack`, one set per such position, or null
    weight_version                      string
    num_tokens, cached_tokens           integers

As a frame (`packed_frame.py`) it is of the kind b"TPSC", with `token_ids` and `logprobs` as its arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from sglang_topp import CandidateSets, wire
from sglang_topp.errors import WireError
from sglang_topp_client.packed_frame import FLOAT32, INT32, OpenFrame, PackedFrame
from sglang_topp_client.record import check_ids, check_sets, count_of, float32_of, ids_of, text_of
from sglang_topp_client.score import Score

__all__ = ["MAGIC", "MEDIA_TYPE", "PackedScore", "score_from_packed", "score_from_record", "score_to_record"]

MEDIA_TYPE = "application/vnd.sglang-topp.scores.v1"
"""Of an answer of frames (`messages.py`): packed scores, and JSON objects for what is none. The parameter
`logprob-bits=16` is that of rollouts (`packed_record.py`)."""

MAGIC = b"TPSC"
"""A packed score begins with it, and no JSON does."""

_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


def score_to_record(score: Score) -> dict[str, Any]:
    """The record of one scored sequence, ready for `json.dumps`."""
    return {
        "sequence_index": score.sequence_index,
        "request_id": score.request_id,
        "token_ids": score.token_ids.tolist(),
        "start": score.start,
        "logprobs": pybase64.b64encode(score.logprobs.astype(FLOAT32).tobytes()).decode("ascii"),
        "candidates": None if score.candidates is None else wire.pack_base64(score.candidates),
        "weight_version": score.weight_version,
        "num_tokens": len(score.token_ids),
        "cached_tokens": score.cached_tokens,
    }


def score_from_record(record: Any) -> Score:
    """The score that `score_to_record` wrote; unknown fields are passed over.

    Raises:
        WireError: a field is missing, of the wrong type, or at odds with another; it is named.
    """
    if not isinstance(record, Mapping):
        raise WireError("record", f"got {type(record).__name__}, expected an object")
    token_ids = ids_of(record, "token_ids")
    if (count := count_of(record, "num_tokens")) != len(token_ids):
        raise WireError("num_tokens", f"got {count}, but there are {len(token_ids)} ids")
    packed = record.get("candidates")
    candidates = None if packed is None else wire.unpack_base64(packed)
    return _score(record, token_ids, float32_of(record, "logprobs"), candidates)


class PackedScore(PackedFrame):
    """The bytes of one scored sequence, made as they are asked for; their number is known before.

    Args:
        score: the sequence's.
        logprob_bits: of the candidates' log-probs, 32 or 16: see `sglang_topp.compact.Packed`.
    """

    def __init__(self, score: Score, *, logprob_bits: int = 32) -> None:
        bare = replace(score, token_ids=_NO_IDS, logprobs=_NO_LOGPROBS, candidates=None)
        record = score_to_record(bare) | {"num_tokens": len(score.token_ids)}
        for name in ("token_ids", "logprobs", "candidates"):
            del record[name]
        arrays = (score.token_ids.astype(INT32, copy=False), score.logprobs.astype(FLOAT32, copy=False))
        super().__init__(MAGIC, record, arrays, score.candidates, logprob_bits=logprob_bits)


def score_from_packed(raw: bytes, *, logprob_bits: int = 32) -> Score:
    """The score that `PackedScore` wrote; unknown fields of its JSON are passed over.

    Args:
        raw: one frame.
        logprob_bits: what was asked for; where it is 32, rounded log-probs are an error.

    Raises:
        WireError: the frame was cut or altered, is of another version, or holds no valid score; the field
            at fault is named.
    """
    frame = OpenFrame(raw, MAGIC)
    num_tokens, start = count_of(frame.record, "num_tokens"), _start(frame.record)
    num_scored = max(num_tokens - start, 0)
    frame.require(num_tokens + num_scored, f"{num_tokens} tokens, {num_scored} of them scored,")
    token_ids, logprobs = frame.array(INT32, num_tokens), frame.array(FLOAT32, num_scored)
    check_ids("token_ids", token_ids)
    sets, off_by = frame.sets(token_ids[start:], logprob_bits=logprob_bits)
    return _score(frame.record, token_ids, logprobs, sets, off_by=off_by)


def _score(
    record: Mapping[str, Any],
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    candidates: CandidateSets | None,
    *,
    off_by: float = 0.0,
) -> Score:
    """The score of a record whose arrays have been read; `off_by` is how far the log-probs in the sets may be
    from what they were."""
    start = _start(record)
    if start > len(token_ids):
        raise WireError("start", f"got {start}, and the sequence has {len(token_ids)} tokens")
    scored = token_ids[start:]
    if len(logprobs) != len(scored):
        raise WireError("logprobs", f"got {len(logprobs)} for {len(scored)} positions")
    if np.isnan(logprobs).any():
        raise WireError("logprobs", f"got NaN at position {int(np.isnan(logprobs).argmax())}")
    if candidates is not None:
        check_sets(candidates, scored, logprobs, field="candidates", off_by=off_by)
    return Score(
        sequence_index=count_of(record, "sequence_index"),
        request_id=text_of(record, "request_id"),
        token_ids=token_ids,
        start=start,
        logprobs=logprobs,
        candidates=candidates,
        weight_version=text_of(record, "weight_version"),
        cached_tokens=count_of(record, "cached_tokens"),
    )


def _start(record: Mapping[str, Any]) -> int:
    if not (start := count_of(record, "start")):
        raise WireError("start", "got 0, expected 1 or more")
    return start
