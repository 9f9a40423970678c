"""Pydantic models of the bodies of `POST /rollouts`, `/scores`, and `/abort`, and their parsers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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

from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import BadRequestError, InvalidInputError, WireError, describe
from sglang_topp_client.argument_checks import MAX_REQUEST_ID, check_request_id, truncate
from sglang_topp_client.requests import SampleRequest, ScoreRequest, plan, plan_scores
from sglang_topp_client.resume import mark_interruptible, plan_resume
from sglang_topp_client.rollout import DISTRIBUTION, SAMPLER, Rollout
from sglang_topp_client.wire.records import from_record
from sglang_topp_server.settings import Limits

__all__ = [
    "AbortBody",
    "RolloutsBody",
    "SampleBody",
    "ScoresBody",
    "parse_abort",
    "parse_rollouts",
    "parse_scores",
]

# Fields that may hold millions of ids have the type `Any`, so that Pydantic does not check each element.
# `sglang_topp_client.requests` checks the elements, and names the invalid prompt in its error.
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}


_TEXTS_OR_IDS = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    _TOKEN_IDS,
    {"type": "array", "items": _TOKEN_IDS},
]


_MESSAGES = {"type": "array", "items": {"type": "object", "required": ["role"]}}


Prompts: TypeAlias = Annotated[
    Any, WithJsonSchema({"anyOf": [*_TEXTS_OR_IDS, _MESSAGES, {"type": "array", "items": _MESSAGES}]})
]


Sequences: TypeAlias = Annotated[Any, WithJsonSchema({"anyOf": _TEXTS_OR_IDS})]


def _one_or_each(item: dict[str, Any]) -> WithJsonSchema:
    """Return the schema of a field with one value for all prompts, or a list with one value per prompt."""
    each = {"type": "array", "items": {"anyOf": [item, {"type": "null"}]}}
    return WithJsonSchema({"anyOf": [item, each, {"type": "null"}]})


Threshold: TypeAlias = Annotated[Any, _one_or_each({"type": "number", "minimum": 0, "maximum": 1})]


Source: TypeAlias = Annotated[Any, _one_or_each({"type": "string", "enum": [DISTRIBUTION, SAMPLER]})]


Counts: TypeAlias = Annotated[Any, _one_or_each({"type": "integer", "minimum": 0})]


Start: TypeAlias = Annotated[Any, _one_or_each({"type": "integer", "minimum": 1})]


Records: TypeAlias = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]})
]


Stream: TypeAlias = Annotated[
    StrictBool, Field(description="Send one message per sample as it finishes, instead of one JSON object.")
]


RequestId: TypeAlias = Annotated[
    StrictStr | None,
    Field(
        description="The prefix of the request's ids in the engine's log: printable, at most"
        f" {MAX_REQUEST_ID} characters."
    ),
]


TimeoutS: TypeAlias = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None,
    Field(description="Seconds after which the samples are aborted with a 504. The server also has a limit."),
]


class SampleBody(Protocol):
    """The fields that the bodies of `POST /rollouts` and `POST /scores` share."""

    stream: bool
    request_id: str | None
    timeout_s: float | None

    @property
    def wanted(self) -> Sequence[SampleRequest]:
        """One `SampleRequest` for each prompt, or for each sequence to score."""


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


def read_rollouts(given: Any) -> list[Rollout]:
    """Decode the JSON records in the body's `rollouts` field into `Rollout` objects.

    Raises:
        InvalidInputError: a record is not a valid rollout; the error names the record's index and field.
    """
    if not isinstance(given, list):
        raise InvalidInputError(f"rollouts: got {type(given).__name__}, expected a list of records")
    rollouts = []
    for i, record in enumerate(given):
        try:
            rollouts.append(from_record(Rollout, record, may_be_extended=True))
        except WireError as error:
            raise InvalidInputError(f"rollouts[{i}].{error.field}: {error.problem}") from None
        except InvalidInputError as error:
            raise InvalidInputError(f"rollouts[{i}].{error}") from None
    return rollouts


def read_resumed_tokens(given: Any, wanted: Sequence[SampleRequest]) -> list[SampleRequest]:
    """Return a copy of each `SampleRequest` in `wanted`, with its `resumed_tokens` set from `given`.

    `resumed_tokens` is the number of token ids at a prompt's end that belong to an earlier answer.

    Args:
        given: the body's `resumed_tokens`, which is one number for all requests, or a list with one number
            per request. If `given` is None, the function returns the requests unchanged.
        wanted: one `SampleRequest` per prompt.

    Raises:
        InvalidInputError: `given` has the wrong number of values, a value is not an integer of 0 or more, or
            a value exceeds the number of token ids in the request's prompt. A prompt that is a text or a list
            of chat messages counts as 0 token ids.
    """
    if given is None:
        return list(wanted)
    counts = given if isinstance(given, list) else [given] * len(wanted)
    if len(counts) != len(wanted):
        raise InvalidInputError(f"{RESUMED}: got {len(counts)} values for {len(wanted)} prompts")
    for count, one in zip(counts, wanted, strict=True):
        if count is not None and (type(count) is not int or count < 0):
            raise InvalidInputError(f"{RESUMED}: got {describe(count)}, expected a whole number of 0 or more")
        if count and (not isinstance(one.prompt, list) or count > len(one.prompt)):
            prompt = {str: "a text", tuple: "chat messages"}.get(type(one.prompt), f"{len(one.prompt)} ids")
            raise InvalidInputError(
                f"{RESUMED}: got {describe(count)} with {prompt} as prompt {one.prompt_index}, expected token"
                " ids that end with this many tokens of the answer"
            )
    return [replace(one, resumed_tokens=count) for count, one in zip(counts, wanted, strict=True)]


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


class AbortBody(BaseModel):
    """The body of `POST /abort`. A body must set exactly one of `request_id` and `all`."""

    model_config = ConfigDict(extra="forbid")

    request_id: StrictStr | None = Field(
        default=None,
        description="The request's `request_id` in `POST /rollouts`, or its id in the engine's log.",
    )
    all: StrictBool = Field(default=False, description="Abort all requests in the engine, of all callers.")


def parse_abort(body: bytes | bytearray) -> AbortBody:
    """Parse and check the body of `POST /abort`.

    Raises:
        BadRequestError, InvalidInputError: the body is invalid (400). The message names the field, the
            value, and the accepted values.
    """
    order = read_body(body, AbortBody)
    if (order.request_id is None) != order.all:
        raise BadRequestError(
            "request_id: got both request_id and all, or neither; expected exactly one", status=400
        )
    if order.request_id is not None:
        check_request_id(order.request_id)
    return order


_Body = TypeVar("_Body", bound=BaseModel)


# An error names at most this many unknown fields, because a body may hold millions of unknown fields.
_MAX_UNKNOWN = 4


_MAX_NAME_CHARS = 60


def read_body(body: bytes | bytearray, kind: type[_Body]) -> _Body:
    """Parse a JSON request body into the Pydantic model `kind`, which checks the fields' types.

    Raises:
        BadRequestError: the body is invalid (400). The message names the field, the value, and the accepted
            values.
    """
    try:
        return kind.model_validate(_with_few_unknown(pydantic_core.from_json(body), kind))
    except ValidationError as error:
        raise BadRequestError(_sentence(error, kind), status=400) from None
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}", status=400) from None


def _with_few_unknown(given: Any, kind: type[BaseModel]) -> Any:
    """Return the known fields of a body, and at most `_MAX_UNKNOWN` of its unknown fields."""
    if not isinstance(given, dict):
        return given
    known = kind.model_fields.keys()
    unknown = islice((name for name in given if name not in known), _MAX_UNKNOWN)
    return {name: given[name] for name in chain(known & given.keys(), unknown)}


def num_prompts(prompts: Any) -> int:
    """Return the number of prompts in a body's unchecked `prompts` or `sequences` field."""
    is_one = not isinstance(prompts, list) or (bool(prompts) and isinstance(prompts[0], int | dict))
    return 1 if is_one else len(prompts)


def _sentence(error: ValidationError, kind: type[BaseModel]) -> str:
    """Return an error message that lists every validation error with the name of its field."""
    sentences = []
    for problem in error.errors(include_url=False):
        field = ".".join(truncate(str(part), _MAX_NAME_CHARS) for part in problem["loc"])
        if problem["type"] == "value_error":
            sentences.append(": ".join(filter(None, [field, str(problem["ctx"]["error"])])))
        elif problem["type"] == "missing":
            sentences.append(f"{field}: missing, but required")
        elif problem["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields)
            sentences.append(f"{field}: no such field, expected one of {known}")
        else:
            message = problem["msg"][:1].lower() + problem["msg"][1:]
            sentences.append(f"{field or 'the body'}: got {describe(problem['input'])}; {message}")
    return "; ".join(dict.fromkeys(sentences))
