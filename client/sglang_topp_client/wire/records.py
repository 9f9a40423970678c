"""Encode rollouts and scores as JSON records or as binary frames, and decode them.

A JSON record of a rollout has these fields::

    prompt_index                        the index of the prompt in the request, from 0
    sample_index                        the index of the sample among the prompt's samples, from 0
    request_id                          the engine's id of the sample
    prompt_ids, output_ids              lists of integers
    text                                string
    logprobs                            base64 of little-endian float32, one per output token
    candidates                          base64 of `sglang_topp.formats.pack`, or null
    top_logprobs_source                 "distribution" or "sampler" (`rollout.py`), or null
    top_logprobs_p                      the requested threshold p of the sets, or null
    sampling_params                     an object without `n`, or null
    finish_reason                       "stop", "length", "abort", or "extended"
    weight_version                      string or null, for the last token
    weight_versions                     [{"version", "start", "end"}, ...] (`weight_spans`), or null
    prompt_tokens, completion_tokens, cached_tokens
    timing                              {"latency_s": seconds}
    routing_key                         string
    appended_spans                      [[start, end], ...], the output ids that `Rollout.extend` appended

A JSON record of a score has these fields::

    sequence_index                      the index of the sequence in the request, from 0
    request_id                          the engine's id of the request
    token_ids                           list of integers, the whole sequence
    start                               the first scored position
    logprobs                            base64 of little-endian float32, one per position from `start` on
    candidates                          base64 of `formats.pack`, one set per scored position, or null
    weight_version                      string or null
    num_tokens, cached_tokens           integers

A frame (`frame.py`) holds the record's JSON without arrays and sets, then the arrays `prompt_ids` and
`output_ids`, or `token_ids`, then `logprobs`, and then the candidate sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import WireError, describe
from sglang_topp.formats.field_parsing import FLOAT32
from sglang_topp_client.rollout import DISTRIBUTION, SAMPLER, Rollout, Score, spans_from_json, spans_to_json
from sglang_topp_client.wire.field_checks import (
    check_ids,
    check_seconds,
    check_sets,
    read_count,
    read_field,
    read_float32,
    read_optional_text,
    read_text,
    read_token_ids,
)
from sglang_topp_client.wire.frame import FrameReader, encode_frame

__all__ = [
    "ROLLOUTS_MEDIA_TYPE",
    "SCORES_MEDIA_TYPE",
    "rollout_from_bytes",
    "rollout_from_json",
    "rollout_to_bytes",
    "rollout_to_json",
    "score_from_bytes",
    "score_from_json",
    "score_to_bytes",
    "score_to_json",
]


ROLLOUTS_MEDIA_TYPE = "application/vnd.sglang-topp.rollouts.v1"
SCORES_MEDIA_TYPE = "application/vnd.sglang-topp.scores.v1"
"""The media types of answers whose messages begin with their length (`framing.py`).

Each message holds a rollout or a score as a Zstandard frame, or a JSON object.
"""

_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    """Return one finished sample as a JSON object, ready for `json.dumps`."""
    return {
        "prompt_index": rollout.prompt_index,
        "sample_index": rollout.sample_index,
        "request_id": rollout.request_id,
        "prompt_ids": rollout.prompt_ids.tolist(),
        "output_ids": rollout.output_ids.tolist(),
        "text": rollout.text,
        "logprobs": pybase64.b64encode(rollout.logprobs.astype(FLOAT32).tobytes()).decode("ascii"),
        "candidates": None if rollout.candidates is None else formats.pack_base64(rollout.candidates),
        "top_logprobs_source": rollout.top_logprobs_source,
        "top_logprobs_p": rollout.top_logprobs_p,
        "sampling_params": rollout.sampling_params,
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.weight_version,
        "weight_versions": None if rollout.weight_spans is None else spans_to_json(rollout.weight_spans),
        "prompt_tokens": len(rollout.prompt_ids),
        "completion_tokens": len(rollout.output_ids),
        "cached_tokens": rollout.cached_tokens,
        "timing": {"latency_s": rollout.latency_s},
        "routing_key": rollout.routing_key,
        "appended_spans": [list(span) for span in rollout.appended_spans],
    }


def rollout_from_json(record: Any, *, may_be_extended: bool = False) -> Rollout:
    """Decode a record that `rollout_to_json` encoded. Unknown fields of the record are ignored.

    Args:
        record: the JSON object.
        may_be_extended: whether to accept tokens that `Rollout.extend` appended. Appended tokens have empty
            candidate sets.

    Raises:
        WireError: a field is missing, has the wrong type, or contradicts another field; the error names the
            field.
    """
    if not isinstance(record, Mapping):
        raise WireError("record", f"got {type(record).__name__}, expected an object")
    prompt_ids, output_ids = read_token_ids(record, "prompt_ids"), read_token_ids(record, "output_ids")
    for name, ids in (("prompt_tokens", prompt_ids), ("completion_tokens", output_ids)):
        if (count := read_count(record, name)) != len(ids):
            raise WireError(name, f"got {count}, but there are {len(ids)} ids")
    packed = record.get("candidates")
    candidates = None if packed is None else formats.unpack_base64(packed)
    logprobs = read_float32(record, "logprobs")
    return build_rollout(
        record, prompt_ids, output_ids, logprobs, candidates, may_be_extended=may_be_extended
    )


def build_rollout(
    record: Mapping[str, Any],
    prompt_ids: NDArray[np.int32],
    output_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    candidates: CandidateSets | None,
    *,
    may_be_extended: bool = False,
) -> Rollout:
    """Build a rollout from a record's JSON fields and decoded arrays.

    Args:
        record: the JSON fields other than the arrays. Unknown fields are ignored.
        prompt_ids: int32 [P].
        output_ids: int32 [T].
        logprobs: float32 [T].
        candidates: the candidate sets of the T positions, or None if the record has no sets.
        may_be_extended: whether to accept tokens that `Rollout.extend` appended. Appended tokens have empty
            candidate sets.

    Raises:
        WireError: a field is missing, has the wrong type, or contradicts another field; the error names the
            field.
    """
    if len(logprobs) != len(output_ids):
        raise WireError("logprobs", f"got {len(logprobs)} for {len(output_ids)} output_ids")
    if np.isnan(logprobs).any():
        raise WireError("logprobs", f"got NaN at position {int(np.isnan(logprobs).argmax())}")
    if candidates is not None:
        check_sets(candidates, output_ids, logprobs, field="candidates", may_be_extended=may_be_extended)
    latency_s = check_seconds(
        "latency_s", read_field(read_field(record, "timing", dict), "latency_s", (int, float))
    )
    return Rollout(
        prompt_index=read_count(record, "prompt_index"),
        sample_index=read_count(record, "sample_index"),
        request_id=read_text(record, "request_id"),
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        text=read_text(record, "text"),
        logprobs=logprobs,
        candidates=candidates,
        finish_reason=read_text(record, "finish_reason"),
        weight_version=read_optional_text(record, "weight_version"),
        cached_tokens=read_count(record, "cached_tokens"),
        latency_s=latency_s,
        top_logprobs_source=_source(record, has_sets=candidates is not None),
        weight_spans=spans_from_json(record.get("weight_versions"), len(output_ids)),
        routing_key=read_text(record, "routing_key") if "routing_key" in record else "",
        top_logprobs_p=_threshold(record),
        sampling_params=_sampling_params(record),
        appended_spans=_appended_spans(record, len(output_ids), may_be_extended=may_be_extended),
    )


def _source(record: Mapping[str, Any], *, has_sets: bool) -> str | None:
    if not has_sets:
        return None
    source = record.get("top_logprobs_source", DISTRIBUTION)
    if source not in (None, DISTRIBUTION, SAMPLER):
        raise WireError(
            "top_logprobs_source", f"got {describe(source)}, expected {DISTRIBUTION!r}, {SAMPLER!r}, or null"
        )
    return None if source is None else str(source)


def _threshold(record: Mapping[str, Any]) -> float | None:
    p = record.get("top_logprobs_p")
    if p is None:
        return None
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p <= 1:
        raise WireError("top_logprobs_p", f"got {describe(p)}, expected a number above 0, up to 1, or null")
    return float(p)


def _sampling_params(record: Mapping[str, Any]) -> Mapping[str, Any] | None:
    params = record.get("sampling_params")
    if params is not None and not isinstance(params, Mapping):
        raise WireError("sampling_params", f"got {type(params).__name__}, expected an object or null")
    return params


def _appended_spans(
    record: Mapping[str, Any], num_tokens: int, *, may_be_extended: bool
) -> tuple[tuple[int, int], ...]:
    name, spans, end = "appended_spans", record.get("appended_spans", []), 0
    if not isinstance(spans, list):
        raise WireError(name, f"got {type(spans).__name__}, expected a list")
    if spans and not may_be_extended:
        raise WireError(name, f"got {describe(spans)}, expected only generated tokens")
    for span in spans:
        is_pair = isinstance(span, list) and len(span) == 2 and {type(one) for one in span} == {int}
        if not is_pair or not end <= span[0] < span[1] <= num_tokens:
            raise WireError(name, f"got {describe(span)}, expected [start, end] from {end} to {num_tokens}")
        end = span[1]
    return tuple((start, end) for start, end in spans)


def rollout_to_bytes(rollout: Rollout) -> bytes:
    """Encode one finished sample as a frame."""
    bare = replace(rollout, prompt_ids=_NO_IDS, output_ids=_NO_IDS, logprobs=_NO_LOGPROBS, candidates=None)
    record = rollout_to_json(bare) | {
        "prompt_tokens": len(rollout.prompt_ids),
        "completion_tokens": len(rollout.output_ids),
    }
    for name in ("prompt_ids", "output_ids", "logprobs", "candidates"):
        del record[name]
    arrays = (rollout.prompt_ids, rollout.output_ids, rollout.logprobs)
    return encode_frame(record, arrays, rollout.candidates)


def rollout_from_bytes(raw: bytes, *, max_bytes: int) -> Rollout:
    """Decode a frame that `rollout_to_bytes` encoded. Unknown fields in the frame's JSON are ignored.

    Args:
        raw: one frame.
        max_bytes: the maximum length of the decompressed content.

    Raises:
        WireError: the frame was cut or altered, is too long, or does not hold a valid sample; the error names
            the field.
    """
    frame = FrameReader(raw, max_bytes=max_bytes)
    num_prompt, num_output = (
        read_count(frame.record, name) for name in ("prompt_tokens", "completion_tokens")
    )
    prompt_ids = frame.int32(num_prompt, f"{num_prompt} prompt_ids")
    output_ids = frame.int32(num_output, f"{num_output} output_ids")
    logprobs = frame.float32(num_output, f"{num_output} logprobs")
    check_ids("prompt_ids", prompt_ids)
    check_ids("output_ids", output_ids)
    return build_rollout(frame.record, prompt_ids, output_ids, logprobs, frame.sets(output_ids))


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
