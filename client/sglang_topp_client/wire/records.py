"""Encode rollouts and scores as JSON records or as binary frames, and decode them.

A record is a JSON object with the fields that `rollout.py` declares, and with the number of ids of each list
of token ids (`prompt_tokens`, `completion_tokens`, or `num_tokens`). Each field has the same name and value
in JSON, except for the types in `_JSON`: token ids are lists, log-probs are base64 of little-endian float32,
candidate sets are base64 of `sglang_topp.formats.pack`, `weight_spans` are SGLang's `weight_versions`, and
seconds are in `timing`.

A frame (`frame.py`) holds the record's JSON without arrays and sets, then the token ids, the log-probs, the
candidate sets, and the fields of tokens, in this order.
"""

from __future__ import annotations

import binascii
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import pybase64

from sglang_topp import CandidateSets, formats
from sglang_topp.candidates.csr_operations import offsets_of
from sglang_topp.errors import WireError
from sglang_topp.formats.field_parsing import FLOAT32, INT32, renaming_errors, token_ids_of
from sglang_topp_client.rollout import (
    FIELDS,
    Count,
    Field,
    Logprobs,
    Rollout,
    Score,
    Seconds,
    TokenField,
    TokenFieldLayout,
    TokenFieldRecord,
    TokenFields,
    TokenIds,
    TokenRanges,
    WeightSpan,
    WeightSpans,
    check_result,
    layout_of,
    read_array,
    read_spans,
    scored_ids,
    write_spans,
)
from sglang_topp_client.value_checks import convert, decode_json
from sglang_topp_client.wire.frame import FrameReader, encode_frame

MEDIA_TYPES: dict[type[Rollout | Score], str] = {
    Rollout: "application/vnd.sglang-topp.rollouts.v1",
    Score: "application/vnd.sglang-topp.scores.v1",
}
"""The media types of answers whose messages begin with their length (`transport/http.py`).

Each message holds a result as a frame, or a JSON object.
"""

_Result = TypeVar("_Result", Rollout, Score)
_NUM_CANDIDATES, _TOKEN_FIELDS = "num_candidates", "token_fields"
_NO_LOGPROBS = np.empty(0, np.float32)


@dataclass(frozen=True)
class Timing:
    """Durations in seconds."""

    latency_s: Seconds


def _read_logprobs(field: str, text: str) -> Logprobs:
    try:
        raw = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(field, f"not base64: {error}") from None
    if len(raw) % FLOAT32.itemsize:
        raise WireError(field, f"got {len(raw)} bytes, expected a multiple of {FLOAT32.itemsize}")
    return np.frombuffer(raw, FLOAT32).astype(np.float32, copy=False)


def _write_fields(fields: TokenFields) -> dict[str, Any]:
    return {
        name: {"data": pybase64.b64encode(one.to_bytes()).decode("ascii"), **layout_of(one)}
        for name, one in fields.items()
    }


def _read_fields(field: str, records: Mapping[str, TokenFieldRecord]) -> TokenFields:
    try:
        return {
            name: TokenField(
                read_array(pybase64.b64decode(one.data, validate=True), one.shape, one.dtype), one.start
            )
            for name, one in records.items()
        }
    except (binascii.Error, ValueError) as error:
        raise WireError(field, str(error)) from None


class JsonField(NamedTuple):
    """How a type of field is written in JSON.

    Attributes:
        json: the type of the JSON value.
        write: the conversion to JSON.
        read: the conversion from JSON. Its arguments are the field's name in errors, and the JSON value.
        name: the field's name in JSON, or "" if it is the attribute's name.
        form: what the field's description says of the JSON value.
    """

    json: Any
    write: Callable[[Any], Any] = lambda value: value
    read: Callable[[str, Any], Any] = lambda _, value: value
    name: str = ""
    form: str = ""


_JSON: dict[Any, JsonField] = {
    TokenIds: JsonField(list[int], np.ndarray.tolist, token_ids_of),
    Logprobs: JsonField(
        str,
        lambda logprobs: pybase64.b64encode(logprobs.astype(FLOAT32).tobytes()).decode("ascii"),
        _read_logprobs,
        form="base64 of little-endian float32",
    ),
    CandidateSets: JsonField(
        str,
        formats.pack_base64,
        lambda _, text: formats.unpack_base64(text),
        form="base64 of `sglang_topp.formats.pack`",
    ),
    Seconds: JsonField(
        Timing,
        lambda seconds: {"latency_s": seconds},
        lambda _, timing: timing.latency_s,
        "timing",
        form='an object `{"latency_s": ...}`',
    ),
    WeightSpans: JsonField(
        list[WeightSpan],
        write_spans,
        read_spans,
        "weight_versions",
        form='objects `{"version", "start", "end"}`',
    ),
    TokenRanges: JsonField(
        list[tuple[Count, Count]],
        lambda ranges: [list(one) for one in ranges],
        lambda _, ranges: tuple(ranges),
    ),
    TokenFields: JsonField(
        dict[str, TokenFieldRecord],
        _write_fields,
        _read_fields,
        form="`data` is base64 of little-endian integers",
    ),
}
_ARRAYS = (TokenIds, Logprobs, CandidateSets, TokenFields)


def _json_fields(result: type[Rollout | Score]) -> tuple[tuple[Field, JsonField], ...]:
    pairs = []
    for field in FIELDS[result]:
        found = _JSON.get(field.type, JsonField(field.type))
        pairs.append((field, found._replace(name=found.name or field.name)))
    return tuple(pairs)


JSON_FIELDS = {one: _json_fields(one) for one in FIELDS}
"""Each field of a result's class, with how it is written in JSON under its `name`."""


def _record_type(result: type[Rollout | Score], *, framed: bool) -> type[msgspec.Struct]:
    """Return a type that msgspec decodes a record into. A frame's JSON has no arrays."""
    declared: list[Any] = [(_NUM_CANDIDATES, Count | None)] if framed else []
    for field, in_json in JSON_FIELDS[result]:
        if field.count_name:
            declared.append((field.count_name, Count))
        if framed and field.type == TokenFields:
            declared.append((in_json.name, dict[str, TokenFieldLayout], {}))
        if framed and field.type in _ARRAYS:
            continue
        kind = in_json.json | None if field.is_optional else in_json.json
        default = field.default if field.default in (MISSING, None) else in_json.write(field.default)
        declared.append((in_json.name, kind, *(() if default is MISSING else (default,))))
    return msgspec.defstruct(f"{result.__name__}Record", declared, kw_only=True)


_RECORDS = {one: _record_type(one, framed=False) for one in FIELDS}
_FRAMED = {one: _record_type(one, framed=True) for one in FIELDS}


def to_record(result: Rollout | Score, *, framed: bool = False) -> dict[str, Any]:
    """Return a result as a JSON object, ready for `json.dumps`. With `framed`, the arrays are left out."""
    record: dict[str, Any] = {}
    for field, in_json in JSON_FIELDS[type(result)]:
        value = getattr(result, field.name)
        if field.count_name:
            record[field.count_name] = len(value)
        if framed and field.type == TokenFields:
            record[in_json.name] = {name: layout_of(one) for name, one in value.items()}
        if not framed or field.type not in _ARRAYS:
            record[in_json.name] = None if value is None else in_json.write(value)
    return record


def from_record(
    result: type[_Result], record: Any, *, p: float | None = None, may_be_extended: bool = False
) -> _Result:
    """Decode a record that `to_record` encoded. Unknown fields of the record are ignored.

    Args:
        result: the class of the result.
        record: the JSON object.
        p: the requested threshold of the sets, which `check_result` checks.
        may_be_extended: whether to accept tokens that `Rollout.extend` appended. Appended tokens have empty
            candidate sets.

    Raises:
        WireError: a field is missing, has the wrong type, or contradicts another field; the error names the
            field.
    """
    row = convert(record, _RECORDS[result], field="record")
    values = _values(result, row, framed=False)
    for field in FIELDS[result]:
        if field.count_name and (count := getattr(row, field.count_name)) != len(values[field.name]):
            raise WireError(field.count_name, f"got {count}, but there are {len(values[field.name])} ids")
    decoded = result(**values)
    check_result(decoded, p=p, may_be_extended=may_be_extended)
    return decoded


def to_frame(result: Rollout | Score) -> bytes:
    """Encode a result as a frame."""
    record, sets = to_record(result, framed=True), result.candidates
    arrays = [getattr(result, field.name) for field in FIELDS[type(result)] if field.count_name]
    arrays.append(result.logprobs)
    if sets is not None:
        arrays += [sets.sizes.astype(np.int32), sets.token_ids, sets.logprobs]
    if isinstance(result, Rollout):
        arrays += [one.values.reshape(-1) for one in result.token_fields.values()]
    return encode_frame(record | {_NUM_CANDIDATES: None if sets is None else len(sets.token_ids)}, arrays)


def from_frame(result: type[_Result], raw: bytes, *, max_bytes: int, p: float | None = None) -> _Result:
    """Decode a frame that `to_frame` encoded. Unknown fields in the frame's JSON are ignored.

    Args:
        result: the class of the result.
        raw: one frame.
        max_bytes: the maximum length of the decompressed content.
        p: the requested threshold of the sets, which `check_result` checks.

    Raises:
        WireError: the frame was cut or altered, is too long, or does not hold a valid result; the error names
            the field.
    """
    frame = FrameReader(raw, max_bytes=max_bytes)
    row = decode_json(frame.text, _FRAMED[result], field="frame")
    values = _values(result, row, framed=True)
    for field in FIELDS[result]:
        if field.count_name:
            count = getattr(row, field.count_name)
            ids = frame.read(INT32, count, f"{count} {field.name}")
            values[field.name] = token_ids_of(field.name, ids)
    bare = result(**values, logprobs=_NO_LOGPROBS, candidates=None)
    scored = scored_ids(bare)
    logprobs = frame.read(FLOAT32, len(scored), f"{len(scored)} logprobs")
    sets = None
    if (num_candidates := getattr(row, _NUM_CANDIDATES)) is not None:
        sizes = frame.read(INT32, len(scored), "set sizes")
        token_ids = frame.read(INT32, num_candidates, "candidate ids")
        candidate_logprobs = frame.read(FLOAT32, num_candidates, "candidate log-probs")
        names = ("token_ids", "logprobs", "offsets", "sampled_ids")
        with renaming_errors({name: f"candidates.{name}" for name in names}):
            sets = CandidateSets(token_ids, candidate_logprobs, offsets_of(sizes), scored)
    fields = {}
    for name, one in getattr(row, _TOKEN_FIELDS, {}).items():
        flat = frame.read(np.dtype(one.dtype).newbyteorder("<"), prod(one.shape), name)
        fields[name] = TokenField(flat.reshape(one.shape), one.start)
    frame.end()
    more: Any = {_TOKEN_FIELDS: fields} if fields else {}  # a score has none
    decoded = replace(bare, logprobs=logprobs, candidates=sets, **more)
    check_result(decoded, p=p)
    return decoded


def _values(result: type[Rollout | Score], row: msgspec.Struct, *, framed: bool) -> dict[str, Any]:
    values = {}
    for field, in_json in JSON_FIELDS[result]:
        if not framed or field.type not in _ARRAYS:
            value = getattr(row, in_json.name)
            values[field.name] = None if value is None else in_json.read(in_json.name, value)
    return values
