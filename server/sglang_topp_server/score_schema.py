"""What `POST /scores` takes and returns, as pydantic models."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, WithJsonSchema

from sglang_topp.errors import BadRequestError
from sglang_topp_client.checks import check_request_id
from sglang_topp_client.score_request import ScoreRequest, plan_scores
from sglang_topp_server.limits import Limits
from sglang_topp_server.schema import (
    Prompts,
    RequestId,
    Stream,
    Threshold,
    TimeoutS,
    num_prompts,
    read_body,
)

__all__ = ["ScoreBody", "ScoreRecord", "ScoresAnswer", "parse_scores"]

_POSITION = {"type": "integer", "minimum": 1}
_Start: TypeAlias = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _POSITION,
                {"type": "array", "items": {"anyOf": [_POSITION, {"type": "null"}]}},
                {"type": "null"},
            ]
        }
    ),
]


class ScoreBody(BaseModel):
    """The body of `POST /scores`. There is no source of sets to choose: nobody drew these tokens."""

    model_config = ConfigDict(extra="forbid")

    sequences: Prompts = Field(description="One text, texts, the token ids of one sequence, or of several.")
    top_logprobs_p: Threshold = Field(
        default=None,
        description="The candidate sets' threshold, one for all sequences or one each; 0 or null: no sets.",
    )
    start: _Start = Field(
        default=None,
        description="The first position that is scored, one for all or one each; null is 1. The token at"
        " position 0 has no distribution.",
    )
    stream: Stream = False
    request_id: RequestId = None
    timeout_s: TimeoutS = None
    _wanted: list[ScoreRequest] = PrivateAttr(default_factory=list)

    @property
    def wanted(self) -> list[ScoreRequest]:
        """What is asked for, one per sequence; `parse_scores` fills it."""
        return self._wanted


def parse_scores(body: bytes | bytearray, limits: Limits) -> ScoreBody:
    """The request in a body.

    Raises:
        BadRequestError: 400, with a sentence that names the field, what it got and what it takes; 413
            where there are more sequences than `limits.max_samples`.
        InvalidInputError: the same as 400, from the client's own checks.
    """
    request = read_body(body, ScoreBody)
    # Before they are laid out one by one.
    if (count := num_prompts(request.sequences)) > limits.max_samples:
        raise BadRequestError(
            f"sequences: got {count}, expected at most {limits.max_samples}; send them in several requests",
            status=413,
        )
    if request.request_id is not None:
        check_request_id(request.request_id)
    request._wanted = plan_scores(request.sequences, request.top_logprobs_p, request.start)
    return request


class ScoreRecord(BaseModel):
    """One scored sequence."""

    model_config = ConfigDict(extra="forbid")

    sequence_index: int
    request_id: str
    token_ids: list[int]
    start: int
    logprobs: str = Field(description="base64 of little-endian float32, one per position from `start` on.")
    candidates: str | None = Field(
        description="base64 of `sglang_topp.wire.pack`, one set per such position; null: none were asked for."
    )
    weight_version: str
    num_tokens: int
    cached_tokens: int


class ScoresAnswer(BaseModel):
    """The answer without `stream`: every sequence, in the order of the request."""

    scores: list[ScoreRecord]
