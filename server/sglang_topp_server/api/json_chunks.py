"""Encode samples as JSON, in chunks of bounded size.

The JSON text of candidate sets is large, so the sidecar never holds an answer's whole JSON text in memory.
The sidecar encodes a chunk only when it is about to send the chunk. At most one encoded chunk per connection
waits for the caller to read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pybase64
from pydantic_core import to_json

from sglang_topp import formats
from sglang_topp_client import Rollout, Score
from sglang_topp_client.codecs.rollout_json import rollout_to_json
from sglang_topp_client.codecs.score_codecs import score_to_json

__all__ = ["CHUNK_BYTES", "SampleJson", "rechunk"]

CHUNK_BYTES = 1 << 16
_RAW_BYTES = CHUNK_BYTES // 4 * 3


class SampleJson:
    """The JSON of one finished sample or score, as an iterable of chunks.

    The codecs of `sglang_topp_client` can decode this JSON. `len()` returns the size of the whole JSON in
    bytes, and does not encode the candidate sets.

    Args:
        sample: the sample or score. `SampleJson` keeps the sample's candidate sets in memory.
    """

    def __init__(self, sample: Rollout | Score) -> None:
        if isinstance(sample, Score):
            record = score_to_json(replace(sample, candidates=None))
        else:
            record = rollout_to_json(replace(sample, candidates=None))
        self._parts: list[bytes | memoryview] = []
        if sample.candidates is None:
            self._head, self._tail = to_json(record), b""
        else:
            del record["candidates"]
            self._head, self._tail = to_json(record)[:-1] + b',"candidates":"', b'"}'
            self._parts = formats.pack_parts(sample.candidates)
        num_raw = sum(map(len, self._parts))
        self._length = len(self._head) + (num_raw + 2) // 3 * 4 + len(self._tail)

    def __len__(self) -> int:
        """Return the number of bytes of the sample's JSON."""
        return self._length

    def __iter__(self) -> Iterator[bytes]:
        """Yield the sample's JSON in chunks."""
        yield self._head
        rest = b""
        for part in self._parts:
            for start in range(0, len(part), _RAW_BYTES):
                raw = rest + bytes(part[start : start + _RAW_BYTES])
                whole = len(raw) - len(raw) % 3
                rest = raw[whole:]
                yield pybase64.b64encode(raw[:whole])
        yield pybase64.b64encode(rest)
        yield self._tail


def rechunk(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the bytes of `chunks` in pieces of `CHUNK_BYTES` bytes. Only the last piece may be shorter."""
    pending: list[bytes] = []
    size = 0
    for chunk in chunks:
        start = 0
        while size + len(chunk) - start >= CHUNK_BYTES:
            end = start + CHUNK_BYTES - size
            yield b"".join([*pending, chunk[start:end]])
            pending.clear()
            start, size = end, 0
        if start < len(chunk):
            pending.append(chunk[start:])
            size += len(chunk) - start
    if pending:
        yield b"".join(pending)
