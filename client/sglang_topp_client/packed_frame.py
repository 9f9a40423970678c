"""Packed frames: a JSON object and the arrays beside it, in one frame, both ways.

Numbers are little-endian, one part follows the other::

    offset  bytes      content
    0       4          what kind of record it is
    4       4          uint32 version: 1
    8       4          uint32 h
    12      h          the record's JSON, without its arrays
    …                  its arrays, int32 or float32, whose lengths the JSON tells
    …                  its candidate sets, as `sglang_topp.compact` packs them; nothing where there are none
    …       4          uint32, the CRC-32 of all that stands before
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets, compact
from sglang_topp.errors import WireError

__all__ = ["FLOAT32", "INT32", "OpenFrame", "PackedFrame"]

INT32, FLOAT32 = np.dtype("<i4"), np.dtype("<f4")

_VERSION = 1
_HEADER = struct.Struct("<4sII")
_CRC = struct.Struct("<I")
_PART_BYTES = 1 << 16


class PackedFrame:
    """The bytes of one record, made as they are asked for; their number is known before.

    Args:
        magic: four bytes, the kind of record.
        record: the JSON.
        arrays: 1-D, int32 or float32.
        sets: the candidate sets, or None.
        logprob_bits: of the candidates' log-probs, 32 or 16: see `sglang_topp.compact.Packed`.
    """

    def __init__(
        self,
        magic: bytes,
        record: Mapping[str, Any],
        arrays: Sequence[NDArray[Any]],
        sets: CandidateSets | None,
        *,
        logprob_bits: int = 32,
    ) -> None:
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        self._head = _HEADER.pack(magic, _VERSION, len(text)) + text
        self._arrays = [array.astype(array.dtype.newbyteorder("<"), copy=False) for array in arrays]
        self._sets = None if sets is None else compact.Packed(sets, logprob_bits=logprob_bits)

    def __len__(self) -> int:
        """Bytes of the whole."""
        num_sets = 0 if self._sets is None else len(self._sets)
        return len(self._head) + sum(array.nbytes for array in self._arrays) + num_sets + _CRC.size

    def __iter__(self) -> Iterator[bytes]:
        """The bytes, in order, in parts of at most 64 KiB (but the JSON is one)."""
        crc = 0
        for part in self._parts():
            crc = zlib.crc32(part, crc)
            yield part
        yield _CRC.pack(crc)

    def _parts(self) -> Iterator[bytes]:
        yield self._head
        for array in self._arrays:
            for start in range(0, len(array), _PART_BYTES // 4):
                yield array[start : start + _PART_BYTES // 4].tobytes()
        if self._sets is not None:
            yield from self._sets


class OpenFrame:
    """A frame that is being read, part after part.

    Args:
        raw: all of it.
        magic: the kind of record that it is to be.

    Attributes:
        record: its JSON.

    Raises:
        WireError: it was cut or altered, is of another kind or version, or has no JSON object.
    """

    def __init__(self, raw: bytes, magic: bytes) -> None:
        if len(raw) < _HEADER.size + _CRC.size:
            raise WireError("frame", f"got {len(raw)} bytes, expected at least {_HEADER.size + _CRC.size}")
        got_magic, version, num_text = _HEADER.unpack_from(raw)
        if (got_magic, version) != (magic, _VERSION):
            raise WireError(
                "frame", f"got {got_magic!r} version {version}, expected {magic!r} version {_VERSION}"
            )
        self._body = memoryview(raw)[: -_CRC.size]
        crc, (expected,) = zlib.crc32(self._body), _CRC.unpack_from(raw, len(self._body))
        if crc != expected:
            raise WireError("frame", f"its CRC-32 is {crc:#010x}, expected {expected:#010x}: it was altered")
        self._at = _HEADER.size + num_text
        if self._at > len(self._body):
            raise WireError("frame", f"got {len(self._body)} bytes, expected {self._at} and more")
        try:
            record = json.loads(bytes(self._body[_HEADER.size : self._at]))
        except (ValueError, RecursionError) as error:
            raise WireError("frame", f"its JSON cannot be read: {error}") from None
        if not isinstance(record, dict):
            raise WireError("frame", f"its JSON is {type(record).__name__}, expected an object")
        self.record: dict[str, Any] = record

    def require(self, num_numbers: int, of: str) -> None:
        """Raise WireError unless so many numbers of four bytes can follow; `of` says what they are for."""
        if self._at + 4 * num_numbers > len(self._body):
            raise WireError("frame", f"got {len(self._body)} bytes, too few for {of} behind {self._at}")

    def array(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """The next so many numbers, of native byte order, read-only."""
        start, self._at = self._at, self._at + 4 * count
        # Copied: aligned, and without the whole frame behind it.
        values = np.frombuffer(self._body, dtype, count, start).astype(dtype.newbyteorder("="))
        values.flags.writeable = False  # as what comes as JSON is
        return values

    def sets(
        self, sampled_ids: NDArray[np.int32], *, logprob_bits: int
    ) -> tuple[CandidateSets | None, float]:
        """The candidate sets, all that is left, and how far their log-probs may be off.

        Args:
            sampled_ids: int32 [T], the tokens that they are of.
            logprob_bits: what was asked for; where it is 32, rounded log-probs are an error.
        """
        packed = self._body[self._at :]
        if not packed:
            return None, 0.0
        step = compact.logprob_step(packed)
        if step is not None and logprob_bits != 16:
            raise WireError(
                "candidates", "holds log-probs that are rounded to 16 bits, which nobody asked for"
            )
        return compact.unpack(packed, sampled_ids), (step or 0.0) / 2
