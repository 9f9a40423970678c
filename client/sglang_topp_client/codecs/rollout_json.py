"""JSON codec of rollouts: encode a rollout as a JSON object, and decode the object.

A record, the JSON object of one rollout, has these fields::

    prompt_index                        the index of the prompt in the request, from 0
    sample_index                        the index of the sample among the prompt's samples, from 0
    request_id                          the engine's id of the sample
    prompt_ids, output_ids              lists of integers
    text                                string
    logprobs                            base64 of little-endian float32, one per output token
    candidates                          base64 of `sglang_topp.formats.pack`, or null
    top_logprobs_source                 "distribution" or "sampler" (`types/rollout.py`), or null
    top_logprobs_p                      the requested threshold p of the sets, or null
    sampling_params                     an object without `n`, or null
    finish_reason                       "stop", "length", "abort", or "extended"
    weight_version                      string or null, for the last token
    weight_versions                     [{"version", "start", "end"}, ...] (`weight_spans.py`), or null
    prompt_tokens, completion_tokens, cached_tokens
    timing                              {"latency_s": seconds}
    routing_key                         string
    appended_spans                      [[start, end], ...], the output ids that `Rollout.extend` appended
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from sglang_topp import CandidateSets, formats
from sglang_topp.errors import WireError, describe
from sglang_topp.formats.field_parsing import FLOAT32
from sglang_topp_client.codecs.answer_consistency import check_sets
from sglang_topp_client.codecs.json_fields import (
    check_seconds,
    read_count,
    read_field,
    read_float32,
    read_optional_text,
    read_text,
    read_token_ids,
)
from sglang_topp_client.types.rollout import DISTRIBUTION, SAMPLER, Rollout
from sglang_topp_client.types.weight_spans import spans_from_json, spans_to_json

__all__ = ["build_rollout", "rollout_from_json", "rollout_to_json"]


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
