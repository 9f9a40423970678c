"""Binary frame: encode a JSON object and arrays as one Zstandard frame, and decode the frame.

The frame's header states the length of the uncompressed content, and the frame ends with a checksum. All
numbers in the content are little-endian. The content has these parts::

    4 bytes     the length of the JSON, uint32
    …           the JSON object
    …           the arrays, int32 or float32, with lengths that the reader knows from the JSON

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
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from sglang_topp.errors import WireError

_LEVEL = -1
_JSON_BYTES = struct.Struct("<I")
_BLOCK = 1 << 16


def encode_frame(record: Mapping[str, Any], arrays: Iterable[NDArray[Any]]) -> bytes:
    """Encode a JSON-serializable object and one-dimensional arrays of int32 or float32 as a frame."""
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    numbers = list(arrays)
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
    """A reader of one frame. Read the arrays in the frame's order, and then call `end`.

    Args:
        raw: the bytes of the whole frame.
        max_bytes: the maximum length of the decompressed content. If a frame's header states a greater
            length, the reader does not decompress the frame.

    Attributes:
        text: the text of the frame's JSON object.

    Raises:
        WireError: the frame was cut or altered, or is too long.
    """

    def __init__(self, raw: bytes, *, max_bytes: int) -> None:
        self._content = memoryview(_decompressed(raw, max_bytes))
        self._at = _JSON_BYTES.size
        if len(self._content) < self._at:
            raise WireError("frame", f"got {len(self._content)} bytes, expected at least {self._at}")
        self.text = self._take(_JSON_BYTES.unpack_from(self._content)[0], "bytes of JSON")

    def read(self, dtype: np.dtype[Any], count: int, what: str) -> NDArray[Any]:
        """Read the frame's next `count` numbers as a read-only array, which errors call `what`."""
        planes = np.frombuffer(self._take(4 * count, what), np.uint8)
        in_bytes = np.empty((count, 4), np.uint8)
        for start in range(0, count, _BLOCK):
            block = in_bytes[start : start + _BLOCK]
            block[...] = planes[4 * start : 4 * (start + len(block))].reshape(4, -1).T
        values = in_bytes.reshape(-1).view(dtype).astype(dtype.newbyteorder("="), copy=False)
        values.flags.writeable = False  # arrays that are decoded from base64 are also read-only
        return values

    def end(self) -> None:
        """Raise WireError if the frame has more than what was read."""
        if self._at != len(self._content):
            raise WireError("frame", f"got {len(self._content)} bytes, expected {self._at}")

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
