"""Encode samples and messages as JSON, or as binary frames if the `Accept` header asks for frames.

The JSON text of candidate sets is large, so the sidecar never holds an answer's whole JSON text in memory. It
encodes a chunk only when it is about to send the chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pybase64
from pydantic_core import to_json
from starlette.datastructures import Headers

from sglang_topp import formats
from sglang_topp_client import Rollout, Score
from sglang_topp_client.transport.http import frame_head
from sglang_topp_client.wire.records import to_frame, to_record

NDJSON = "application/x-ndjson"
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
        record = to_record(replace(sample, candidates=None))
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
    """Yield the bytes of `chunks` in pieces of 1 to 2 times `CHUNK_BYTES`; the last may be shorter."""
    piece = bytearray()
    for chunk in chunks:
        for start in range(0, len(chunk), CHUNK_BYTES):
            piece += chunk[start : start + CHUNK_BYTES]
            if len(piece) >= CHUNK_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


class Encoding:
    """The encoding of a stream's messages: lines of JSON, or binary frames.

    A frame holds a message's length and then the message: a sample or a score in the binary form of
    `sglang_topp_client`, or JSON.

    Args:
        framed: the media type of a response that consists of frames, or None for lines of JSON.
    """

    def __init__(self, framed: str | None = None) -> None:
        self.media_type, self._is_framed = framed or NDJSON, framed is not None

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """Encode a finished sample or score as one message, in chunks of bytes."""
        if not self._is_framed:
            return chain(SampleJson(sample), [b"\n"])
        raw = to_frame(sample)
        return [frame_head(len(raw)), raw]

    def message(self, answer: dict[str, Any]) -> bytes:
        """Encode a message that is not a sample: an error, or the stream's last message."""
        raw = json.dumps(answer, separators=(",", ":")).encode()
        return frame_head(len(raw)) + raw if self._is_framed else raw + b"\n"


def accepted_encoding(headers: Headers, framed: str) -> Encoding:
    """Return lines of JSON, or frames if the `Accept` header asks for them and does not prefer lines.

    Args:
        headers: the request's headers.
        framed: the media type of an answer that consists of frames.
    """
    qualities = {NDJSON: 0.0, framed: 0.0}
    for media_type, quality in _accepted(",".join(headers.getlist("accept"))):
        if media_type in qualities:
            qualities[media_type] = max(qualities[media_type], quality)
    return Encoding(framed if qualities[framed] > 0 and qualities[framed] >= qualities[NDJSON] else None)


def _accepted(header: str) -> Iterator[tuple[str, float]]:
    """Yield each media type of an `Accept` header with its quality. Skip malformed entries."""
    for one in header.split(","):
        media_type, *parameters = (part.strip().lower() for part in one.split(";"))
        by_name = dict(parameter.partition("=")[::2] for parameter in parameters)
        try:
            quality = float({name.strip(): value for name, value in by_name.items()}.get("q", "1"))
        except ValueError:
            continue
        if 0 <= quality <= 1:
            yield media_type, quality
