"""Answers in pieces of bounded size, made as they are sent.

A sample's candidate sets are encoded piece by piece, so an answer is never in memory a second time as
text, and no reader has more than a piece waiting in its connection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pybase64
from pydantic_core import to_json

from sglang_topp import wire
from sglang_topp_client import Rollout, Score
from sglang_topp_client.record import to_record
from sglang_topp_client.score_record import score_to_record

__all__ = ["PIECE_BYTES", "Record", "in_pieces"]

PIECE_BYTES = 1 << 16
_RAW_BYTES = PIECE_BYTES // 4 * 3


class Record:
    """The JSON of one finished sample, as `sglang_topp_client.record` writes it, or of one score
    (`score_record`); its length is known before any of it is made.

    Args:
        sample: its candidate sets are kept, the rest is encoded.
    """

    def __init__(self, sample: Rollout | Score) -> None:
        if isinstance(sample, Score):
            record = score_to_record(replace(sample, candidates=None))
        else:
            record = to_record(replace(sample, candidates=None))
        self._parts: list[bytes | memoryview] = []
        if sample.candidates is None:
            self._head, self._tail = to_json(record), b""
        else:
            del record["candidates"]
            self._head, self._tail = to_json(record)[:-1] + b',"candidates":"', b'"}'
            self._parts = wire.pack_parts(sample.candidates)
        num_raw = sum(map(len, self._parts))
        self._length = len(self._head) + (num_raw + 2) // 3 * 4 + len(self._tail)

    def __len__(self) -> int:
        """Bytes of the JSON."""
        return self._length

    def __iter__(self) -> Iterator[bytes]:
        """The JSON, in order."""
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


def in_pieces(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, in pieces of `PIECE_BYTES` and a last one."""
    pending: list[bytes] = []
    size = 0
    for chunk in chunks:
        start = 0
        while size + len(chunk) - start >= PIECE_BYTES:
            end = start + PIECE_BYTES - size
            yield b"".join([*pending, chunk[start:end]])
            pending.clear()
            start, size = end, 0
        if start < len(chunk):
            pending.append(chunk[start:])
            size += len(chunk) - start
    if pending:
        yield b"".join(pending)
