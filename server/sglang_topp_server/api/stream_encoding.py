"""Encode the messages of a stream: as JSON lines, or as frames if the request's `Accept` names them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

from starlette.datastructures import Headers

from sglang_topp_client import Rollout, Score
from sglang_topp_client.codecs.rollout_binary import rollout_to_bytes
from sglang_topp_client.codecs.score_codecs import score_to_bytes
from sglang_topp_client.transport.framing import frame_head
from sglang_topp_server.api.chunked_response import SampleJson

__all__ = ["NDJSON", "Encoding", "Frames", "JsonLines", "accepted_encoding", "encode"]

NDJSON = "application/x-ndjson"


class Encoding(Protocol):
    """One encoding of a stream of messages."""

    media_type: str

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """Encode a finished sample, or a score, in chunks."""

    def message(self, answer: dict[str, Any]) -> bytes:
        """Encode another message: an error, or the last message."""


class JsonLines:
    """The default encoding: one line of JSON per message."""

    media_type = NDJSON

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """Encode a finished sample, or a score, as one line of JSON, in chunks."""
        return chain(SampleJson(sample), [b"\n"])

    def message(self, answer: dict[str, Any]) -> bytes:
        """Encode another message as one line of JSON."""
        return encode(answer) + b"\n"


class Frames:
    """One frame per message: its length, then its bytes. Samples use the binary codec.

    Args:
        media_type: the media type of a stream of frames.
    """

    def __init__(self, media_type: str) -> None:
        self.media_type = media_type

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """Encode a finished sample, or a score, as one frame in the binary codec."""
        raw = score_to_bytes(sample) if isinstance(sample, Score) else rollout_to_bytes(sample)
        return [frame_head(len(raw)), raw]

    def message(self, answer: dict[str, Any]) -> bytes:
        """Encode another message as one frame of JSON."""
        raw = encode(answer)
        return frame_head(len(raw)) + raw


def accepted_encoding(headers: Headers, framed: str) -> Encoding:
    """Return frames if `Accept` names their media type `framed`, unless it prefers JSON lines."""
    qualities = {NDJSON: 0.0, framed: 0.0}
    for media_type, quality in _accepted(",".join(headers.getlist("accept"))):
        if media_type in qualities:
            qualities[media_type] = max(qualities[media_type], quality)
    return Frames(framed) if qualities[framed] > 0 and qualities[framed] >= qualities[NDJSON] else JsonLines()


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


def encode(answer: dict[str, Any]) -> bytes:
    """Return the JSON of a message other than a sample."""
    return json.dumps(answer, separators=(",", ":")).encode()
