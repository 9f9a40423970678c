"""The request side, in the HTTP process: the two fields, their checks, and the way to the scheduler.

A threshold reaches the scheduler inside `sampling_params.custom_params`, which SGLang already carries;
callers that can only set those may write the same two names there themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_topp.errors import InvalidInputError
from sglang_topp_patches import model, routes
from sglang_topp_patches.budget import LIST_FORM_COST
from sglang_topp_patches.mode import refusals, temperature_refusal
from sglang_topp_patches.payload import AT_END, BASE64, FIELDS, KEY, THRESHOLD
from sglang_topp_patches.seams import status

__all__ = [
    "check_body",
    "extend_request_class",
    "get_item",
    "normalize",
]


def extend_request_class(cls: type[Any]) -> None:
    """Give the dataclass `cls` (`GenerateReqInput`) the two fields, in place.

    `dataclasses.dataclass` replaces each `field(...)` by its default; they are put back first, so
    that keyword-only fields and default factories survive the second pass.
    """
    for name, field in cls.__dataclass_fields__.items():
        setattr(cls, name, field)
    # `Any`: `check_body` answers bad input in words; pydantic would coerce some of it in silence.
    cls.__annotations__ |= {THRESHOLD: Any, BASE64: Any}
    setattr(cls, THRESHOLD, None)
    setattr(cls, BASE64, False)
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
        asked = _Asked.of(
            body.get(THRESHOLD),
            body.get(BASE64, False),
            body.get("sampling_params"),
            body.get("return_logprob"),
            _num_prompts(body),
        )
        if any(asked.thresholds):
            model.check_request(body.get)
    except InvalidInputError as problem:
        return str(problem)
    return None


def normalize(original: Callable[[Any], None], self: Any) -> None:
    """AROUND hook on `GenerateReqInput.normalize_batch_and_arguments`."""
    raw = (getattr(self, THRESHOLD), getattr(self, BASE64), self.sampling_params, self.return_logprob)
    # Before SGLang repeats the prompts `n` times.
    if _asks(getattr(self, THRESHOLD), self.sampling_params):
        model.check_request(functools.partial(getattr, self))
    original(self)
    asked = _Asked.of(*raw, num_prompts=self.batch_size)
    if any(asked.thresholds) and (path := routes.path_without_sets.get()):
        raise InvalidInputError(f"{THRESHOLD}: {path} cannot return candidate sets; ask /generate")
    if self.is_single:
        setattr(self, THRESHOLD, asked.thresholds[0])
        setattr(self, BASE64, asked.base64[0])
        if asked.thresholds[0]:
            if isinstance(self.sampling_params, list):
                raise InvalidInputError("sampling_params: got a list for one prompt, expected an object")
            self.sampling_params = _with_threshold(self.sampling_params, asked.thresholds[0], asked.base64[0])
        return
    # With n > 1 SGLang repeats the whole list of prompts.
    count = len(self.sampling_params)
    thresholds = [asked.thresholds[i % self.batch_size] for i in range(count)]
    base64 = [asked.base64[i % self.batch_size] for i in range(count)]
    setattr(self, THRESHOLD, thresholds)
    setattr(self, BASE64, base64)
    if any(thresholds):
        self.sampling_params = [
            _with_threshold(params, p, flag) if p else params
            for params, p, flag in zip(self.sampling_params, thresholds, base64, strict=True)
        ]


def get_item(item: Any, self: Any, i: int) -> Any:
    """AFTER hook on `GenerateReqInput.__getitem__`: the part keeps its own threshold."""
    for name in FIELDS:
        value = getattr(self, name)
        setattr(item, name, value[i] if isinstance(value, list) else value)
    if getattr(self, AT_END, False):
        setattr(item, AT_END, True)
    return item


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a request asks for, one entry per prompt; None or 0 is off."""

    thresholds: Sequence[float | None]
    base64: Sequence[bool]

    @classmethod
    def of(
        cls, threshold: Any, base64: Any, sampling_params: Any, return_logprob: Any, num_prompts: int
    ) -> _Asked:
        """Check the fields of one request.

        Args:
            threshold, base64, sampling_params, return_logprob: the request's fields as they came.
            num_prompts: the number of prompts.

        Raises:
            InvalidInputError: a sentence naming the field, what it got and what it takes.
        """
        per_prompt = _spread(THRESHOLD, threshold, num_prompts)
        thresholds = [_threshold(THRESHOLD, value) for value in per_prompt]
        flags = [_flag(BASE64, base64)] * num_prompts

        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * num_prompts
        customs = [item.get("custom_params") if isinstance(item, Mapping) else None for item in params]
        is_used = any(thresholds) or any(isinstance(each, Mapping) and THRESHOLD in each for each in customs)
        if is_used and len(params) != num_prompts:
            raise InvalidInputError(
                f"sampling_params: got {len(params)} for {num_prompts} prompts, expected one per prompt"
            )
        for i, custom in enumerate(customs[:num_prompts]):
            if not isinstance(custom, Mapping):
                if custom is not None and (thresholds[i] or _mentions_threshold(custom)):
                    raise InvalidInputError(
                        f"sampling_params.custom_params: got {custom!r}, expected an object:"
                        f" {THRESHOLD} goes to the scheduler in it"
                    )
                continue
            where = "sampling_params.custom_params."
            inner = _threshold(where + THRESHOLD, custom.get(THRESHOLD))
            if inner and thresholds[i] and inner != thresholds[i]:
                raise InvalidInputError(
                    f"{THRESHOLD}: got {thresholds[i]} and {inner} in sampling_params.custom_params;"
                    " expected it in one place, or the same in both"
                )
            thresholds[i] = inner or thresholds[i]
            flags[i] = flags[i] or _flag(where + BASE64, custom.get(BASE64, False))

        if any(thresholds):
            logprobs = return_logprob if isinstance(return_logprob, list) else [return_logprob] * num_prompts
            if not all(wanted for wanted, p in zip(logprobs, thresholds, strict=False) if p):
                raise InvalidInputError(
                    f"{THRESHOLD}: needs return_logprob to be true, got {return_logprob!r}"
                )
            if any(isinstance(item, Mapping) and (item.get("beam_width") or 1) > 1 for item in params):
                raise InvalidInputError(f"{THRESHOLD}: beam search (beam_width > 1) has no candidate sets")
            for item, p in zip(params, thresholds, strict=False):
                if p and isinstance(item, Mapping) and (why := temperature_refusal(item.get("temperature"))):
                    raise InvalidInputError(f"sampling_params.temperature, with {THRESHOLD}: {why}")
            if problems := (*status().problems, *refusals(), *routes.refusals()):
                raise InvalidInputError(
                    f"{THRESHOLD}: candidate sets are not served here: {'; '.join(problems)}"
                )
        return cls(thresholds, flags)


def _asks(threshold: Any, sampling_params: Any) -> bool:
    """Whether candidate sets are asked for anywhere, right or wrong."""
    params = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    customs = [item.get("custom_params") for item in params if isinstance(item, Mapping)]
    places = [threshold, *(custom.get(THRESHOLD) for custom in customs if isinstance(custom, Mapping))]
    return any(any(place) if isinstance(place, list) else place for place in places)


def _mentions_threshold(custom: Any) -> bool:
    try:
        return THRESHOLD in json.dumps(custom, default=str)
    except RecursionError:
        return True


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


def _flag(name: str, value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}: got {value!r}, expected true or false")
    return value


def _with_threshold(sampling_params: Mapping[str, Any], p: float, base64: bool) -> dict[str, Any]:
    """With what goes to the scheduler: the threshold, and what one candidate costs (`budget.charge`).

    The latter also shows there that the request came through these checks (`admission`).
    """
    custom = sampling_params.get("custom_params") or {}
    return {
        **sampling_params,
        "custom_params": {**custom, THRESHOLD: p, KEY: 1 if base64 else LIST_FORM_COST},
    }


def _num_prompts(body: Mapping[str, Any]) -> int:
    text, ids, embeds = body.get("text"), body.get("input_ids"), body.get("input_embeds")
    if isinstance(text, list):
        return len(text)
    if text is None and isinstance(ids, list) and ids and isinstance(ids[0], list):
        return len(ids)
    # One prompt of embeddings is a list of lists itself.
    if text is None and ids is None and isinstance(embeds, list) and embeds and isinstance(embeds[0], list):
        return len(embeds) if embeds[0] and isinstance(embeds[0][0], list) else 1
    return 1
