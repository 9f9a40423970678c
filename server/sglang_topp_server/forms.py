"""Forms: how a stream's messages are written, as lines of JSON or as frames, by what the caller accepts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

from starlette.datastructures import Headers

from sglang_topp_client import Rollout, Score
from sglang_topp_client.messages import frame_head
from sglang_topp_client.packed_frame import PackedFrame
from sglang_topp_client.packed_record import PackedRecord
from sglang_topp_client.score_record import PackedScore
from sglang_topp_server.pieces import Record

__all__ = ["NDJSON", "Form", "Frames", "Lines", "accepted_form", "encode"]

NDJSON = "application/x-ndjson"
_LOGPROB_BITS = {"32": 32, "16": 16}


class Form(Protocol):
    """One way to write messages."""

    media_type: str

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """A finished sample, or a score, made piece by piece."""

    def other(self, answer: dict[str, Any]) -> bytes:
        """What is no sample."""


class Lines:
    """A line of JSON each. What whoever does not ask for another form gets."""

    media_type = NDJSON

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """`sglang_topp_client.record`, or `score_record`."""
        return chain(Record(sample), [b"\n"])

    def other(self, answer: dict[str, Any]) -> bytes:
        """The same JSON as everywhere."""
        return encode(answer) + b"\n"


class Frames:
    """A frame each, with its length before it.

    Args:
        media_type: of what they hold.
        logprob_bits: of the candidates' log-probs, 32 or 16.
    """

    def __init__(self, media_type: str, logprob_bits: int) -> None:
        self.media_type = media_type if logprob_bits == 32 else f"{media_type};logprob-bits={logprob_bits}"
        self._logprob_bits = logprob_bits

    def sample(self, sample: Rollout | Score) -> Iterable[bytes]:
        """`sglang_topp_client.packed_record`, or `score_record`."""
        record: PackedFrame
        if isinstance(sample, Score):
            record = PackedScore(sample, logprob_bits=self._logprob_bits)
        else:
            record = PackedRecord(sample, logprob_bits=self._logprob_bits)
        return chain([frame_head(len(record))], record)

    def other(self, answer: dict[str, Any]) -> bytes:
        """The same JSON as everywhere."""
        raw = encode(answer)
        return frame_head(len(raw)) + raw


def accepted_form(headers: Headers, framed: str) -> Form:
    """Frames where `Accept` names `framed`, their media type, and not lines with a higher quality; else
    lines."""
    frames: tuple[float, int] | None = None
    lines = 0.0
    for media_type, parameters, quality in _accepted(",".join(headers.getlist("accept"))):
        if media_type == NDJSON:
            lines = max(lines, quality)
        elif media_type == framed:
            bits = _LOGPROB_BITS.get(parameters.get("logprob-bits", "32"))
            if bits is not None and quality > 0 and (frames is None or quality > frames[0]):
                frames = quality, bits
    return Lines() if frames is None or frames[0] < lines else Frames(framed, frames[1])


def _accepted(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """`(media type, parameters, quality)` of each that an `Accept` header lists; what is malformed is not."""
    for one in header.split(","):
        media_type, *rest = (part.strip().lower() for part in one.split(";"))
        parameters = {
            name.strip(): value.strip().strip('"') for name, _, value in (p.partition("=") for p in rest)
        }
        try:
            quality = float(parameters.pop("q", "1"))
        except ValueError:
            continue
        if 0 <= quality <= 1:
            yield media_type, parameters, quality


def encode(answer: dict[str, Any]) -> bytes:
    """JSON of what is no sample: small, whatever an engine's error may contain."""
    return json.dumps(answer, separators=(",", ":")).encode()
