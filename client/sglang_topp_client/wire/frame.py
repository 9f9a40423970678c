"""Binary frame: encode a record (a JSON object with arrays) as one Zstandard frame, and decode the frame.

The frame's header states the length of the uncompressed content, and the frame ends with a checksum. All
numbers in the content are little-endian. The content has these parts::

    4 bytes     the length of the JSON, uint32
    …           the record's JSON, without its arrays
    …           the arrays, int32 or float32, with lengths that the reader computes from the JSON

If a record has candidate sets, the last three arrays are the sizes, the ids, and the log-probs of the sets.

An array is cut into blocks of 65,536 numbers. The bytes of a block are transposed into four byte planes: the
first byte of every number, then the second byte of every number, and so on. Byte planes compress better than
whole numbers. For ids and set sizes, the byte planes of the high bytes hold mostly zeros. For log-probs, one
byte plane holds mostly exponent bits. All other byte planes are nearly random, and no Zstandard level
compresses them well. A slow level therefore saves little more than a fast one
(`benchmarks/rollout_encoding.py`).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.candidates.csr_operations import offsets_of
from sglang_topp.errors import WireError
from sglang_topp.formats.field_parsing import FLOAT32, INT32, renaming_errors
from sglang_topp_client.wire.field_checks import read_count

__all__ = ["FrameReader", "encode_frame", "is_frame"]

_LEVEL = -1
_JSON_BYTES = struct.Struct("<I")
_BLOCK = 1 << 16
_SETS = "candidates"


def encode_frame(
    record: Mapping[str, Any], arrays: Sequence[NDArray[Any]], sets: CandidateSets | None
) -> bytes:
    """Encode one record as a frame.

    Args:
        record: a JSON-serializable object. The frame's JSON is this object plus the field `num_candidates`.
        arrays: 1-D, int32 or float32.
        sets: the candidate sets, with log-probs. In the frame, the sizes, ids, and log-probs of the sets
            follow the arrays.
    """
    num_candidates = None if sets is None else len(sets.token_ids)
    text = json.dumps(
        {**record, "num_candidates": num_candidates}, ensure_ascii=False, separators=(",", ":")
    ).encode()
    numbers = list(arrays)
    if sets is not None:
        numbers += [sets.sizes.astype(np.int32), sets.token_ids, sets.logprobs]
    num_bytes = _JSON_BYTES.size + len(text) + sum(array.nbytes for array in numbers)
    compressor = zstandard.ZstdCompressor(_LEVEL, write_checksum=True).compressobj(size=num_bytes)
    parts = [compressor.compress(_JSON_BYTES.pack(len(text)) + text)]
    for array in numbers:
        in_bytes = array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8).reshape(-1, 4)
        for start in range(0, len(array), _BLOCK):
            planes = np.ascontiguousarray(in_bytes[start : start + _BLOCK].T)
            parts.append(compressor.compress(planes.data))
    parts.append(compressor.flush())
    return b"".join(parts)


def is_frame(raw: bytes) -> bool:
    """Return whether a message is a frame, rather than JSON."""
    return raw.startswith(zstandard.FRAME_HEADER)


class FrameReader:
    """A reader of one frame. First read the arrays, in the frame's order, and then call `sets`.

    Args:
        raw: the bytes of the whole frame.
        max_bytes: the maximum length of the decompressed content. If a frame's header states a greater
            length, the reader does not decompress the frame.

    Attributes:
        record: the JSON object of the frame.

    Raises:
        WireError: the frame was cut or altered, is too long, or holds no JSON object.
    """

    def __init__(self, raw: bytes, *, max_bytes: int) -> None:
        self._content = memoryview(_decompressed(raw, max_bytes))
        self._at = _JSON_BYTES.size
        if len(self._content) < self._at:
            raise WireError("frame", f"got {len(self._content)} bytes, expected at least {self._at}")
        text = bytes(self._take(_JSON_BYTES.unpack_from(self._content)[0], "bytes of JSON"))
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WireError("frame", f"its JSON cannot be read: {error}") from None
        if not isinstance(record, dict):
            raise WireError("frame", f"its JSON is {type(record).__name__}, expected an object")
        self.record: dict[str, Any] = record

    def int32(self, count: int, what: str) -> NDArray[np.int32]:
        """Read the frame's next `count` numbers as a read-only array.

        `what` is the array's name in error messages.
        """
        return self._array(INT32, count, what)

    def float32(self, count: int, what: str) -> NDArray[np.float32]:
        """Read the frame's next `count` numbers as a read-only array.

        `what` is the array's name in error messages.
        """
        return self._array(FLOAT32, count, what)

    def sets(self, sampled_ids: NDArray[np.int32]) -> CandidateSets | None:
        """Read the candidate sets, the last part of the frame. Return None if the record has no sets.

        Args:
            sampled_ids: int32 [T], the sampled token of each set.
        """
        sets = None
        if self.record.get("num_candidates") is not None:
            n = read_count(self.record, "num_candidates")
            sizes = self.int32(len(sampled_ids), "set sizes")
            token_ids, logprobs = self.int32(n, "candidate ids"), self.float32(n, "candidate log-probs")
            names = ("token_ids", "logprobs", "offsets", "sampled_ids")
            with renaming_errors({name: f"{_SETS}.{name}" for name in names}):
                sets = CandidateSets(token_ids, logprobs, offsets_of(sizes), sampled_ids)
        if self._at != len(self._content):
            raise WireError("frame", f"got {len(self._content)} bytes, expected {self._at}")
        return sets

    def _array(self, dtype: np.dtype[Any], count: int, what: str) -> NDArray[Any]:
        planes = np.frombuffer(self._take(4 * count, what), np.uint8)
        in_bytes = np.empty((count, 4), np.uint8)
        for start in range(0, count, _BLOCK):
            block = in_bytes[start : start + _BLOCK]
            block[...] = planes[4 * start : 4 * (start + len(block))].reshape(4, -1).T
        values = in_bytes.reshape(-1).view(dtype).astype(dtype.newbyteorder("="), copy=False)
        values.flags.writeable = False  # arrays that are decoded from base64 are also read-only
        return values

    def _take(self, num_bytes: int, what: str) -> memoryview:
        start, self._at = self._at, self._at + num_bytes
        if self._at > len(self._content):
            raise WireError("frame", f"got {len(self._content)} bytes, too few for {what} up to {self._at}")
        return self._content[start : self._at]


def _decompressed(raw: bytes, max_bytes: int) -> bytes:
    try:
        stated = zstandard.get_frame_parameters(raw)
        if not stated.has_checksum or stated.content_size == zstandard.CONTENTSIZE_UNKNOWN:
            raise WireError("frame", "states no content size or has no checksum, expected both")
        if stated.content_size > max_bytes:
            raise WireError(
                "max_message_bytes",
                f"got {stated.content_size} bytes of one sample, expected at most {max_bytes}; if samples are"
                " that long, increase the client's max_message_bytes",
            )
        return zstandard.ZstdDecompressor().decompress(raw, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError("frame", f"cannot be decompressed, so it was cut or altered: {error}") from None
