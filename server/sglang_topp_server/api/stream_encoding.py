"""Encode a stream's messages as JSON lines, or as binary frames if the `Accept` header asks for frames."""

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
from sglang_topp_server.api.json_chunks import SampleJson

__all__ = ["NDJSON", "Encoding", "Frames", "JsonLines", "accepted_encoding", "encode"]

NDJSON = "application/x-ndjson"


class Encoding(Protocol):
    """The interface for encoding a stream's messages."""

    media_type: str

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """Encode a finished sample or score as one message, in chunks of bytes."""

    def message(self, answer: dict[str, Any]) -> bytes:
        """Encode a message that is not a sample: an error, or the stream's last message."""


class JsonLines:
    """The default encoding: one line of JSON per message."""

    media_type = NDJSON

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """Encode a finished sample or score as one line of JSON, in chunks of bytes."""
        return chain(SampleJson(sample), [b"\n"])

    def message(self, answer: dict[str, Any]) -> bytes:
        """Encode an error, or the stream's last message, as one line of JSON."""
        return encode(answer) + b"\n"


class Frames:
    """The binary encoding: each message is one frame, which holds the message's length and then the message.

    Samples and scores are in the binary encoding of `sglang_topp_client`. Errors and the stream's last
    message are JSON.

    Args:
        media_type: the media type of the response.
    """

    def __init__(self, media_type: str) -> None:
        self.media_type = media_type

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """Encode a finished sample or score as one frame, in the binary encoding of `sglang_topp_client`."""
        raw = score_to_bytes(sample) if isinstance(sample, Score) else rollout_to_bytes(sample)
        return [frame_head(len(raw)), raw]

    def message(self, answer: dict[str, Any]) -> bytes:
        """Encode an error, or the stream's last message, as one frame that holds JSON."""
        raw = encode(answer)
        return frame_head(len(raw)) + raw


def accepted_encoding(headers: Headers, framed: str) -> Encoding:
    """Return `JsonLines`, or `Frames` if the `Accept` header asks for frames and does not prefer JSON lines.

    Args:
        headers: the request's headers.
        framed: the media type of an answer that consists of frames.
    """
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
    """Encode an error, or the last message of a stream, as JSON."""
    return json.dumps(answer, separators=(",", ":")).encode()
