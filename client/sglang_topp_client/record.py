"""Rollouts and errors as the sidecar's JSON, both ways: what the server writes, the client reads.

One finished sample is one record::

    prompt_index, sample_index          integers, in the order of the request
    request_id                          the engine's id
    prompt_ids, output_ids              lists of integers
    text                                string
    logprobs                            base64 of little-endian float32, one per output token
    candidates                          base64 of `sglang_topp.wire.pack`, or null
    top_logprobs_source                 which rule made them, or null
    finish_reason                       "stop", "length", "abort" or "extended"
    weight_version                      string, the last token's
    weight_versions                     [{"version", "start", "end"}, ...] (`versions.py`), or null
    prompt_tokens, completion_tokens, cached_tokens
    timing                              {"latency_s": seconds}

A failure is `{"error": {"type", "message", "field"?, "status"?}}`, where `type` is a class of
`sglang_topp.errors`.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import pybase64
from numpy.typing import NDArray

from sglang_topp import CandidateSets, SglangToppError, errors, wire
from sglang_topp.errors import ResponseError, ServerError, WireError
from sglang_topp_client.checks import MAX_BODY_CHARS, MAX_MESSAGE_CHARS, is_text, shown
from sglang_topp_client.request import DISTRIBUTION, SAMPLER
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.versions import spans_from_json, spans_to_json

__all__ = [
    "check_ids",
    "check_kept_mass",
    "check_seconds",
    "check_sets",
    "count_of",
    "error_from_record",
    "error_to_record",
    "float32_of",
    "from_record",
    "ids_of",
    "rollout_of",
    "text_of",
    "to_record",
]

_FLOAT32 = np.dtype("<f4")
_MAX_COUNT = (1 << 63) - 1
_MAX_SECONDS = 1e12
_MASS_OFF_BY = 1 / 30
_T = TypeVar("_T")


def to_record(rollout: Rollout) -> dict[str, Any]:
    """The record of one finished sample, ready for `json.dumps`."""
    return {
        "prompt_index": rollout.prompt_index,
        "sample_index": rollout.sample_index,
        "request_id": rollout.request_id,
        "prompt_ids": rollout.prompt_ids.tolist(),
        "output_ids": rollout.output_ids.tolist(),
        "text": rollout.text,
        "logprobs": pybase64.b64encode(rollout.logprobs.astype(_FLOAT32).tobytes()).decode("ascii"),
        "candidates": None if rollout.candidates is None else wire.pack_base64(rollout.candidates),
        "top_logprobs_source": rollout.top_logprobs_source,
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.weight_version,
        "weight_versions": None if rollout.weight_spans is None else spans_to_json(rollout.weight_spans),
        "prompt_tokens": len(rollout.prompt_ids),
        "completion_tokens": len(rollout.output_ids),
        "cached_tokens": rollout.cached_tokens,
        "timing": {"latency_s": rollout.latency_s},
    }


def from_record(record: Any, *, may_be_extended: bool = False) -> Rollout:
    """The sample that `to_record` wrote; unknown fields are passed over.

    Args:
        record: the object.
        may_be_extended: whether empty sets may be among its sets, of tokens that nobody sampled; otherwise
            they are an error.

    Raises:
        WireError: a field is missing, of the wrong type, or at odds with another; it is named.
    """
    if not isinstance(record, Mapping):
        raise WireError("record", f"got {type(record).__name__}, expected an object")
    prompt_ids, output_ids = ids_of(record, "prompt_ids"), ids_of(record, "output_ids")
    for name, ids in (("prompt_tokens", prompt_ids), ("completion_tokens", output_ids)):
        if (count := count_of(record, name)) != len(ids):
            raise WireError(name, f"got {count}, but there are {len(ids)} ids")
    packed = record.get("candidates")
    candidates = None if packed is None else wire.unpack_base64(packed)
    logprobs = float32_of(record, "logprobs")
    return rollout_of(record, prompt_ids, output_ids, logprobs, candidates, may_be_extended=may_be_extended)


def rollout_of(
    record: Mapping[str, Any],
    prompt_ids: NDArray[np.int32],
    output_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    candidates: CandidateSets | None,
    *,
    off_by: float = 0.0,
    may_be_extended: bool = False,
) -> Rollout:
    """The sample of a record whose arrays have been read.

    Args:
        record: its other fields; unknown ones are passed over.
        prompt_ids: int32 [P].
        output_ids: int32 [T].
        logprobs: float32 [T].
        candidates: T positions; None where there are no sets.
        off_by: how far the log-probs in the sets may be from what they were.
        may_be_extended: whether empty sets may be among the sets.

    Raises:
        WireError: a field is missing, of the wrong type, or at odds with another; it is named.
    """
    if len(logprobs) != len(output_ids):
        raise WireError("logprobs", f"got {len(logprobs)} for {len(output_ids)} output_ids")
    if np.isnan(logprobs).any():
        raise WireError("logprobs", f"got NaN at position {int(np.isnan(logprobs).argmax())}")
    if candidates is not None:
        check_sets(
            candidates,
            output_ids,
            logprobs,
            field="candidates",
            off_by=off_by,
            may_be_extended=may_be_extended,
        )
    latency_s = check_seconds("latency_s", _field(_field(record, "timing", dict), "latency_s", (int, float)))
    return Rollout(
        prompt_index=count_of(record, "prompt_index"),
        sample_index=count_of(record, "sample_index"),
        request_id=text_of(record, "request_id"),
        prompt_ids=prompt_ids,
        output_ids=output_ids,
        text=text_of(record, "text"),
        logprobs=logprobs,
        candidates=candidates,
        finish_reason=text_of(record, "finish_reason"),
        weight_version=text_of(record, "weight_version"),
        cached_tokens=count_of(record, "cached_tokens"),
        latency_s=latency_s,
        top_logprobs_source=_source(record, has_sets=candidates is not None),
        weight_spans=spans_from_json(record.get("weight_versions"), len(output_ids)),
    )


def check_seconds(field: str, value: float) -> float:
    """`value` as a float; a WireError where it is no number of seconds."""
    # Compared before it is made a float, which an integer of hundreds of digits cannot be.
    if not 0 <= value <= _MAX_SECONDS:
        raise WireError(field, f"got {shown(value)}, expected seconds")
    return float(value)


def check_ids(field: str, ids: NDArray[np.int32]) -> None:
    """Raise WireError unless all are token ids."""
    if len(ids) and ids.min() < 0:
        raise WireError(field, f"got {ids.min()}, expected token ids of 0 or more")


def check_sets(
    candidates: CandidateSets,
    output_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    *,
    field: str,
    off_by: float = 0.0,
    may_be_extended: bool = False,
) -> None:
    """Raise WireError unless the sets belong to these tokens and hold these very log-probs.

    Both come out of the same float32 numbers in the engine, so they are compared for equality: a set
    of another position, another temperature or another request shows here.

    Args:
        candidates: T positions.
        output_ids: int32 [T].
        logprobs: float32 [T], what the engine reports for the sampled tokens.
        field: the name that the message gives the sets.
        off_by: how far the log-probs in the sets may be off, where they were rounded since.
        may_be_extended: whether sets may be empty, of tokens that nobody sampled; their log-prob is 0.
    """
    if len(candidates) != len(output_ids):
        raise WireError(field, f"got {len(candidates)} positions for {len(output_ids)} output_ids")
    if len(wrong := np.flatnonzero(candidates.sampled_ids != output_ids)):
        t = int(wrong[0])
        raise WireError(
            field,
            f"holds sampled token {candidates.sampled_ids[t]} at position {t}; the output is {output_ids[t]}",
        )
    if not may_be_extended and len(empty := np.flatnonzero(candidates.sizes == 0)):
        raise errors.MissingCandidateSetsError(field, f"no candidate set at position {int(empty[0])}")
    if not candidates.has_logprobs:
        raise WireError(field, "holds sets without log-probs")
    if len(wrong := _differing(candidates.sampled_logprobs, logprobs, off_by)):
        t = int(wrong[0])
        raise WireError(
            field,
            f"gives the sampled token at position {t} the log-prob {candidates.sampled_logprobs[t]};"
            f" the engine reports {logprobs[t]} ({len(wrong)} of {len(logprobs)} positions differ)",
        )


def check_kept_mass(candidates: CandidateSets, p: float, *, field: str) -> None:
    """Raise WireError where a set keeps less than the `p` that was asked for, a set of another threshold, or
    more than 1.

    A thirtieth either way is let pass: where the engine computes log-probs in bfloat16, each is off by up to
    1/32 (between -16 and -8), and a flat row's mass with them. (The cut itself was made by the very numbers
    in the sets.)

    Args:
        candidates: T positions.
        p: the threshold that the request asked for, in (0, 1].
        field: the name that the message gives the sets.
    """
    kept = np.exp(candidates.logprob_sum)
    if len(wrong := np.flatnonzero(kept > 1 + _MASS_OFF_BY)):
        t = int(wrong[0])
        raise WireError(field, f"the set at position {t} has a mass of {kept[t]:.4f}, more than there is")
    if len(wrong := np.flatnonzero(kept < p - _MASS_OFF_BY)):
        t = int(wrong[0])
        raise WireError(
            field,
            f"the set at position {t} keeps a mass of {kept[t]:.4f}, and top_logprobs_p {p:g} was asked for;"
            f" something between here and the engine changed it ({len(wrong)} of {len(kept)} positions)",
        )


def error_to_record(error: SglangToppError) -> dict[str, Any]:
    """`{"error": {...}}` for one of this distribution's exceptions."""
    body: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, WireError):
        body |= {"message": error.problem, "field": error.field}
    if isinstance(error, ResponseError) and error.status is not None:
        body["status"] = error.status
    return {"error": body}


def error_from_record(body: Any) -> SglangToppError:
    """The exception whose inner object `error_to_record` wrote; a ServerError where it names none of ours."""
    if not isinstance(body, Mapping):
        words = shown(body, MAX_BODY_CHARS)
        return ServerError(f"the server reports an error: {words}", status=None, body=words)
    message = shown(body.get("message", body), MAX_MESSAGE_CHARS)
    name, status = body.get("type"), body.get("status")
    kind = getattr(errors, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, SglangToppError)):
        kind = ServerError
    if issubclass(kind, WireError | errors.InvalidCandidateSetsError):
        return kind(shown(body.get("field", "response")), message)
    if issubclass(kind, ResponseError):
        is_status = type(status) is int and 100 <= status < 600
        return kind(message, status=status if is_status else None, body=shown(dict(body), MAX_BODY_CHARS))
    return kind(message)


def _differing(
    in_sets: NDArray[np.float32], logprobs: NDArray[np.float32], off_by: float
) -> NDArray[np.int64]:
    wrong = np.flatnonzero(in_sets != logprobs)
    if off_by and len(wrong):
        near, exact = in_sets[wrong].astype(np.float64), logprobs[wrong].astype(np.float64)
        no_mass = np.finfo(np.float32).min
        has_mass = (near > no_mass) | (exact > no_mass)
        wrong, near, exact = wrong[has_mass], near[has_mass], exact[has_mass]
        wrong = wrong[~(np.abs(near - exact) <= off_by)]
    return wrong


def _field(record: Mapping[str, Any], name: str, kind: type[_T] | tuple[type[_T], ...]) -> _T:
    if name not in record:
        raise WireError(name, "missing")
    value = record[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise WireError(name, f"got {type(value).__name__}, expected {expected}")
    return value


def count_of(record: Mapping[str, Any], name: str) -> int:
    """A field of a record that counts something; a WireError where it does not."""
    value = _field(record, name, int)
    if not 0 <= value <= _MAX_COUNT:
        raise WireError(name, f"got {shown(value)}, expected 0 or more, of 64 bits")
    return value


def _source(record: Mapping[str, Any], *, has_sets: bool) -> str | None:
    if not has_sets:
        return None
    # Records of 0.1.0 have no such field: there was one rule.
    source = record.get("top_logprobs_source", DISTRIBUTION)
    if source not in (None, DISTRIBUTION, SAMPLER):
        raise WireError(
            "top_logprobs_source", f"got {shown(source)}, expected {DISTRIBUTION!r}, {SAMPLER!r} or null"
        )
    return None if source is None else str(source)


def text_of(record: Mapping[str, Any], name: str) -> str:
    """A field of a record that is text; a WireError where it is none."""
    value = _field(record, name, str)
    if not is_text(value):
        raise WireError(name, "got text with a lone surrogate, which is no Unicode text")
    return value


def ids_of(record: Mapping[str, Any], name: str) -> NDArray[np.int32]:
    """int32 [T]: a field of a record that lists token ids; a WireError where it does not."""
    values = _field(record, name, list)
    if not set(map(type, values)) <= {int}:
        raise WireError(name, "expected a list of integers")
    try:
        ids = np.array(values, np.int32)
    except OverflowError:
        raise WireError(name, "got an id outside int32") from None
    check_ids(name, ids)
    return ids


def float32_of(record: Mapping[str, Any], name: str) -> NDArray[np.float32]:
    """float32 [T]: a field of a record that holds numbers in base64; a WireError where it does not."""
    text = _field(record, name, str)
    try:
        raw = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(name, f"not base64: {error}") from None
    if len(raw) % _FLOAT32.itemsize:
        raise WireError(name, f"got {len(raw)} bytes, expected a multiple of {_FLOAT32.itemsize}")
    return np.frombuffer(raw, _FLOAT32).astype(np.float32, copy=False)
