"""The request side, in the HTTP process: the fields, their checks, and the way to the scheduler.

What is asked reaches the scheduler inside `sampling_params.custom_params`, which SGLang already carries;
callers that can only set those may write the same names there themselves.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_topp.errors import InvalidInputError
from sglang_topp.resumable import RESUMED
from sglang_topp_patches import model, prompt_ids, resumed, routes
from sglang_topp_patches.budget import LIST_FORM_COST
from sglang_topp_patches.mode import refusals, source_refusals, temperature_refusal
from sglang_topp_patches.payload import (
    AT_END,
    BASE64,
    DISTRIBUTION,
    FIELDS,
    KEY,
    SAMPLER,
    SOURCE,
    THRESHOLD,
    asking_field,
)
from sglang_topp_patches.seams import status

_CUSTOM = "sampling_params.custom_params."

__all__ = [
    "check_body",
    "extend_request_class",
    "get_item",
    "normalize",
]


def extend_request_class(cls: type[Any]) -> None:
    """Give the dataclass `cls` (`GenerateReqInput`) the fields, in place.

    `dataclasses.dataclass` replaces each `field(...)` by its default; they are put back first, so
    that keyword-only fields and default factories survive the second pass. Those of a base class stay there.
    """
    for name, field in cls.__dataclass_fields__.items():
        if name in cls.__annotations__:
            setattr(cls, name, field)
    # `Any`: `check_body` answers bad input in words; pydantic would coerce some of it in silence.
    cls.__annotations__ |= dict.fromkeys((*FIELDS, RESUMED), Any)
    for name in (*FIELDS, RESUMED):
        setattr(cls, name, False if name == BASE64 else None)
    if prompt_ids.FIELD not in cls.__dataclass_fields__:
        cls.__annotations__[prompt_ids.FIELD] = bool
        setattr(cls, prompt_ids.FIELD, False)
    # `dataclasses.dataclass` leaves an `__init__` alone that is there already.
    del cls.__init__
    dataclasses.dataclass(cls)


def check_body(error: str | None, body: Any) -> str | None:
    """AFTER hook on `generate_contract_error`: the sentence for HTTP 400, or None.

    The only check that can still answer with a status: a streaming request's later errors arrive
    inside a 200.
    """
    if error is not None or not isinstance(body, Mapping):
        return error
    try:
        num_prompts = 1 if (count := model.num_prompts(body.get)) is None else count
        resumed.check_fields(body.get, num_prompts)
        asked = _Asked.of(body.get, num_prompts)
        if asked.any:
            model.check_request(body.get)
    except InvalidInputError as problem:
        return str(problem)
    return routes.misplaced(body)


def normalize(original: Callable[[Any], None], self: Any) -> None:
    """AROUND hook on `GenerateReqInput.normalize_batch_and_arguments`."""
    get = vars(self).get
    names = (*FIELDS, RESUMED, "input_ids", "sampling_params", "return_logprob")
    raw = {name: get(name) for name in names}
    # Before SGLang repeats the prompts `n` times.
    if _asks(raw.get):
        model.check_request(get)
    original(self)
    asked = _Asked.of(raw.get, self.batch_size)
    if asked.any and (path := routes.path_without_sets.get()):
        raise InvalidInputError(f"{asked.field}: {path} cannot return candidate sets; ask /generate")
    resumed.spread(self, raw.get)
    if self.is_single:
        for name, values in asked.fields().items():
            setattr(self, name, values[0])
        if asked.wanted[0]:
            if isinstance(self.sampling_params, list):
                raise InvalidInputError("sampling_params: got a list for one prompt, expected an object")
            self.sampling_params = asked.to_scheduler(0, self.sampling_params)
        return
    # With n > 1 SGLang repeats the whole list of prompts.
    prompts = [i % self.batch_size for i in range(len(self.sampling_params))]
    for name, values in asked.fields().items():
        setattr(self, name, [values[i] for i in prompts])
    if asked.any:
        self.sampling_params = [
            asked.to_scheduler(i, params) if asked.wanted[i] else params
            for i, params in zip(prompts, self.sampling_params, strict=True)
        ]


def get_item(item: Any, self: Any, i: int) -> Any:
    """AFTER hook on `GenerateReqInput.__getitem__`: the part keeps its own fields."""
    for name in (*FIELDS, RESUMED):
        value = getattr(self, name)
        setattr(item, name, value[i] if isinstance(value, list) else value)
    if getattr(self, AT_END, False):
        setattr(item, AT_END, True)
    return item


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a request asks for, one entry per prompt."""

    thresholds: Sequence[float | None]  # None or 0 is off
    sampler: Sequence[bool]  # whether the sets are those that the sampler could draw
    base64: Sequence[bool]

    @property
    def wanted(self) -> list[bool]:
        """Whether sets are asked for."""
        return [bool(p) or drawn for p, drawn in zip(self.thresholds, self.sampler, strict=True)]

    @property
    def any(self) -> bool:
        return any(self.wanted)

    @property
    def field(self) -> str:
        """The field that messages name."""
        return THRESHOLD if any(self.thresholds) else SOURCE

    def fields(self) -> dict[str, list[Any]]:
        """The request's own fields, one value per prompt."""
        sources = [SAMPLER if drawn else None for drawn in self.sampler]
        return {THRESHOLD: list(self.thresholds), SOURCE: sources, BASE64: list(self.base64)}

    def to_scheduler(self, i: int, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """A prompt's sampling parameters with what is asked, and what one candidate costs (`budget.charge`).

        The latter also shows there that the request came through these checks (`admission`).
        """
        custom = sampling_params.get("custom_params") or {}
        asked = {SOURCE: SAMPLER} if self.sampler[i] else {THRESHOLD: self.thresholds[i]}
        cost = 1 if self.base64[i] else LIST_FORM_COST
        return {**sampling_params, "custom_params": {**custom, **asked, KEY: cost}}

    @classmethod
    def of(cls, field: Callable[[str], Any], num_prompts: int) -> _Asked:
        """Check the fields of one request.

        Args:
            field: looks one of the request's fields up, as it came; None where it is not there.
            num_prompts: the number of prompts.

        Raises:
            InvalidInputError: a sentence naming the field, what it got and what it takes.
        """
        thresholds = [
            _threshold(THRESHOLD, each) for each in _spread(THRESHOLD, field(THRESHOLD), num_prompts)
        ]
        sampler = [_is_sampler(SOURCE, each) for each in _spread(SOURCE, field(SOURCE), num_prompts)]
        flags = [_flag(BASE64, field(BASE64))] * num_prompts

        given = field("sampling_params")
        params = given if isinstance(given, list) else [given] * num_prompts
        customs = [item.get("custom_params") if isinstance(item, Mapping) else None for item in params]
        is_used = any(thresholds) or any(sampler) or any(map(_mentions, customs))
        if is_used and len(params) != num_prompts:
            raise InvalidInputError(
                f"sampling_params: got {len(params)} for {num_prompts} prompts, expected one per prompt"
            )
        for i, custom in enumerate(customs[:num_prompts]):
            if not isinstance(custom, Mapping):
                if custom is not None and (thresholds[i] or sampler[i] or _mentions(custom)):
                    raise InvalidInputError(
                        f"sampling_params.custom_params: got {custom!r}, expected an object:"
                        f" {SOURCE if sampler[i] else THRESHOLD} goes to the scheduler in it"
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
        asked = cls(thresholds, sampler, flags)
        if asked.any:
            asked._check(params, field("return_logprob"))
        return asked

    def _check(self, params: Sequence[Any], return_logprob: Any) -> None:
        """Raise where what is asked for cannot be had."""
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
            if asks and isinstance(item, Mapping) and (why := temperature_refusal(item.get("temperature"))):
                raise InvalidInputError(f"sampling_params.temperature, with {field}: {why}")
        problems = [*status().problems, *refusals(), *routes.refusals()]
        if any(self.sampler):
            problems += source_refusals()
        if problems:
            raise InvalidInputError(f"{field}: candidate sets are not served here: {'; '.join(problems)}")


def _asks(field: Callable[[str], Any]) -> bool:
    """Whether candidate sets are asked for anywhere, right or wrong."""
    given = field("sampling_params")
    params = given if isinstance(given, list) else [given]
    customs = [item.get("custom_params") for item in params if isinstance(item, Mapping)]
    places = [field, *(custom.get for custom in customs if isinstance(custom, Mapping))]
    given_values = [(name, get(name)) for get in places for name in (THRESHOLD, SOURCE)]
    return any(
        asking_field({name: one}.get)
        for name, value in given_values
        for one in (value if isinstance(value, list) else [value])
    )


def _mentions(custom: Any) -> bool:
    """Whether the name of a field that asks stands anywhere in `custom_params`."""
    if isinstance(custom, Mapping):
        return THRESHOLD in custom or SOURCE in custom
    try:
        text = json.dumps(custom, default=str)
    except RecursionError:
        return True
    return THRESHOLD in text or SOURCE in text


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
