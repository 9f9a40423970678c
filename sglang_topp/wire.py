"""How candidate sets travel: the `meta_info` of a `/generate` response, and the packed binary form.

The formats of answers have a file each in `answers`; what the patch set writes is encoded there as well.

Packed binary form (`pack`, `unpack`), one value in one buffer; numbers are little-endian::

    offset  bytes   content
    0       4       b"TPCS"
    4       4       uint32 version: 1 with log-probs, 2 without
    8       8       uint64 T, the number of positions
    16      8       uint64 n, the number of candidates
    24      4 T     int32 set sizes
    …       4 T     int32 sampled token ids, -1 for none
    …       4 n     int32 token ids
    …       4 n     float32 log-probs; not in version 2
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pybase64
from numpy.typing import ArrayLike, NDArray

from sglang_topp.answers import top_p
from sglang_topp.answers.fields import FLOAT32, INT32, b64bytes, naming
from sglang_topp.answers.top_k import encode_top_k, merge_top_k
from sglang_topp.answers.top_p import NO_DISTRIBUTION, encode_sets, has_output_sets
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import WireError

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

Side: TypeAlias = top_p.Side

_MAGIC = b"TPCS"
_WITH_LOGPROBS, _WITHOUT_LOGPROBS = 1, 2
_HEADER = struct.Struct("<4sIQQ")


# -- meta_info -------------------------------------------------------------------------------------


def merge_output_fields(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The output fields of consecutive stream chunks as those of one chunk.

    Args:
        parts: the chunks' `meta_info`, each holding only the positions since the one before.

    Returns:
        The fields of `encode_sets`, of the list form and of `encode_top_k` that the parts hold,
        joined in order; a key that only some parts hold is left out, so that what lacks a position
        stays recognisably incomplete.
    """
    sets = "output_top_p_logprobs"
    shared = {key for key in parts[0] if all(key in part for part in parts)}
    merged: dict[str, Any] = {}
    for key in shared.intersection((sets, f"{sets}_lengths")):
        merged[key] = list(chain.from_iterable(part[key] for part in parts))
    for key in shared.intersection((f"{sets}_val_base64", f"{sets}_idx_base64")):
        raw = b"".join(b64bytes(key, part[key]) for part in parts)
        merged[key] = pybase64.b64encode(raw).decode("ascii")
    if "output_top_logprobs_none_positions" in shared:
        merged |= merge_top_k(parts)
    return merged


def decode_output_sets(
    meta_info: Mapping[str, Any], output_ids: ArrayLike, *, vocab_size: int | None = None
) -> CandidateSets:
    """The candidate sets of the generated tokens; see `CandidateSets.from_meta_info`."""
    return CandidateSets.from_meta_info(meta_info, output_ids, vocab_size=vocab_size)


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
    return CandidateSets._from_answer(top_p.decode("input", meta_info, prompt_ids, vocab_size))


# -- packed ----------------------------------------------------------------------------------------


def pack(sets: CandidateSets) -> bytes:
    """One value in one buffer of `24 + 8 T + 8 n` bytes, `24 + 8 T + 4 n` without log-probs; the layout
    stands at the head of this file."""
    return b"".join(pack_parts(sets))


def pack_parts(sets: CandidateSets) -> list[bytes | memoryview]:
    """The buffers that `pack` joins; the large ones are views of the value's own arrays."""
    parts: list[NDArray[Any]] = [
        sets.sizes.astype(INT32),
        sets.sampled_ids.astype(INT32, copy=False),
        sets.token_ids.astype(INT32, copy=False),
    ]
    if sets.has_logprobs:
        parts.append(sets.logprobs.astype(FLOAT32, copy=False))
    version = _WITH_LOGPROBS if sets.has_logprobs else _WITHOUT_LOGPROBS
    header = _HEADER.pack(_MAGIC, version, len(sets), len(sets.token_ids))
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
    if magic != _MAGIC or version not in (_WITH_LOGPROBS, _WITHOUT_LOGPROBS):
        raise WireError(
            field,
            f"got {magic!r} version {version}, expected {_MAGIC!r} version {_WITH_LOGPROBS}, or"
            f" {_WITHOUT_LOGPROBS}",
        )
    expected = _HEADER.size + 8 * positions + (8 if version == _WITH_LOGPROBS else 4) * candidates
    if size != expected:
        raise WireError(
            field, f"got {size} bytes, expected {expected} for {positions} positions, {candidates} candidates"
        )
    if version == _WITHOUT_LOGPROBS and not candidates:
        # One value, one buffer: where nothing is unknown, version 1 is what `pack` writes.
        raise WireError(field, f"got version {version} without a candidate, expected {_WITH_LOGPROBS}")

    def part(dtype: np.dtype[Any], count: int, start: int) -> NDArray[Any]:
        return np.frombuffer(buffer, dtype, count, _HEADER.size + start)

    sizes = part(INT32, positions, 0)
    offsets = np.zeros(positions + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    names = ("token_ids", "logprobs", "offsets", "sampled_ids")
    with naming({name: f"{field}.{name}" for name in names}):
        return CandidateSets(
            part(INT32, candidates, 8 * positions),
            part(FLOAT32, candidates, 8 * positions + 4 * candidates) if version == _WITH_LOGPROBS else None,
            offsets,
            part(INT32, positions, 4 * positions),
        )


def pack_base64(sets: CandidateSets) -> str:
    """`pack`, as base64 text for JSON."""
    return pybase64.b64encode(pack(sets)).decode("ascii")


def unpack_base64(text: str, *, field: str = "candidates") -> CandidateSets:
    """The value that `pack_base64` wrote.

    Raises:
        WireError: as for `unpack`, or `text` is no base64.
    """
    return unpack(b64bytes(field, text), field=field)
