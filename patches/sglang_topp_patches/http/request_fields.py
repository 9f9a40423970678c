"""Check the patch set's request fields in the HTTP process, and pass them to the scheduler.

This module puts the request fields into `sampling_params.custom_params`, which SGLang sends to the scheduler.
If a caller's library passes on only sampling parameters, the caller may put the request fields into
`custom_params`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_topp.engine_contract.resumable_sampling_params import RESUMED
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.capabilities import request_problem
from sglang_topp_patches.hooks import Seam, after, around
from sglang_topp_patches.http import (
    model_limit_checks,
    prompt_token_ids_0_5_12,
    resume,
    route_policy,
    slime_fields,
)
from sglang_topp_patches.http.process_state import HttpProcess
from sglang_topp_patches.memory.budget import LIST_FORM_COST
from sglang_topp_patches.scheduler_messages import (
    AT_END,
    BASE64,
    DISTRIBUTION,
    FIELDS,
    KEY,
    NUCLEUS,
    SAMPLER,
    SOURCE,
    THRESHOLD,
    asking_field,
)

_ASKING = (THRESHOLD, SOURCE, NUCLEUS)
_CUSTOM = "sampling_params.custom_params."

__all__ = [
    "CALLED",
    "check_body",
    "extend_request_class",
    "get_item",
    "normalize",
]

CALLED = (
    Seam(
        "sglang.srt.managers.io_struct.GenerateReqInput",
        "Add the request fields to SGLang's request.",
        keywords=("text", "input_ids"),
    ),
)


def extend_request_class(cls: type[Any]) -> None:
    """Add the patch set's request fields to the dataclass `cls` (`GenerateReqInput`), in place.

    The decorator `dataclasses.dataclass` removes the `field(...)` objects from a class, and SGLang has
    already applied the decorator to `cls`. `extend_request_class` puts the `field(...)` objects back, and
    applies the decorator again. So `cls` keeps its keyword-only fields and default factories. Fields that
    `cls` inherits stay in the base classes.
    """
    for name, field in cls.__dataclass_fields__.items():
        if name in cls.__annotations__:
            setattr(cls, name, field)
    # The type of the fields is `Any`, because pydantic would silently coerce some invalid values to another
    # type. `check_body` refuses invalid values with a message.
    cls.__annotations__ |= dict.fromkeys((*FIELDS, RESUMED), Any)
    for name in (*FIELDS, RESUMED):
        setattr(cls, name, False if name in (BASE64, NUCLEUS) else None)
    if prompt_token_ids_0_5_12.FIELD not in cls.__dataclass_fields__:
        cls.__annotations__[prompt_token_ids_0_5_12.FIELD] = bool
        setattr(cls, prompt_token_ids_0_5_12.FIELD, False)
    # `dataclasses.dataclass` keeps an existing `__init__`, so delete the old `__init__` first.
    del cls.__init__
    dataclasses.dataclass(cls)


@after(
    "sglang.srt.entrypoints.api_contract.generate_contract_error",
    since="0.5.22",
    always=True,
    state=HttpProcess,
)
def check_body(process: HttpProcess, error: str | None, body: Any) -> str | None:
    """Return the message of an HTTP 400, or None.

    After a stream has begun with status 200, an error can no longer change the status. The hook
    `check_body` therefore checks the body before the stream begins.
    """
    if error is not None or not isinstance(body, Mapping):
        return error
    try:
        num_prompts = 1 if (count := model_limit_checks.num_prompts(body.get)) is None else count
        resume.check_fields(process, body.get, num_prompts)
        asked = _RequestedSets.of(process, body.get, num_prompts)
        if asked.any:
            process.check_request(body.get)
    except InvalidInputError as problem:
        return str(problem)
    return route_policy.misplaced(body)


@around("sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", state=HttpProcess)
def normalize(process: HttpProcess, original: Callable[[Any], None], self: Any) -> None:
    """Check the patch set's fields.

    `normalize` also puts the patch set's fields into the sampling parameters, which SGLang sends to the
    scheduler.
    """
    get = vars(self).get
    names = (*FIELDS, RESUMED, "input_ids", "sampling_params", "return_logprob")
    raw = {name: get(name) for name in (*names, "top_logprobs_num", "token_ids_logprob")}
    # Check the request before SGLang repeats the prompts `n` times.
    if _asks(raw.get):
        process.check_request(get)
    original(self)
    asked = _RequestedSets.of(process, raw.get, self.batch_size)
    if asked.any and (path := route_policy.path_without_sets.get()):
        raise InvalidInputError(f"{asked.field}: {path} cannot return candidate sets; ask /generate")
    if asked.any:
        process.check_room(is_streamed=bool(getattr(self, "stream", False)))
    resume.pass_to_scheduler(process, self, raw.get)
    if self.is_single:
        for name, values in asked.fields().items():
            setattr(self, name, values[0])
        if asked.wanted[0]:
            if isinstance(self.sampling_params, list):
                raise InvalidInputError("sampling_params: got a list for one prompt, expected an object")
            self.sampling_params = asked.to_scheduler(0, self.sampling_params)
        return
    # If n > 1, SGLang repeats the whole list of prompts n times.
    prompts = [i % self.batch_size for i in range(len(self.sampling_params))]
    for name, values in asked.fields().items():
        setattr(self, name, [values[i] for i in prompts])
    if asked.any:
        self.sampling_params = [
            asked.to_scheduler(i, params) if asked.wanted[i] else params
            for i, params in zip(prompts, self.sampling_params, strict=True)
        ]


@after("sglang.srt.managers.io_struct.GenerateReqInput.__getitem__")
def get_item(item: Any, self: Any, i: int) -> Any:
    """Copy the request fields that the patch set adds.

    `self` is a request with a list of prompts. `__getitem__` returns `item`, a request with one of the
    prompts. The hook copies each field from `self` to `item`. If a field's value is a list, the hook copies
    only the list's entry at index `i`.
    """
    for name in (*FIELDS, RESUMED):
        value = getattr(self, name)
        setattr(item, name, value[i] if isinstance(value, list) else value)
    if getattr(self, AT_END, False):
        setattr(item, AT_END, True)
    return item


@dataclasses.dataclass(frozen=True)
class _RequestedSets:
    """The kinds of candidate sets that a request asks for.

    Each attribute is a list with one entry per prompt.

    Attributes:
        thresholds: the nucleus threshold p of the sets, or None or 0 if the request has no threshold.
        sampler: whether each set consists of the tokens that the sampler could draw.
        base64: whether the answer has the sets as packed arrays.
        nucleus: whether the answer has the sets in the fields that the RL trainer slime reads. If so, the
            threshold is the prompt's `top_p`.
    """

    thresholds: Sequence[float | None]
    sampler: Sequence[bool]
    base64: Sequence[bool]
    nucleus: Sequence[bool]

    @property
    def wanted(self) -> list[bool]:
        """One bool per prompt: whether the request asks for candidate sets in the answer to the prompt."""
        return [bool(p) or drawn for p, drawn in zip(self.thresholds, self.sampler, strict=True)]

    @property
    def any(self) -> bool:
        return any(self.wanted)

    @property
    def field(self) -> str:
        """The name of the request field that asks for the sets. Error messages show the name."""
        if any(self.nucleus):
            return NUCLEUS
        return THRESHOLD if any(self.thresholds) else SOURCE

    def fields(self) -> dict[str, list[Any]]:
        """Return the patch set's request fields by name, each with one value per prompt."""
        sources = [SAMPLER if drawn else None for drawn in self.sampler]
        return {
            THRESHOLD: list(self.thresholds),
            SOURCE: sources,
            BASE64: list(self.base64),
            NUCLEUS: list(self.nucleus),
        }

    def to_scheduler(self, i: int, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """Return a prompt's sampling parameters with two additions: the patch set's fields, and `cost`.

        To charge its memory budget, the scheduler multiplies a request's number of candidates by `cost`. Only
        `to_scheduler` writes `cost` into a request's parameters. A request without `cost` must have bypassed
        the HTTP checks, so the scheduler refuses the request (`scheduler.refuse_unchecked_requests`).
        """
        custom = sampling_params.get("custom_params") or {}
        asked: dict[str, Any] = {NUCLEUS: True} if self.nucleus[i] else {}
        asked |= {SOURCE: SAMPLER} if self.sampler[i] else {THRESHOLD: self.thresholds[i]}
        cost = 1 if self.base64[i] else LIST_FORM_COST
        return {**sampling_params, "custom_params": {**custom, **asked, KEY: cost}}

    @classmethod
    def of(cls, process: HttpProcess, field: Callable[[str], Any], num_prompts: int) -> _RequestedSets:
        """Read and check the patch set's fields of one request.

        Args:
            process: the `HttpProcess` of this HTTP process.
            field: a function that returns the value of a request field by the field's name. The value is the
                one that the caller sent, before SGLang normalized the request, or None if the caller did not
                send the field.
            num_prompts: the number of prompts.

        Raises:
            InvalidInputError: a value is invalid. The error message names the field, the value, and the
                expected values.
        """
        thresholds = [
            _threshold(THRESHOLD, each) for each in _spread(THRESHOLD, field(THRESHOLD), num_prompts)
        ]
        sampler = [_is_sampler(SOURCE, each) for each in _spread(SOURCE, field(SOURCE), num_prompts)]
        flags = [_flag(BASE64, field(BASE64))] * num_prompts
        nucleus = [_flag(NUCLEUS, field(NUCLEUS))] * num_prompts

        given = field("sampling_params")
        params = given if isinstance(given, list) else [given] * num_prompts
        customs = [item.get("custom_params") if isinstance(item, Mapping) else None for item in params]
        is_used = any((*thresholds, *sampler, *nucleus)) or any(map(_mentions, customs))
        if is_used and len(params) != num_prompts:
            raise InvalidInputError(
                f"sampling_params: got {len(params)} for {num_prompts} prompts, expected one per prompt"
            )
        for i, custom in enumerate(customs[:num_prompts]):
            if not isinstance(custom, Mapping):
                if custom is not None and (thresholds[i] or sampler[i] or nucleus[i] or _mentions(custom)):
                    name = NUCLEUS if nucleus[i] else SOURCE if sampler[i] else THRESHOLD
                    raise InvalidInputError(
                        f"sampling_params.custom_params: got {custom!r}, expected an object:"
                        f" {name} goes to the scheduler in it"
                    )
                continue
            inner = _threshold(_CUSTOM + THRESHOLD, custom.get(THRESHOLD))
            if inner and thresholds[i] and inner != thresholds[i]:
                raise InvalidInputError(
                    f"{THRESHOLD}: got {thresholds[i]} and {inner} in sampling_params.custom_params;"
                    " expected it in one place, or the same in both"
                )
            thresholds[i] = inner or thresholds[i]
            is_sampler = _is_sampler(_CUSTOM + SOURCE, custom.get(SOURCE))
            if sampler[i] and custom.get(SOURCE) is not None and not is_sampler:
                raise InvalidInputError(
                    f"{SOURCE}: got {SAMPLER!r} and {custom[SOURCE]!r} in sampling_params.custom_params;"
                    " expected it in one place, or the same in both"
                )
            sampler[i] = sampler[i] or is_sampler
            flags[i] = flags[i] or _flag(_CUSTOM + BASE64, custom.get(BASE64, False))
            nucleus[i] = nucleus[i] or _flag(_CUSTOM + NUCLEUS, custom.get(NUCLEUS))
        for i in itertools.compress(range(num_prompts), nucleus):
            if thresholds[i] or sampler[i]:
                raise InvalidInputError(
                    f"{NUCLEUS}: got it with {SOURCE if sampler[i] else THRESHOLD}; expected one of them: it"
                    " is for slime, in whose fields the sets of top_p come"
                )
            thresholds[i], flags[i] = slime_fields.nucleus_threshold(params[i]), True
        if any(nucleus):
            slime_fields.check_request(field)
        asked = cls(thresholds, sampler, flags, nucleus)
        if asked.any:
            asked._check(process, params, field("return_logprob"))
        return asked

    def _check(self, process: HttpProcess, params: Sequence[Any], return_logprob: Any) -> None:
        """Raise InvalidInputError if this process cannot serve the requested sets."""
        if any(p and drawn for p, drawn in zip(self.thresholds, self.sampler, strict=True)):
            raise InvalidInputError(
                f"{SOURCE}: got {SAMPLER!r} and {THRESHOLD}; expected one of them: the sampler's sets follow"
                " the request's own top_k, top_p and min_p"
            )
        wanted, field = self.wanted, self.field
        logprobs = return_logprob if isinstance(return_logprob, list) else [return_logprob] * len(wanted)
        if not all(given for given, asks in zip(logprobs, wanted, strict=False) if asks):
            raise InvalidInputError(f"{field}: needs return_logprob to be true, got {return_logprob!r}")
        if any(isinstance(item, Mapping) and (item.get("beam_width") or 1) > 1 for item in params):
            raise InvalidInputError(f"{field}: beam search (beam_width > 1) has no candidate sets")
        for item, asks in zip(params, wanted, strict=False):
            given = item if asks and isinstance(item, Mapping) else {}
            if problem := request_problem(given.get("temperature")):
                raise InvalidInputError(f"sampling_params, with {field}: {problem}")
        problems = [*process.problems()]
        if any(self.sampler) and process.capabilities.sampler:
            problems.append(process.capabilities.sampler)
        if problems:
            raise InvalidInputError(f"{field}: candidate sets are not served here: {'; '.join(problems)}")


def _asks(field: Callable[[str], Any]) -> bool:
    """Return whether the request asks for candidate sets in any field, even with an invalid value."""
    given = field("sampling_params")
    params = given if isinstance(given, list) else [given]
    customs = [item.get("custom_params") for item in params if isinstance(item, Mapping)]
    places = [field, *(custom.get for custom in customs if isinstance(custom, Mapping))]
    given_values = [(name, get(name)) for get in places for name in _ASKING]
    return any(
        asking_field({name: one}.get)
        for name, value in given_values
        for one in (value if isinstance(value, list) else [value])
    )


def _mentions(custom: Any) -> bool:
    """Return whether `custom_params` contains the name of a field that asks for sets.

    If `custom_params` is a mapping, only its keys count. Otherwise, the name may occur anywhere in the value.
    """
    if isinstance(custom, Mapping):
        return any(name in custom for name in _ASKING)
    try:
        text = json.dumps(custom, default=str)
    except RecursionError:
        return True
    return any(name in text for name in _ASKING)


def _spread(name: str, value: Any, num_prompts: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidInputError(
            f"{name}: got {len(value)} values for {num_prompts} prompts, expected one per prompt"
        )
    return value


def _threshold(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or math.isnan(value)
        or not 0 <= value <= 1
    ):
        raise InvalidInputError(
            f"{name}: got {value!r}, expected a number p with 0 < p <= 1, or null or 0 for no candidate sets"
        )
    return float(value)


def _is_sampler(name: str, value: Any) -> bool:
    if value not in (None, DISTRIBUTION, SAMPLER):
        raise InvalidInputError(f"{name}: got {value!r}, expected {DISTRIBUTION!r} or {SAMPLER!r}")
    return bool(value == SAMPLER)


def _flag(name: str, value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}: got {value!r}, expected true or false")
    return value
