"""JSON codec and binary codec of scores: the sidecar encodes a score, and the client decodes it.

A record, the JSON object of one scored sequence, has these fields::

    sequence_index                      the index of the sequence in the request, from 0
    request_id                          the engine's id of the request
    token_ids                           list of integers, the whole sequence
    start                               the first scored position
    logprobs                            base64 of little-endian float32, one per position from `start` on
    candidates                          base64 of `formats.pack`, one set per scored position, or null
    weight_version                      string or null
    num_tokens, cached_tokens           integers

The binary codec writes a Zstandard frame (`binary_frame.py`). The frame holds three parts in this order: the
record's JSON without arrays and sets, the arrays `token_ids` and `logprobs`, and the candidate sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import WireError
from sglang_topp.formats.field_parsing import FLOAT32
from sglang_topp_client.codecs.answer_consistency import check_sets
from sglang_topp_client.codecs.binary_frame import FrameReader, encode_frame
from sglang_topp_client.codecs.json_fields import (
    check_ids,
    read_count,
    read_float32,
    read_optional_text,
    read_text,
    read_token_ids,
)
from sglang_topp_client.types.score import Score

__all__ = ["MEDIA_TYPE", "score_from_bytes", "score_from_json", "score_to_bytes", "score_to_json"]

MEDIA_TYPE = "application/vnd.sglang-topp.scores.v1"
"""The media type of an answer whose messages begin with their length (`framing.py`).

Each message holds a score as a Zstandard frame, or a JSON object.
"""

_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


def score_to_json(score: Score) -> dict[str, Any]:
    """Return one scored sequence as a JSON object, ready for `json.dumps`."""
    return {
        "sequence_index": score.sequence_index,
        "request_id": score.request_id,
        "token_ids": score.token_ids.tolist(),
        "start": score.start,
        "logprobs": pybase64.b64encode(score.logprobs.astype(FLOAT32).tobytes()).decode("ascii"),
        "candidates": None if score.candidates is None else formats.pack_base64(score.candidates),
        "weight_version": score.weight_version,
        "num_tokens": len(score.token_ids),
        "cached_tokens": score.cached_tokens,
    }


def score_from_json(record: Any) -> Score:
    """Decode a record that `score_to_json` encoded. Unknown fields of the record are ignored.

    Raises:
        WireError: a field is missing, has the wrong type, or contradicts another field; the error names the
            field.
    """
    if not isinstance(record, Mapping):
        raise WireError("record", f"got {type(record).__name__}, expected an object")
    token_ids = read_token_ids(record, "token_ids")
    if (count := read_count(record, "num_tokens")) != len(token_ids):
        raise WireError("num_tokens", f"got {count}, but there are {len(token_ids)} ids")
    packed = record.get("candidates")
    candidates = None if packed is None else formats.unpack_base64(packed)
    return _score(record, token_ids, read_float32(record, "logprobs"), candidates)


def score_to_bytes(score: Score) -> bytes:
    """Encode one scored sequence as a frame."""
    bare = replace(score, token_ids=_NO_IDS, logprobs=_NO_LOGPROBS, candidates=None)
    record = score_to_json(bare) | {"num_tokens": len(score.token_ids)}
    for name in ("token_ids", "logprobs", "candidates"):
        del record[name]
    return encode_frame(record, (score.token_ids, score.logprobs), score.candidates)


def score_from_bytes(raw: bytes, *, max_bytes: int) -> Score:
    """Decode a frame that `score_to_bytes` encoded. Unknown fields in the frame's JSON are ignored.

    Args:
        raw: one frame.
        max_bytes: the maximum length of the decompressed content.

    Raises:
        WireError: the frame was cut or altered, is too long, or does not hold a valid score; the error names
            the field.
    """
    frame = FrameReader(raw, max_bytes=max_bytes)
    num_tokens, start = read_count(frame.record, "num_tokens"), _start(frame.record)
    num_scored = max(num_tokens - start, 0)
    token_ids = frame.int32(num_tokens, f"{num_tokens} token_ids")
    logprobs = frame.float32(num_scored, f"{num_scored} logprobs")
    check_ids("token_ids", token_ids)
    return _score(frame.record, token_ids, logprobs, frame.sets(token_ids[start:]))


def _score(
    record: Mapping[str, Any],
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    candidates: CandidateSets | None,
) -> Score:
    """Build a score from the JSON fields and the decoded arrays of a record."""
    start = _start(record)
    if start > len(token_ids):
        raise WireError("start", f"got {start}, expected at most {len(token_ids)}, the number of token_ids")
    scored = token_ids[start:]
    if len(logprobs) != len(scored):
        raise WireError("logprobs", f"got {len(logprobs)} for {len(scored)} positions")
    if np.isnan(logprobs).any():
        raise WireError("logprobs", f"got NaN at position {int(np.isnan(logprobs).argmax())}")
    if candidates is not None:
        check_sets(candidates, scored, logprobs, field="candidates")
    return Score(
        sequence_index=read_count(record, "sequence_index"),
        request_id=read_text(record, "request_id"),
        token_ids=token_ids,
        start=start,
        logprobs=logprobs,
        candidates=candidates,
        weight_version=read_optional_text(record, "weight_version"),
        cached_tokens=read_count(record, "cached_tokens"),
    )


def _start(record: Mapping[str, Any]) -> int:
    if not (start := read_count(record, "start")):
        raise WireError("start", "got 0, expected 1 or more")
    return start
