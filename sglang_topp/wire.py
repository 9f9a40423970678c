"""How candidate sets travel: the `meta_info` of a `/generate` response, and the packed binary form.

The only file that knows an encoding. On the wire a number is little-endian: float32 for log-probs,
int32 for token ids, and base64 is the standard alphabet with padding.

`meta_info`, base64 form::

    {output,input}_top_p_logprobs_val_base64   every candidate's log-prob, position after position
    {output,input}_top_p_logprobs_idx_base64   their token ids
    {output,input}_top_p_logprobs_lengths      one set size per position, -1 where there is no distribution

`meta_info`, list form::

    {output,input}_top_p_logprobs[t] = [[logprob, token_id, text or null], ...], or null

Packed binary form (`pack`, `unpack`), one value in one buffer::

    offset  bytes   content
    0       4       b"TPCS"
    4       4       uint32 version, 1
    8       8       uint64 T, the number of positions
    16      8       uint64 n, the number of candidates
    24      4 T     int32 set sizes
    …       4 T     int32 sampled token ids, -1 for none
    …       4 n     int32 token ids
    …       4 n     float32 log-probs
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, compress
from typing import Any, Literal, TypeAlias

import numpy as np
import pybase64
from numpy.typing import ArrayLike, NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import (
    InvalidCandidateSetsError,
    MissingCandidateSetsError,
    SampledTokenMissingError,
    WireError,
)

__all__ = [
    "NO_DISTRIBUTION",
    "decode_input_sets",
    "decode_output_sets",
    "encode_sets",
    "encode_top_k",
    "has_output_sets",
    "merge_output_fields",
    "pack",
    "pack_base64",
    "pack_parts",
    "unpack",
    "unpack_base64",
]

Side: TypeAlias = Literal["output", "input"]

NO_DISTRIBUTION = -1
"""The set size that stands for "SGLang has no distribution at this position"."""

_FLOAT32 = np.dtype("<f4")
_INT32 = np.dtype("<i4")
_MAGIC = b"TPCS"
_VERSION = 1
_HEADER = struct.Struct("<4sIQQ")


# -- meta_info -------------------------------------------------------------------------------------


def has_output_sets(meta_info: Mapping[str, Any]) -> bool:
    """Whether the response carries candidate sets of generated tokens, in either form."""
    return any(key.startswith("output_top_p_logprobs") for key in meta_info)


def encode_sets(
    side: Side, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32], lengths: Sequence[int]
) -> dict[str, Any]:
    """The base64 form's three `meta_info` fields.

    Args:
        side: `"output"` for generated positions, `"input"` for prompt positions.
        token_ids: int32 [n], position after position.
        logprobs: float32 [n].
        lengths: one set size per position, `NO_DISTRIBUTION` where there is none.
    """
    name = f"{side}_top_p_logprobs"
    return {
        f"{name}_val_base64": _b64encode(logprobs, _FLOAT32),
        f"{name}_idx_base64": _b64encode(token_ids, _INT32),
        f"{name}_lengths": list(lengths),
    }


def encode_top_k(
    side: Side, logprobs: Sequence[Sequence[float] | None], token_ids: Sequence[Sequence[int] | None]
) -> dict[str, Any]:
    """SGLang's fixed-k log-probs (`top_logprobs_num`) in base64, as `meta_info` fields.

    `{side}_top_logprobs_shape` is `[T, k]` and both arrays hold exactly `T * k` numbers; the rows
    listed in `{side}_top_logprobs_none_positions` have no distribution and are filled with NaN and -1.

    Args:
        logprobs: T rows of k log-probs; None, or an empty row where k is not 0, has no distribution.
        token_ids: T rows of k token ids.
    """
    name = f"{side}_top_logprobs"
    width = max((len(row) for row in logprobs if row is not None), default=0)
    values = np.full((len(logprobs), width), np.nan, _FLOAT32)
    ids = np.full((len(logprobs), width), -1, _INT32)
    none_positions = []
    for t, (value_row, id_row) in enumerate(zip(logprobs, token_ids, strict=True)):
        if not value_row or not id_row:
            none_positions.append(t)
            continue
        values[t], ids[t] = value_row, id_row
    return {
        f"{name}_val_base64": _b64encode(values, _FLOAT32),
        f"{name}_idx_base64": _b64encode(ids, _INT32),
        f"{name}_shape": list(values.shape),
        f"{name}_none_positions": none_positions,
    }


def merge_output_fields(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The output fields of consecutive stream chunks as those of one chunk.

    Args:
        parts: the chunks' `meta_info`, each holding only the positions since the one before.

    Returns:
        The fields of `encode_sets`, of the list form and of `encode_top_k` that the parts hold,
        joined in order; a key that only some parts hold is left out, so that what lacks a position
        stays recognisably incomplete.
    """
    sets, top_k = "output_top_p_logprobs", "output_top_logprobs"
    shared = {key for key in parts[0] if all(key in part for part in parts)}
    merged: dict[str, Any] = {}
    for key in shared.intersection((sets, f"{sets}_lengths")):
        merged[key] = list(chain.from_iterable(part[key] for part in parts))
    for key in shared.intersection((f"{sets}_val_base64", f"{sets}_idx_base64")):
        raw = b"".join(_b64bytes(key, part[key]) for part in parts)
        merged[key] = pybase64.b64encode(raw).decode("ascii")
    if f"{top_k}_shape" in shared:
        lengths = [part[f"{top_k}_shape"][0] for part in parts]
        width = max(part[f"{top_k}_shape"][1] for part in parts)
        for key, dtype, fill in (
            (f"{top_k}_val_base64", _FLOAT32, np.nan),
            (f"{top_k}_idx_base64", _INT32, -1),
        ):
            rows = np.full((sum(lengths), width), fill, dtype)
            # A chunk of width 0 has no distribution at any position: its rows stay filled.
            for start, part in zip(accumulate(lengths, initial=0), parts, strict=False):
                if part[f"{top_k}_shape"][1]:
                    chunk = _b64decode(key, part[key], dtype).reshape(part[f"{top_k}_shape"])
                    rows[start : start + len(chunk)] = chunk
            merged[key] = _b64encode(rows, dtype)
        starts = accumulate(lengths, initial=0)
        merged[f"{top_k}_shape"] = [sum(lengths), width]
        merged[f"{top_k}_none_positions"] = [
            start + t
            for start, part in zip(starts, parts, strict=False)
            for t in part[f"{top_k}_none_positions"]
        ]
    return merged


def decode_output_sets(
    meta_info: Mapping[str, Any], output_ids: ArrayLike, *, vocab_size: int | None = None
) -> CandidateSets:
    """The candidate sets of the generated tokens; see `CandidateSets.from_meta_info`."""
    sets, lengths = _decode("output", meta_info, output_ids, vocab_size)
    missing = np.flatnonzero(lengths <= 0)
    if len(missing):
        raise MissingCandidateSetsError(
            "output_top_p_logprobs_lengths",
            f"no candidate set at {len(missing)} of {len(lengths)} positions, the first at {missing[0]};"
            " every generated token needs one",
        )
    return sets


def decode_input_sets(
    meta_info: Mapping[str, Any], prompt_ids: ArrayLike, *, vocab_size: int | None = None
) -> CandidateSets:
    """The candidate sets of the prompt tokens from `logprob_start_len` on.

    Args:
        meta_info: the response's `meta_info`.
        prompt_ids: integers [T], the prompt tokens from `logprob_start_len` on; each stands in for
            the sampled token of its position. Those that were sent: in `input_token_logprobs` SGLang
            0.5.23 reports the vocabulary's last id as 0.
        vocab_size: when given, ids at or above it are errors.

    Returns:
        T positions; the span is empty where SGLang has no distribution (the prompt's first token).
    """
    return _decode("input", meta_info, prompt_ids, vocab_size)[0]


def _decode(
    side: Side, meta_info: Mapping[str, Any], sampled_ids: ArrayLike, vocab_size: int | None
) -> tuple[CandidateSets, NDArray[np.int32]]:
    name = f"{side}_top_p_logprobs"
    fields = {
        "logprobs": f"{name}_val_base64",
        "token_ids": f"{name}_idx_base64",
        "offsets": f"{name}_lengths",
        "sampled_ids": f"{side}_ids",
    }
    sampled = _sampled(fields["sampled_ids"], sampled_ids)
    if name in meta_info:
        fields |= dict.fromkeys(("logprobs", "token_ids", "offsets"), name)
        token_ids, logprobs, lengths = _from_lists(name, meta_info[name])
    else:
        present = [
            key for key in (fields["logprobs"], fields["token_ids"], fields["offsets"]) if key in meta_info
        ]
        if not present:
            raise MissingCandidateSetsError(
                name,
                "the response holds no candidate sets; is top_logprobs_p in the request, and does the server"
                " run the sglang-topp patch set (`sglang-topp doctor`)?",
            )
        if len(present) < 3:
            absent = next(key for key in fields.values() if key not in present)
            raise WireError(absent, f"missing beside {', '.join(present)}")
        logprobs = _b64decode(fields["logprobs"], meta_info[fields["logprobs"]], _FLOAT32)
        token_ids = _b64decode(fields["token_ids"], meta_info[fields["token_ids"]], _INT32)
        lengths = _integers(fields["offsets"], meta_info[fields["offsets"]])
        _check_range(fields["offsets"], lengths, NO_DISTRIBUTION, "set sizes, or -1 for none")

    if len(lengths) != len(sampled):
        raise WireError(fields["offsets"], f"got {len(lengths)} positions for {len(sampled)} tokens")
    if len(logprobs) != len(token_ids):
        raise WireError(fields["logprobs"], f"got {len(logprobs)} log-probs for {len(token_ids)} token ids")
    sizes = np.maximum(lengths, 0)
    if (total := int(sizes.sum())) != len(token_ids):
        raise WireError(fields["offsets"], f"add up to {total}, but there are {len(token_ids)} token ids")
    if vocab_size is not None and len(token_ids) and (highest := int(token_ids.max())) >= vocab_size:
        raise WireError(fields["token_ids"], f"got id {highest}, expected less than vocab_size {vocab_size}")
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    try:
        return CandidateSets(token_ids, logprobs, offsets, sampled), lengths
    except InvalidCandidateSetsError as error:
        if error.field == "sampled_ids":
            raise SampledTokenMissingError(fields["token_ids"], error.problem) from None
        raise WireError(fields[error.field], error.problem) from None


def _from_lists(name: str, rows: Any) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.int32]]:
    if not isinstance(rows, list) or not all(row is None or isinstance(row, list) for row in rows):
        raise WireError(
            name, "expected a list with one list of [logprob, token_id, text] (or null) per position"
        )
    lengths = np.fromiter((NO_DISTRIBUTION if row is None else len(row) for row in rows), np.int32, len(rows))
    entries = list(chain.from_iterable(row for row in rows if row is not None))
    if not all(isinstance(entry, list | tuple) and len(entry) in (2, 3) for entry in entries):
        raise WireError(name, "expected every candidate as [logprob, token_id, text or null]")
    for column, what, kinds in ((0, "log-prob", (int, float)), (1, "token id", int)):
        for entry in entries:
            if not isinstance(entry[column], kinds) or isinstance(entry[column], bool):
                raise WireError(name, f"got {_shown(entry[column])} as a {what}")
    try:
        token_ids = np.fromiter((entry[1] for entry in entries), np.int32, len(entries))
        logprobs = np.fromiter((entry[0] for entry in entries), np.float64, len(entries))
    except OverflowError as error:
        raise WireError(name, f"got a number that is too large: {error}") from None
    return token_ids, logprobs, lengths


def _sampled(field: str, sampled_ids: ArrayLike) -> NDArray[np.integer[Any]]:
    if isinstance(sampled_ids, list | tuple):
        sampled: NDArray[np.integer[Any]] = _integers(field, list(sampled_ids))
    else:
        sampled = np.asarray(sampled_ids)
        if sampled.ndim != 1 or (len(sampled) and sampled.dtype.kind not in "iu"):
            raise WireError(field, f"got {sampled.ndim}-D {sampled.dtype}, expected 1-D integers")
    _check_range(field, sampled, 0, "token ids from 0 on")
    return sampled


def _check_range(field: str, integers: NDArray[np.integer[Any]], lowest: int, expected: str) -> None:
    """Everything on this wire is an int32."""
    if len(integers):
        for value in (int(integers.min()), int(integers.max())):
            if not lowest <= value <= np.iinfo(np.int32).max:
                raise WireError(field, f"got {value}, expected {expected}")


def _integers(field: str, values: Any) -> NDArray[np.int32]:
    """A JSON list of integers; `struct` takes nothing else but booleans, in half the time of NumPy."""
    if not isinstance(values, list):
        raise WireError(field, f"got {type(values).__name__}, expected a list of integers")
    try:
        integers = np.frombuffer(struct.pack(f"<{len(values)}i", *values), _INT32)
    except struct.error:
        wrong = next(v for v in values if not isinstance(v, int) or not -(1 << 31) <= v < 1 << 31)
        raise WireError(field, f"got {_shown(wrong)}, expected a list of integers of 32 bits") from None
    # Only what reads as 0 or 1 can have been a boolean.
    if bool in set(map(type, compress(values, ((integers | 1) == 1).tobytes()))):
        raise WireError(field, "got a boolean, expected a list of integers")
    return integers


def _shown(value: Any) -> str:
    """A value in an error: a number of thousands of digits has no repr, nor has deep nesting."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return type(value).__name__ if isinstance(value, list | dict) else repr(value)[:80]


# -- packed ----------------------------------------------------------------------------------------


def pack(sets: CandidateSets) -> bytes:
    """One value in one buffer of `24 + 8 T + 8 n` bytes; the layout stands at the head of this file."""
    return b"".join(pack_parts(sets))


def pack_parts(sets: CandidateSets) -> list[bytes | memoryview]:
    """The buffers that `pack` joins; the large ones are views of the value's own arrays."""
    parts = (
        sets.sizes.astype(_INT32),
        sets.sampled_ids.astype(_INT32, copy=False),
        sets.token_ids.astype(_INT32, copy=False),
        sets.logprobs.astype(_FLOAT32, copy=False),
    )
    header = _HEADER.pack(_MAGIC, _VERSION, len(sets), len(sets.token_ids))
    return [header, *(np.ascontiguousarray(part).view(np.uint8).data for part in parts)]


def unpack(buffer: bytes | bytearray | memoryview, *, field: str = "candidates") -> CandidateSets:
    """The value that `pack` wrote; its arrays are views of `buffer` where the platform allows.

    Args:
        buffer: exactly what `pack` returned.
        field: the name that error messages give the payload.

    Raises:
        WireError: not a packed value, another version, the wrong number of bytes, or invalid sets.
    """
    size = memoryview(buffer).nbytes
    if size < _HEADER.size:
        raise WireError(field, f"got {size} bytes, expected at least the {_HEADER.size} of the header")
    magic, version, positions, candidates = _HEADER.unpack_from(buffer)
    if magic != _MAGIC or version != _VERSION:
        raise WireError(field, f"got {magic!r} version {version}, expected {_MAGIC!r} version {_VERSION}")
    expected = _HEADER.size + 8 * positions + 8 * candidates
    if size != expected:
        raise WireError(
            field, f"got {size} bytes, expected {expected} for {positions} positions, {candidates} candidates"
        )

    def part(dtype: np.dtype[Any], count: int, start: int) -> NDArray[Any]:
        return np.frombuffer(buffer, dtype, count, _HEADER.size + start)

    sizes = part(_INT32, positions, 0)
    offsets = np.zeros(positions + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    try:
        return CandidateSets(
            part(_INT32, candidates, 8 * positions),
            part(_FLOAT32, candidates, 8 * positions + 4 * candidates),
            offsets,
            part(_INT32, positions, 4 * positions),
        )
    except InvalidCandidateSetsError as error:
        kind = SampledTokenMissingError if error.field == "sampled_ids" else WireError
        raise kind(f"{field}.{error.field}", error.problem) from None


def pack_base64(sets: CandidateSets) -> str:
    """`pack`, as base64 text for JSON."""
    return pybase64.b64encode(pack(sets)).decode("ascii")


def unpack_base64(text: str, *, field: str = "candidates") -> CandidateSets:
    """The value that `pack_base64` wrote.

    Raises:
        WireError: as for `unpack`, or `text` is no base64.
    """
    return unpack(_b64bytes(field, text), field=field)


def _b64encode(array: NDArray[Any], dtype: np.dtype[Any]) -> str:
    return pybase64.b64encode(np.ascontiguousarray(array, dtype).tobytes()).decode("ascii")


def _b64bytes(field: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise WireError(field, f"got {type(text).__name__}, expected base64 text")
    try:
        return pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(field, f"not base64: {error}") from None


def _b64decode(field: str, text: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    raw = _b64bytes(field, text)
    if len(raw) % dtype.itemsize:
        raise WireError(
            field, f"got {len(raw)} bytes, expected a multiple of {dtype.itemsize} ({dtype.name})"
        )
    return np.frombuffer(raw, dtype)
