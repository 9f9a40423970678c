"""Pydantic models of `POST /scores`, and the parser of its body."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from sglang_topp.errors import BadRequestError
from sglang_topp_client.argument_checks import check_request_id
from sglang_topp_client.requests import ScoreRequest, plan_scores
from sglang_topp_server.schemas.body_parsing import num_prompts, read_body
from sglang_topp_server.schemas.field_types import RequestId, Sequences, Start, Stream, Threshold, TimeoutS
from sglang_topp_server.settings import Limits

__all__ = ["ScoreRecord", "ScoresAnswer", "ScoresBody", "parse_scores"]


class ScoresBody(BaseModel):
    """The body of `POST /scores`.

    In `POST /rollouts`, `top_logprobs_source` can request candidate sets of the tokens that the engine's
    sampler could draw.
    Scoring uses no sampler, so this body has no `top_logprobs_source`.
    """

    model_config = ConfigDict(extra="forbid")

    sequences: Sequences = Field(description="One text, texts, the token ids of one sequence, or of several.")
    top_logprobs_p: Threshold = Field(
        default=None,
        description="The threshold of the candidate sets, one for all sequences or one each; 0 or null: no"
        " sets.",
    )
    start: Start = Field(
        default=None,
        description="The first scored position, one for all or one each; null means 1. The token at position"
        " 0 has no distribution.",
    )
    stream: Stream = False
    request_id: RequestId = None
    timeout_s: TimeoutS = None
    _wanted: list[ScoreRequest] = PrivateAttr(default_factory=list)

    @property
    def wanted(self) -> list[ScoreRequest]:
        """The requested scores, one entry per sequence. `wanted` is empty until `parse_scores` has run."""
        return self._wanted


def parse_scores(body: bytes | bytearray, limits: Limits) -> ScoresBody:
    """Parse and check the body of `POST /scores`.

    Raises:
        BadRequestError, InvalidInputError: the body is invalid (400), or has more sequences than
            `limits.max_samples` (413). The message names the field, the value, and the accepted values.
    """
    request = read_body(body, ScoresBody)
    # Check the number of sequences, which may be millions, before `plan_scores` creates a request for each.
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
        description="base64 of `formats.pack`, one set per such position; null if no sets were requested."
    )
    weight_version: str | None
    num_tokens: int
    cached_tokens: int


class ScoresAnswer(BaseModel):
    """The answer to a request without `stream`: all scores, in the order of the request's sequences."""

    scores: list[ScoreRecord]
