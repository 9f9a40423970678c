"""Pack candidate sets into one binary buffer, and unpack them.

::

    offset  bytes   content
    0       4       b"TPCS"
    4       4       uint32 version: 1 with log-probs, 2 without
    8       8       uint64 T, the number of positions
    16      8       uint64 n, the number of candidates
    24      4 T     int32 set sizes
    …       4 T     int32 sampled token ids, -1 for none
    …       4 n     int32 token ids
    …       4 n     float32 log-probs; not in version 2

All numbers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pybase64
from numpy.typing import NDArray

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import offsets_of
from sglang_topp.errors import WireError
from sglang_topp.formats.field_parsing import FLOAT32, INT32, b64array, renaming_errors

_MAGIC = b"TPCS"
_WITH_LOGPROBS, _WITHOUT_LOGPROBS = 1, 2
_HEADER = struct.Struct("<4sIQQ")


def pack(sets: CandidateSets) -> bytes:
    """Encode candidate sets in one binary buffer. This module's docstring gives the buffer's layout.

    The buffer has `24 + 8 T + 8 n` bytes, or `24 + 8 T + 4 n` without log-probs.
    """
    parts: list[NDArray[Any]] = [
        sets.sizes.astype(INT32),
        sets.sampled_ids.astype(INT32, copy=False),
        sets.token_ids.astype(INT32, copy=False),
    ]
    if sets.has_logprobs:
        parts.append(sets.logprobs.astype(FLOAT32, copy=False))
    version = _WITH_LOGPROBS if sets.has_logprobs else _WITHOUT_LOGPROBS
    header = _HEADER.pack(_MAGIC, version, len(sets), len(sets.token_ids))
    return b"".join([header, *(np.ascontiguousarray(part).data for part in parts)])


def unpack(buffer: bytes | bytearray | memoryview, *, field: str = "candidates") -> CandidateSets:
    """Decode a buffer that `pack` returned.

    On little-endian machines, `token_ids`, `logprobs`, and `sampled_ids` of the sets are views of `buffer`.

    Args:
        buffer: exactly the bytes that `pack` returned. Any additional byte is an error.
        field: the name of the buffer in error messages.

    Raises:
        WireError: the buffer has the wrong magic bytes, version, or length, or it holds invalid sets.
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
        # `pack` always writes format version 1 for sets without any candidate. Reject version 2 for sets
        # without any candidate, so that equal sets have only one encoding.
        raise WireError(field, f"got version {version} without a candidate, expected {_WITH_LOGPROBS}")

    def part(dtype: np.dtype[Any], count: int, start: int) -> NDArray[Any]:
        return np.frombuffer(buffer, dtype, count, _HEADER.size + start)

    names = ("token_ids", "logprobs", "offsets", "sampled_ids")
    with renaming_errors({name: f"{field}.{name}" for name in names}):
        return CandidateSets(
            part(INT32, candidates, 8 * positions),
            part(FLOAT32, candidates, 8 * positions + 4 * candidates) if version == _WITH_LOGPROBS else None,
            offsets_of(part(INT32, positions, 0)),
            part(INT32, positions, 4 * positions),
        )


def pack_base64(sets: CandidateSets) -> str:
    """Return the buffer of `pack` as base64 text, for JSON."""
    return pybase64.b64encode(pack(sets)).decode("ascii")


def unpack_base64(text: str, *, field: str = "candidates") -> CandidateSets:
    """Decode text that `pack_base64` returned.

    Raises:
        WireError: `text` is not base64, or `unpack` rejects the decoded buffer.
    """
    return unpack(b64array(field, text, np.uint8).data, field=field)
