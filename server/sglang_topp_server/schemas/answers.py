"""Pydantic models of the sidecar's answers and errors, for the OpenAPI page."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sglang_topp.engine_contract import Model
from sglang_topp_client.protocols.sidecar import SERVICE
from sglang_topp_server.settings import Limits

__all__ = [
    "AbortAnswer",
    "EngineInfo",
    "ErrorAnswer",
    "Info",
    "ModelInfo",
    "PatchInfo",
    "RolloutRecord",
    "RolloutsAnswer",
    "ScoreRecord",
    "ScoresAnswer",
]


class ModelInfo(BaseModel):
    """The sizes of the engine's model, and the maximum length of a text prompt.

    `max_token_chars` is the number of characters in the tokenizer's longest token.
    """

    vocab_size: int
    context_length: int
    max_token_chars: int
    max_text_chars: int = Field(description="Maximum characters of a text prompt.")

    @classmethod
    def of(cls, model: Model) -> ModelInfo:
        """Build a `ModelInfo` from the vocabulary size and the other sizes that the engine reported."""
        return cls(**asdict(model), max_text_chars=model.max_text_chars)


class EngineInfo(BaseModel):
    """The engine that the sidecar calls. Each field is null until the engine has reported a value.

    `weight_version` is the version at the time of this answer; a gateway reports that of one of its workers.
    """

    model_path: str | None
    sglang_version: str | None
    weight_version: str | None
    model: ModelInfo | None


class PatchInfo(BaseModel):
    """The state of the engine's plugin. The sidecar copies `version` and `seams` from the engine's report.

    The keys of `seams` are the names of the SGLang functions and classes that the plugin depends on. Each
    value is `"holds"` if the function or class is as the plugin expects, and otherwise describes the
    problem.
    """

    active: bool
    version: Any
    seams: Any
    problems: list[str]


class Info(BaseModel):
    """The answer to `GET /info`."""

    service: str = SERVICE
    version: str
    ready: bool
    reason: str = Field(description="Why the engine is not ready; empty if it is ready.")
    engine: EngineInfo
    patch: PatchInfo
    limits: Limits


class ErrorDetail(BaseModel):
    """The error: a `type` for programs to read, and a `message` for people."""

    type: str
    message: str


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


class Timing(BaseModel):
    """Durations in seconds."""

    latency_s: float


class WeightSpan(BaseModel):
    """The version of the weights that generated the tokens from `start` up to, but not including, `end`."""

    version: str
    start: int
    end: int


class RolloutRecord(BaseModel):
    """One finished sample."""

    model_config = ConfigDict(extra="forbid")

    prompt_index: int
    sample_index: int
    request_id: str
    prompt_ids: list[int]
    output_ids: list[int]
    text: str
    logprobs: str = Field(description="base64 of little-endian float32, one per output token.")
    candidates: str | None = Field(
        description="base64 of `sglang_topp.formats.pack`; null if no sets were requested."
    )
    top_logprobs_source: str | None = Field(
        description="The rule that made the sets: distribution or sampler."
    )
    top_logprobs_p: float | None
    sampling_params: dict[str, Any] | None = Field(description="The request's parameters, without n.")
    finish_reason: str
    weight_version: str | None
    weight_versions: list[WeightSpan] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing
    routing_key: str
    appended_spans: list[tuple[int, int]] = Field(
        description="[start, end] of the output ids that the caller appended."
    )


class RolloutsAnswer(BaseModel):
    """The answer to a request without `stream`: all samples, ordered by prompt, then by sample."""

    rollouts: list[RolloutRecord]


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


class AbortAnswer(BaseModel):
    """The answer to `POST /abort`, sent after the aborted requests have stopped.

    The sidecar answers `ok` even if no request has the given `request_id`.
    """

    status: str = "ok"
    aborted: int | None = Field(
        default=None,
        description="How many prompts of this sidecar's requests it aborted. Null for `all`, which also"
        " aborts requests that others sent to the engine.",
    )
