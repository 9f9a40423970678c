"""What the sidecar takes and returns, as pydantic models, and the sentences for what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar

import pydantic_core
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    StrictStr,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from sglang_topp.engine_request import Model
from sglang_topp.errors import BadRequestError, InvalidInputError
from sglang_topp_client.checks import MAX_REQUEST_ID, check_request_id
from sglang_topp_client.request import DISTRIBUTION, SAMPLER, SampleRequest, plan
from sglang_topp_client.resuming import interruptible, plan_resume
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.sidecar_api import SERVICE
from sglang_topp_server.given import read_resumed_tokens, read_rollouts
from sglang_topp_server.limits import Limits

__all__ = [
    "AbortAnswer",
    "AbortRequest",
    "ErrorAnswer",
    "Info",
    "Prompts",
    "RequestId",
    "RolloutRecord",
    "RolloutRequest",
    "RolloutsAnswer",
    "SampleBody",
    "Stream",
    "Threshold",
    "TimeoutS",
    "num_prompts",
    "parse_abort",
    "parse_request",
    "read_body",
]

# The elements are the client's to check (`sglang_topp_client.request`): it does so anyway before it asks
# the engine, its sentences name the entry at fault, and a batch may hold millions of ids.
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
Prompts: TypeAlias = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS},
            ]
        }
    ),
]
_PROBABILITY = {"type": "number", "minimum": 0, "maximum": 1}
Threshold: TypeAlias = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _PROBABILITY,
                {"type": "array", "items": {"anyOf": [_PROBABILITY, {"type": "null"}]}},
                {"type": "null"},
            ]
        }
    ),
]
_SOURCE = {"type": "string", "enum": [DISTRIBUTION, SAMPLER]}
_Source: TypeAlias = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _SOURCE,
                {"type": "array", "items": {"anyOf": [_SOURCE, {"type": "null"}]}},
                {"type": "null"},
            ]
        }
    ),
]
_COUNT = {"type": "integer", "minimum": 0}
_Counts: TypeAlias = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _COUNT,
                {"type": "array", "items": {"anyOf": [_COUNT, {"type": "null"}]}},
                {"type": "null"},
            ]
        }
    ),
]
_Records: TypeAlias = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]})
]

# Unknown fields of one body that are named; it may hold millions.
_MAX_UNKNOWN = 4
_MAX_SHOWN_CHARS = 60

_Body = TypeVar("_Body", bound=BaseModel)


Stream: TypeAlias = Annotated[StrictBool, Field(description="One line of JSON per sample, as each finishes.")]
RequestId: TypeAlias = Annotated[
    StrictStr | None,
    Field(
        description="The start of the ids that the engine's log shows: printable, at most"
        f" {MAX_REQUEST_ID} characters."
    ),
]
TimeoutS: TypeAlias = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None,
    Field(description="Seconds after which the samples are aborted: 504. The server has a limit of its own."),
]


class SampleBody(Protocol):
    """What the bodies of all routes that ask the engine for samples have in common."""

    stream: bool
    request_id: str | None
    timeout_s: float | None

    @property
    def wanted(self) -> Sequence[SampleRequest]:
        """What is asked for, one per prompt."""


class RolloutRequest(BaseModel):
    """The body of `POST /rollouts`. A field that is not here is an error: passed over, it would be a wish
    that nobody sees fail."""

    # `rollouts` may stand in place of `prompts`.
    model_config = ConfigDict(extra="forbid", json_schema_extra={"required": []})

    prompts: Prompts = Field(description="One text, texts, the token ids of one prompt, or of several.")
    rollouts: _Records = Field(
        default=None,
        description="In place of prompts: records, as they came from here, to go on with. The answer's"
        " prompt_index is the place among them.",
    )
    # Millions of entries may be wrong, too.
    sampling_params: dict[str, Any] | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        default=None,
        description="SGLang's names, `n` among them; one object for all prompts, or one per prompt.",
    )
    top_logprobs_p: Threshold = Field(
        default=None,
        description="The candidate sets' threshold, one for all prompts or one each; 0 or null: no sets.",
    )
    top_logprobs_source: _Source = Field(
        default=None,
        description="`sampler`: the sets are what the sampler could draw, in place of a threshold.",
    )
    on_abort: Literal["raise", "return", "resume"] = Field(
        default="raise",
        description="What becomes of a sample that the engine is told to abort: an error, a record with"
        " finish_reason `abort`, or it is gone on with.",
    )
    resumed_tokens: _Counts = Field(
        default=None,
        description="How many of the last ids of a prompt begin the answer, one for all or one each.",
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
        """What is asked for, one per prompt; `parse_request` fills it."""
        return self._wanted

    @property
    def given(self) -> dict[int, Rollout]:
        """What there is to go on with, by prompt index; `parse_request` fills it."""
        return self._given


def parse_request(body: bytes | bytearray, limits: Limits) -> RolloutRequest:
    """The request in a body.

    Raises:
        BadRequestError: 400, with a sentence that names the field, what it got and what it takes; 413
            where there are more samples than `limits.max_samples`.
        InvalidInputError: the same as 400, from the client's own checks.
    """
    request = read_body(body, RolloutRequest)
    if request.rollouts is not None and request.prompts is not None:
        raise BadRequestError("rollouts: got them and prompts, expected one of both", status=400)
    # Before they are laid out one by one: `n` may be any number.
    if (samples := _num_samples(request)) > limits.max_samples:
        raise BadRequestError(
            f"prompts x n: got {_cut(str(samples))} samples, expected at most {limits.max_samples};"
            " send them in several requests",
            status=413,
        )
    if request.request_id is not None:
        check_request_id(request.request_id)
    asked = request.sampling_params, request.top_logprobs_p, request.top_logprobs_source
    if request.rollouts is None:
        request._wanted = read_resumed_tokens(request.resumed_tokens, plan(request.prompts, *asked))
    else:
        if request.resumed_tokens is not None:
            raise InvalidInputError(
                "resumed_tokens: got it with rollouts, which tell it; expected one of both"
            )
        request._wanted, there = plan_resume(read_rollouts(request.rollouts), *asked)
        request._given = dict(enumerate(there))
        # As large as what was made of them.
        request.rollouts = None
    request._wanted = interruptible(request._wanted, request.on_abort)
    for one in request._wanted:
        custom = one.sampling_params.get("custom_params")
        if custom is not None and not isinstance(custom, dict):
            raise InvalidInputError("sampling_params.custom_params: expected an object")
        for name in ("top_logprobs_p", "top_logprobs_source"):
            if isinstance(custom, dict) and name in custom:
                raise InvalidInputError(
                    f"sampling_params.custom_params.{name}: got it here, where its sets would not reach"
                    f" the answer; expected {name} beside sampling_params"
                )
    return request


class AbortRequest(BaseModel):
    """The body of `POST /abort`: one of the two."""

    model_config = ConfigDict(extra="forbid")

    request_id: StrictStr | None = Field(
        default=None,
        description="As its caller named it in `POST /rollouts`, or as the engine's log shows it.",
    )
    all: StrictBool = Field(
        default=False, description="Everything that the engine has, whoever asked for it."
    )


def parse_abort(body: bytes | bytearray) -> AbortRequest:
    """The order in a body.

    Raises:
        BadRequestError: 400, with a sentence that names the field, what it got and what it takes.
        InvalidInputError: the same as 400, from the client's own check.
    """
    order = read_body(body, AbortRequest)
    if (order.request_id is None) != order.all:
        raise BadRequestError("request_id: got it and all, or neither; expected one of both", status=400)
    if order.request_id is not None:
        check_request_id(order.request_id)
    return order


def read_body(body: bytes | bytearray, kind: type[_Body]) -> _Body:
    """The fields in a body, of which the models check what is theirs to check.

    Raises:
        BadRequestError: 400, with a sentence that names the field, what it got and what it takes.
    """
    try:
        return kind.model_validate(_with_few_unknown(pydantic_core.from_json(body), kind))
    except ValidationError as error:
        raise BadRequestError(_sentence(error, kind), status=400) from None
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}", status=400) from None


def _with_few_unknown(given: Any, kind: type[BaseModel]) -> Any:
    """The fields that there are, and some of those that there are not."""
    if not isinstance(given, dict):
        return given
    known = kind.model_fields.keys()
    unknown = islice((name for name in given if name not in known), _MAX_UNKNOWN)
    return {name: given[name] for name in chain(known & given.keys(), unknown)}


def num_prompts(prompts: Any) -> int:
    """How many prompts a field holds, before they are looked at."""
    is_one = not isinstance(prompts, list) or (bool(prompts) and isinstance(prompts[0], int))
    return 1 if is_one else len(prompts)


def _num_samples(request: RolloutRequest) -> int:
    """The sum of `n` over the prompts, at least 1 each."""
    params = request.sampling_params
    if request.rollouts is not None:
        return len(request.rollouts) if isinstance(request.rollouts, list) else 1
    each = params if isinstance(params, list) else [params or {}] * num_prompts(request.prompts)
    return sum(max(n, 1) if isinstance(n := one.get("n"), int) else 1 for one in each)


def _sentence(error: ValidationError, kind: type[BaseModel]) -> str:
    """Every complaint, the field's name first."""
    sentences = []
    for problem in error.errors(include_url=False):
        field = ".".join(_cut(str(part)) for part in problem["loc"])
        if problem["type"] == "value_error":
            sentences.append(": ".join(filter(None, [field, str(problem["ctx"]["error"])])))
        elif problem["type"] == "missing":
            sentences.append(f"{field}: missing, it is required")
        elif problem["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields)
            sentences.append(f"{field}: no such field, expected one of {known}")
        else:
            message = problem["msg"][:1].lower() + problem["msg"][1:]
            sentences.append(f"{field or 'the body'}: got {_shown(problem['input'])}; {message}")
    return "; ".join(dict.fromkeys(sentences))


def _shown(value: Any) -> str:
    """A value in an error: short, however large it is."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return _cut(json.dumps(value))


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


# -- answers: the shapes that the OpenAPI page shows ------------------------------------------------


class Timing(BaseModel):
    """Seconds."""

    latency_s: float


class WeightSpan(BaseModel):
    """The tokens from `start` to before `end` came from these weights."""

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
        description="base64 of `sglang_topp.wire.pack`; null: none were asked for."
    )
    top_logprobs_source: str | None = Field(description="Which rule made them: distribution or sampler.")
    finish_reason: str
    weight_version: str
    weight_versions: list[WeightSpan] | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timing: Timing


class AbortAnswer(BaseModel):
    """The order was carried out, or there was nothing of that name."""

    status: str = "ok"


class RolloutsAnswer(BaseModel):
    """The answer without `stream`: prompt-major, sample-minor, every sample."""

    rollouts: list[RolloutRecord]


class ErrorDetail(BaseModel):
    """What went wrong; `type` is for programs, `message` for people."""

    type: str
    message: str


class ErrorAnswer(BaseModel):
    """Any answer that is an error."""

    error: ErrorDetail


class ModelInfo(BaseModel):
    """`Model`, as the engine reports it, and what follows from it."""

    vocab_size: int
    context_length: int
    max_token_chars: int
    max_text_chars: int = Field(description="Characters of the longest text that is taken as a prompt.")

    @classmethod
    def of(cls, model: Model) -> ModelInfo:
        """The same numbers."""
        return cls(**asdict(model), max_text_chars=model.max_text_chars)


class EngineInfo(BaseModel):
    """The engine behind the sidecar; null where it has not been seen."""

    model_path: str | None
    sglang_version: str | None
    weight_version: str | None
    model: ModelInfo | None


class PatchInfo(BaseModel):
    """Whether the engine runs the patch set; version and seams as it reports them, whatever that is."""

    active: bool
    version: Any
    seams: Any
    problems: list[str]


class LimitsInfo(BaseModel):
    """`Limits`, as they are in force."""

    max_in_flight: int
    max_samples: int
    max_body_bytes: int
    timeout_s: float
    max_stall_s: float
    max_held_bytes: int

    @classmethod
    def of(cls, limits: Limits) -> LimitsInfo:
        """The same numbers."""
        return cls(**asdict(limits))


class Info(BaseModel):
    """The answer of `/info`."""

    service: str = SERVICE
    version: str
    ready: bool
    reason: str = Field(description="Why it is not ready; empty where it is.")
    engine: EngineInfo
    patch: PatchInfo
    limits: LimitsInfo
