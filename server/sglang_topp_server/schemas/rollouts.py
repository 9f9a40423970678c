"""Pydantic models of `POST /rollouts`, and the parser of its body."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from sglang_topp.errors import BadRequestError, InvalidInputError, describe
from sglang_topp_client.argument_checks import check_request_id
from sglang_topp_client.requests import SampleRequest, plan
from sglang_topp_client.resume import mark_interruptible, plan_resume
from sglang_topp_client.types.rollout import Rollout
from sglang_topp_server.schemas.body_parsing import num_prompts, read_body
from sglang_topp_server.schemas.field_types import (
    Counts,
    Prompts,
    Records,
    RequestId,
    Source,
    Stream,
    Threshold,
    TimeoutS,
)
from sglang_topp_server.schemas.resume_input import read_resumed_tokens, read_rollouts
from sglang_topp_server.settings import Limits

__all__ = ["RolloutRecord", "RolloutsAnswer", "RolloutsBody", "parse_rollouts"]


class RolloutsBody(BaseModel):
    """The body of `POST /rollouts`. Unknown fields are errors, because ignoring them would hide mistakes."""

    # `rollouts` may replace `prompts`, so neither field is required.
    model_config = ConfigDict(extra="forbid", json_schema_extra={"required": []})

    prompts: Prompts = Field(
        description="One text, texts, the token ids of one prompt or of several, or the chat messages of one"
        " prompt or of several; the engine applies its chat template to messages."
    )
    rollouts: Records = Field(
        default=None,
        description="Replaces prompts: records of an earlier answer to continue. The answer's prompt_index is"
        " the index in this list.",
    )
    # A list may hold millions of objects. With `fail_fast`, Pydantic stops at the first invalid object.
    sampling_params: dict[str, Any] | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        default=None,
        description="SGLang's names, including `n`; one object for all prompts, or one per prompt.",
    )
    top_logprobs_p: Threshold = Field(
        default=None,
        description="The threshold of the sets, one for all prompts or one each; 0 or null: no sets.",
    )
    top_logprobs_source: Source = Field(
        default=None,
        description="`sampler`: return the tokens that the sampler could draw, without a threshold.",
    )
    on_abort: Literal["raise", "return", "resume"] = Field(
        default="raise",
        description="How to treat a sample that an abort, a pause, or a weight update ends: report an error,"
        " return a record with finish_reason `abort`, or continue the sample.",
    )
    resumed_tokens: Counts = Field(
        default=None,
        description="How many of the last ids of a prompt belong to the answer, one for all or one each.",
    )
    stream: Stream = False
    request_id: RequestId = None
    timeout_s: TimeoutS = None
    _wanted: list[SampleRequest] = PrivateAttr(default_factory=list)
    _given: dict[int, Rollout] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _one_of_both(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("rollouts") is not None:
            given.setdefault("prompts", None)
        return given

    @property
    def wanted(self) -> list[SampleRequest]:
        """One `SampleRequest` for each prompt. `wanted` is empty until `parse_rollouts` has run."""
        return self._wanted

    @property
    def given(self) -> dict[int, Rollout]:
        """The rollouts to resume, by prompt index. `given` is empty until `parse_rollouts` has run."""
        return self._given


def parse_rollouts(body: bytes | bytearray, limits: Limits) -> RolloutsBody:
    """Parse and check the body of `POST /rollouts`.

    Raises:
        BadRequestError, InvalidInputError: the body is invalid (400), or has more samples than
            `limits.max_samples` (413). The message names the field, the value, and the accepted values.
    """
    request = read_body(body, RolloutsBody)
    if request.rollouts is not None and request.prompts is not None:
        raise BadRequestError("rollouts: got rollouts and prompts, expected one of them", status=400)
    # Check the number of samples before `plan` builds the requests, because `n` may be huge.
    if (samples := _num_samples(request)) > limits.max_samples:
        raise BadRequestError(
            f"prompts x n: got {describe(samples)} samples, expected at most {limits.max_samples};"
            " send them in several requests",
            status=413,
        )
    if request.request_id is not None:
        check_request_id(request.request_id)
    options = request.sampling_params, request.top_logprobs_p, request.top_logprobs_source
    if request.rollouts is None:
        request._wanted = read_resumed_tokens(request.resumed_tokens, plan(request.prompts, *options))
    else:
        if request.resumed_tokens is not None:
            raise InvalidInputError(
                "resumed_tokens: got resumed_tokens and rollouts, which imply it; expected one of them"
            )
        request._wanted, resumed = plan_resume(read_rollouts(request.rollouts), *options)
        request._given = dict(enumerate(resumed))
        # Free the JSON records, which take as much memory as the parsed rollouts.
        request.rollouts = None
    request._wanted = mark_interruptible(request._wanted, request.on_abort)
    for one in request._wanted:
        custom = one.sampling_params.get("custom_params")
        if custom is not None and not isinstance(custom, dict):
            raise InvalidInputError("sampling_params.custom_params: expected an object")
        for name in ("top_logprobs_p", "top_logprobs_source"):
            if isinstance(custom, dict) and name in custom:
                raise InvalidInputError(
                    f"sampling_params.custom_params.{name}: got a value here, where its sets would not reach"
                    f" the answer; expected {name} as a field beside sampling_params"
                )
    return request


def _num_samples(request: RolloutsBody) -> int:
    """Return how many samples are requested: one per rollout, or the sum of `n` over the prompts.

    A missing or invalid `n` counts as 1.
    """
    params = request.sampling_params
    if request.rollouts is not None:
        return len(request.rollouts) if isinstance(request.rollouts, list) else 1
    each = params if isinstance(params, list) else [params or {}] * num_prompts(request.prompts)
    return sum(max(n, 1) if isinstance(n := one.get("n"), int) else 1 for one in each)


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
