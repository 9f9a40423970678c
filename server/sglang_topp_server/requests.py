"""The bodies of `POST /rollouts`, `/scores`, and `/abort`: their fields, their parsers, and their checks.

`SampleCall.check` refuses what would crash or block the engine, by the sizes of its model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from msgspec import UNSET, Meta, Struct

from sglang_topp.engine_contract import (
    GRAMMARS,
    RESUMED,
    Model,
    check_sampling_params,
    check_token_ids,
    overlong_param,
    overlong_text,
)
from sglang_topp.errors import BadRequestError, InvalidInputError, WireError, describe
from sglang_topp_client.requests import (
    SampleRequest,
    build_resume_requests,
    build_sample_requests,
    build_score_requests,
    one_each,
)
from sglang_topp_client.rollout import DISTRIBUTION, SAMPLER, ReturnField, Rollout
from sglang_topp_client.value_checks import check_request_id, decode_json
from sglang_topp_client.wire.records import from_record
from sglang_topp_server.settings import Limits


def _schema(*forms: dict[str, Any]) -> Meta:
    return Meta(extra_json_schema={"anyOf": list(forms)})


def _one_or_each(item: dict[str, Any]) -> Meta:
    """Return the schema of a field with one value for all prompts, or a list with one value per prompt."""
    return _schema(item, _list_of({"anyOf": [item, _NULL]}), _NULL)


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


# `sglang_topp_client.requests` checks the fields of type `Any`, which may hold millions of ids, and names the
# invalid prompt in its error.
_NULL, _TEXT = {"type": "null"}, {"type": "string"}
_TOKEN_IDS = _list_of({"type": "integer", "minimum": 0})
_MESSAGES = _list_of({"type": "object", "required": ["role"]})
_TEXTS_OR_IDS = [_TEXT, _list_of(_TEXT), _TOKEN_IDS, _list_of(_TOKEN_IDS)]
_Threshold: TypeAlias = Annotated[Any, _one_or_each({"type": "number", "minimum": 0, "maximum": 1})]


class _SampleBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that the bodies of `POST /rollouts` and `POST /scores` share."""

    top_logprobs_p: _Threshold = None
    """The threshold of the sets, one for all prompts or sequences, or one each; 0 or null: no sets."""
    stream: bool = False
    """Send one message per sample as it finishes, instead of one JSON object."""
    request_id: str | None = None
    """The prefix of the request's ids in the engine's log: printable, at most 512 characters."""
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds after which the samples are aborted with a 504."""


class RolloutsBody(_SampleBody, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /rollouts`. Unknown fields are errors, because ignoring them would hide mistakes."""

    prompts: Annotated[Any, _schema(*_TEXTS_OR_IDS, _MESSAGES, _list_of(_MESSAGES))] = UNSET
    """One text, texts, the token ids of one prompt or of several, or the chat messages of one prompt or of
    several; the engine applies its chat template to messages."""
    rollouts: list[dict[str, Any]] | None = None
    """Replaces prompts: records of an earlier answer to continue. The answer's prompt_index is the index in
    this list."""
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    """SGLang's names, including `n`; one object for all prompts, or one per prompt."""
    top_logprobs_source: Annotated[Any, _one_or_each(_TEXT | {"enum": [DISTRIBUTION, SAMPLER]})] = None
    """`sampler`: return the tokens that the sampler could draw, without a threshold."""
    on_abort: Literal["raise", "return", "resume"] = "raise"
    """How to treat a sample that an abort, a pause, or a weight update ends: report an error, return a record
    with finish_reason `abort`, or continue the sample."""
    resumed_tokens: Annotated[Any, _one_or_each({"type": "integer", "minimum": 0})] = None
    """How many of the last ids of a prompt belong to the answer, one for all or one each."""
    return_fields: list[ReturnField] | None = None
    """What else to return of each token, in `token_fields`. Every prompt must ask for sets."""
    fields_start: Annotated[Any, _one_or_each({"type": "integer", "minimum": 0})] = None
    """The first position of prompt and answer whose `return_fields` to return, one for all or one each."""


class ScoresBody(_SampleBody, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /scores`. Scoring uses no sampler, so it has no `top_logprobs_source`."""

    sequences: Annotated[Any, _schema(*_TEXTS_OR_IDS)]
    """One text, texts, the token ids of one sequence, or of several."""
    start: Annotated[Any, _one_or_each({"type": "integer", "minimum": 1})] = None
    """The first scored position, one for all or one each; null means 1. The token at position 0 has no
    distribution."""


class AbortBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /abort`. A body must set exactly one of `request_id` and `all`."""

    request_id: str | None = None
    """The request's `request_id` in `POST /rollouts`, or its id in the engine's log."""
    all: bool = False
    """Abort all requests in the engine, of all callers."""


@dataclass(frozen=True)
class SampleCall:
    """A parsed request for samples or scores.

    Attributes:
        body: the request's body.
        wanted: one `SampleRequest` for each prompt, or one `ScoreRequest` for each sequence.
        given: the rollouts to resume, by prompt index.
    """

    body: RolloutsBody | ScoresBody
    wanted: Sequence[SampleRequest]
    given: dict[int, Rollout] = field(default_factory=dict)

    def check(self, model: Model, survives_grammars: bool) -> None:
        """Check that the request would not crash or block the engine.

        Args:
            model: the vocabulary size and other sizes of the engine's model.
            survives_grammars: whether the engine survives a grammar that forbids every next token. If not,
                every request with a grammar is refused: no check can tell in advance whether a grammar will
                forbid every next token.

        Raises:
            InvalidInputError: a value would crash the engine (HTTP status 400). The error's message names
                the field, the value, and the accepted values.
            BadRequestError: a text is too long (HTTP status 413). Other requests would have to wait while
                the engine tokenizes the long text.
        """
        for i, rollout in self.given.items():
            check_token_ids(f"rollouts[{i}].prompt_ids", rollout.prompt_ids, model.vocab_size)
            check_token_ids(f"rollouts[{i}].output_ids", rollout.output_ids, model.vocab_size)
        if isinstance(self.body, ScoresBody):
            return self._check_prompts("sequences", self.body.sequences, model)
        self._check_prompts("prompts", self.body.prompts, model)
        params = self.body.sampling_params or {}
        if isinstance(params, list):
            checked: dict[str, Any] = {f"sampling_params[{i}]": one for i, one in enumerate(params)}
        else:
            checked = {"sampling_params": params}
        # A rollout is continued with the parameters of its record, as far as these do not change them.
        checked |= {f"rollouts[{i}].sampling_params": self.wanted[i].sampling_params for i in self.given}
        for name, given in checked.items():
            _refuse_long(overlong_param(name, given))
            check_sampling_params(name, given, model)
            if not survives_grammars and (key := next((key for key in GRAMMARS if given.get(key)), None)):
                raise InvalidInputError(
                    f"{name}.{key}: got one, expected none: a grammar that leaves no token to draw would end"
                    " this engine; start it with SGLANG_SANITIZE_NAN_LOGITS=1, as `sglang-topp serve` does"
                )

    def _check_prompts(self, name: str, given: Any, model: Model) -> None:
        """Check each new prompt. `name` is the field that holds the prompts, and `given` is its value."""
        for one in self.wanted:
            if one.prompt_index in self.given:
                continue
            at = name if _is_one_prompt(given) else f"{name}[{one.prompt_index}]"
            if isinstance(one.prompt, str):
                _refuse_long(overlong_text(at, one.prompt, model))
            elif isinstance(one.prompt, tuple):
                _refuse_long(overlong_text(at, json.dumps(one.prompt, ensure_ascii=False), model))
            else:
                check_token_ids(at, one.prompt, model.vocab_size)


def parse_rollouts(body: bytes | bytearray, limits: Limits) -> SampleCall:
    """Parse and check the body of `POST /rollouts`.

    Raises:
        BadRequestError, InvalidInputError: the body is invalid (400), or has more samples than
            `limits.max_samples` (413). The message names the field, the value, and the accepted values.
    """
    given = _read_body(body, RolloutsBody)
    if given.prompts is UNSET and given.rollouts is None:
        raise BadRequestError("prompts: missing, but required", status=400)
    if given.prompts not in (UNSET, None) and given.rollouts is not None:
        raise BadRequestError("rollouts: got rollouts and prompts, expected one of them", status=400)
    # Check the number of samples before the requests are built, because `n` may be huge.
    if (samples := _num_samples(given)) > limits.max_samples:
        raise BadRequestError(
            f"prompts x n: got {describe(samples)}, expected at most {limits.max_samples} samples; send them"
            " in several requests",
            status=413,
        )
    options = given.sampling_params, given.top_logprobs_p, given.top_logprobs_source
    resumed: list[Rollout] = []
    if given.rollouts is None:
        wanted = build_sample_requests(given.prompts, *options, given.return_fields, given.on_abort)
        wanted = _with_counts(wanted, given.resumed_tokens, given.fields_start)
    else:
        for name in (RESUMED, "fields_start"):
            if getattr(given, name) is not None:
                raise InvalidInputError(
                    f"{name}: got {name} and rollouts, which imply it; expected one of them"
                )
        wanted, resumed = build_resume_requests(
            _read_rollouts(given.rollouts), *options, given.return_fields, given.on_abort
        )
        # Free the JSON records, which take as much memory as the parsed rollouts.
        given.rollouts = None
    for one in wanted:
        custom = one.sampling_params.get("custom_params")
        if custom is not None and not isinstance(custom, dict):
            raise InvalidInputError("sampling_params.custom_params: expected an object")
        for name in ("top_logprobs_p", "top_logprobs_source"):
            if isinstance(custom, dict) and name in custom:
                raise InvalidInputError(
                    f"sampling_params.custom_params.{name}: got a value here, where its sets would not reach"
                    f" the answer; expected {name} as a field beside sampling_params"
                )
    return SampleCall(given, wanted, dict(enumerate(resumed)))


def parse_scores(body: bytes | bytearray, limits: Limits) -> SampleCall:
    """Parse and check the body of `POST /scores`.

    Raises:
        BadRequestError, InvalidInputError: the body is invalid (400), or has more sequences than
            `limits.max_samples` (413). The message names the field, the value, and the accepted values.
    """
    given = _read_body(body, ScoresBody)
    # Check the number of sequences, which may be millions, before a request is built for each.
    if (count := _num_prompts(given.sequences)) > limits.max_samples:
        raise BadRequestError(
            f"sequences: got {count}, expected at most {limits.max_samples}; send them in several requests",
            status=413,
        )
    return SampleCall(given, build_score_requests(given.sequences, given.top_logprobs_p, given.start))


def parse_abort(body: bytes | bytearray) -> AbortBody:
    """Parse and check the body of `POST /abort`.

    Raises:
        BadRequestError, InvalidInputError: the body is invalid (400). The message names the field, the
            value, and the accepted values.
    """
    given = _read_body(body, AbortBody)
    if (given.request_id is None) != given.all:
        raise BadRequestError(
            "request_id: got both request_id and all, or neither; expected exactly one", status=400
        )
    return given


_AnyBody = TypeVar("_AnyBody", RolloutsBody, ScoresBody, AbortBody)


def _read_body(body: bytes | bytearray, kind: type[_AnyBody]) -> _AnyBody:
    try:
        given = decode_json(body, kind, field="the body")
    except WireError as error:
        raise BadRequestError(str(error), status=400) from None
    if given.request_id is not None:
        check_request_id(given.request_id)
    return given


def _is_one_prompt(prompts: Any) -> bool:
    """Return whether an unchecked `prompts` or `sequences` field holds one prompt rather than a list."""
    return not isinstance(prompts, list) or (bool(prompts) and isinstance(prompts[0], int | dict))


def _num_prompts(prompts: Any) -> int:
    return 1 if _is_one_prompt(prompts) else len(prompts)


def _refuse_long(sentence: str | None) -> None:
    if sentence is not None:
        raise BadRequestError(sentence, status=413)


def _num_samples(given: RolloutsBody) -> int:
    """Return how many samples are requested: one per rollout, or the sum of `n` over the prompts.

    A missing or invalid `n` counts as 1.
    """
    if given.rollouts is not None:
        return len(given.rollouts)
    params = given.sampling_params
    each = params if isinstance(params, list) else [params or {}] * _num_prompts(given.prompts)
    return sum(max(n, 1) if isinstance(n := one.get("n"), int) else 1 for one in each)


def _read_rollouts(records: list[dict[str, Any]]) -> list[Rollout]:
    rollouts = []
    for i, record in enumerate(records):
        try:
            rollouts.append(from_record(Rollout, record, may_be_extended=True))
        except (WireError, InvalidInputError) as error:
            raise InvalidInputError(f"rollouts[{i}].{error}") from None
    return rollouts


def _with_counts(wanted: Sequence[SampleRequest], resumed: Any, starts: Any) -> list[SampleRequest]:
    """Return the requests, each with its values of the body's `resumed_tokens` and `fields_start`.

    Raises:
        InvalidInputError: there is a wrong number of values, or a value is not a number from 0 to the number
            of token ids in the request's prompt. A text or chat messages count as 0 token ids.
    """

    def count(name: str, value: Any) -> int | None:
        if value is not None and (type(value) is not int or value < 0):
            raise InvalidInputError(f"{name}: got {describe(value)}, expected a whole number of 0 or more")
        return value

    fields = {RESUMED: resumed, "fields_start": starts}
    counts = {name: one_each(name, given, len(wanted), count) for name, given in fields.items()}
    for name, numbers in counts.items():
        for one, number in zip(wanted, numbers, strict=True):
            if number and (not isinstance(one.prompt, list) or number > len(one.prompt)):
                prompt = {str: "a text", tuple: "chat messages"}.get(
                    type(one.prompt), f"{len(one.prompt)} ids"
                )
                raise InvalidInputError(
                    f"{name}: got {describe(number)} with {prompt} as prompt {one.prompt_index}, expected"
                    " token ids of which that many may belong to the answer"
                )
    return [
        replace(one, resumed_tokens=one.resumed_tokens if number is None else number, fields_start=start or 0)
        for one, number, start in zip(wanted, *counts.values(), strict=True)
    ]
