"""Parse the plugin's request fields once, in the HTTP process, and send what they ask for to the scheduler.

FastAPI builds the schema of `/generate` when SGLang's HTTP server is imported, which may be before plugins
are loaded, and drops the fields that it does not know. So `check_body` parses the raw body of `/generate`,
and `normalize` attaches the result to SGLang's `GenerateReqInput`. `route_policy.Guard` takes the fields of
other routes out of their bodies, and the offline engine sets them as attributes; `normalize` parses those.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import InvalidInputError
from sglang_topp_patches.capabilities import request_problem
from sglang_topp_patches.hooks import after, around
from sglang_topp_patches.http import model_limit_checks, resume, route_policy, slime_fields
from sglang_topp_patches.http.process_state import HttpProcess
from sglang_topp_patches.request import (
    BASE64,
    DISTRIBUTION,
    FIELDS,
    NOTHING,
    NUCLEUS,
    SAMPLER,
    SOURCE,
    THRESHOLD,
    Carried,
    SetsRequest,
    attach,
    attach_part,
    sets_request,
    without_fields,
)

__all__ = [
    "PROMPT_IDS",
    "check_body",
    "get_item",
    "normalize",
    "parse",
    "send_to_scheduler",
]

_CUSTOM = "sampling_params.custom_params."
PROMPT_IDS = "return_prompt_token_ids"
"""A field of SGLang 0.5.13 and later, which the plugin adds to older releases."""


@after(
    "sglang.srt.entrypoints.api_contract.generate_contract_error",
    since="0.5.22",
    always=True,
    state=HttpProcess,
)
def check_body(process: HttpProcess, error: str | None, body: Any) -> str | None:
    """Parse the body, and return the message of an HTTP 400, or None.

    After a stream has begun with status 200, an error can no longer change the status. So the body is parsed
    before the stream begins.
    """
    if error is not None or not isinstance(body, Mapping):
        return error
    try:
        requests = parse(process, body.get)
    except InvalidInputError as problem:
        return str(problem)
    if sentence := route_policy.misplaced(body):
        return sentence
    if requests:
        call = route_policy.current_call.get()
        if call is None:
            return "candidate sets are not served here: the request did not pass the plugin's checks"
        call.requests = requests
    return None


@around("sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", state=HttpProcess)
def normalize(process: HttpProcess, original: Callable[[Any], None], self: Any) -> None:
    """Attach what each prompt wants."""
    call = route_policy.current_call.get() or route_policy.Call()
    if call.requests is not None:
        requests, call.requests = call.requests, None
    else:
        is_openai = call.fields is not None and call.path in route_policy.OPENAI
        fields, call.fields = call.fields, None
        requests = parse(process, {**vars(self), **(fields or {})}.get, at_end=is_openai)
    field = next((one.field for one in requests if one.field), "")
    if field and (path := route_policy.path_without_sets.get()):
        raise InvalidInputError(f"{field}: {path} cannot return candidate sets; ask /generate")
    if not requests:
        return original(self)
    self.sampling_params = without_fields(self.sampling_params, keeps_none=requests[0].is_sent_at_end)
    original(self)
    if field:
        process.check_room(is_streamed=bool(getattr(self, "stream", False)))
    if len(requests) != self.batch_size:
        raise InvalidInputError(f"got {self.batch_size} prompts, expected {len(requests)} as in the body")
    if not self.is_single:
        # If n > 1, SGLang repeats the whole list of prompts n times.
        attach(self, [requests[i % len(requests)] for i in range(len(self.sampling_params))])
    elif isinstance(self.sampling_params, list):
        raise InvalidInputError("sampling_params: got a list for one prompt, expected an object")
    else:
        attach(self, requests[0])


@after("sglang.srt.managers.io_struct.GenerateReqInput.__getitem__")
def get_item(item: Any, self: Any, i: int) -> Any:
    """Attach to a part of a batch what the part wants."""
    attach_part(item, self, i)
    return item


@after("sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object")
def send_to_scheduler(tokenized: Any, self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Send along what the request wants.

    SGLang has merged the server's default sampling parameters by now, so no default is displaced.
    """
    if (wanted := sets_request(obj)) != NOTHING:
        params = tokenized.sampling_params
        params.custom_params = Carried(wanted, params.custom_params)
    return tokenized


def parse(
    process: HttpProcess, field: Callable[[str], Any], *, at_end: bool = False
) -> tuple[SetsRequest, ...]:
    """Parse and check the plugin's fields of one request.

    Args:
        process: the `HttpProcess` of this HTTP process.
        field: returns the value of the request field with a given name, as the caller sent it, or None.
        at_end: whether the answer has all sets at its end, even in a stream.

    Returns:
        what each prompt wants, or () if no prompt wants anything.

    Raises:
        InvalidInputError: a value is invalid or does not fit the served model, or the request cannot be
            served here. The message names the field, the value, and what is expected.
    """
    given = field("sampling_params")
    if not at_end and not _names_fields(field, given):
        return ()
    count = model_limit_checks.num_prompts(field)
    num_prompts = 1 if count is None else count
    resumed = resume.check_fields(process, field, num_prompts)
    params = given if isinstance(given, list) else [given] * num_prompts
    values = {name: _spread(name, field(name), num_prompts) for name in (THRESHOLD, SOURCE)}
    values |= {name: [field(name)] * num_prompts for name in (BASE64, NUCLEUS)}
    returns_ids = _adds_prompt_ids() and _flag(PROMPT_IDS, field(PROMPT_IDS))
    requests = [
        _parse_one(
            {name: value[i] for name, value in values.items()},
            params[i] if i < len(params) else None,
            resumed[i],
            at_end,
            returns_ids,
        )
        for i in range(num_prompts)
    ]
    if any(one.field for one in requests):
        if len(params) != num_prompts:
            raise InvalidInputError(
                f"sampling_params: got {len(params)} for {num_prompts} prompts, expected one per prompt"
            )
        _check(process, requests, params, field("return_logprob"))
        if any(one.is_for_slime for one in requests):
            slime_fields.check_request(field)
        process.check_request(field)
    return tuple(requests) if any(one != NOTHING for one in requests) else ()


def _names_fields(field: Callable[[str], Any], sampling_params: Any) -> bool:
    """Return whether a request names a field of the plugin, even with an invalid value."""
    if any(field(name) is not None for name in (*FIELDS, RESUMED)):
        return True
    if field(PROMPT_IDS) and _adds_prompt_ids():
        return True
    params = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    customs = [one.get("custom_params") for one in params if isinstance(one, Mapping)]
    return any(custom is not None and _mentions(custom) for custom in customs)


def _parse_one(
    values: Mapping[str, Any], params: Any, resumed: int | None, at_end: bool, returns_ids: bool
) -> SetsRequest:
    """Return what one prompt wants, whose fields stand at the top level or in its `custom_params`."""
    threshold = _threshold(THRESHOLD, values[THRESHOLD])
    sampler = _is_sampler(SOURCE, values[SOURCE])
    base64, nucleus = (_flag(name, values[name]) for name in (BASE64, NUCLEUS))
    custom = params.get("custom_params") if isinstance(params, Mapping) else None
    if isinstance(custom, Mapping):
        inner = _threshold(_CUSTOM + THRESHOLD, custom.get(THRESHOLD))
        if inner and threshold and inner != threshold:
            raise InvalidInputError(
                f"{THRESHOLD}: got {threshold} and {inner} in sampling_params.custom_params;"
                " expected it in one place, or the same in both"
            )
        threshold = inner or threshold
        inner_sampler = _is_sampler(_CUSTOM + SOURCE, custom.get(SOURCE))
        if sampler and custom.get(SOURCE) is not None and not inner_sampler:
            raise InvalidInputError(
                f"{SOURCE}: got {SAMPLER!r} and {custom[SOURCE]!r} in sampling_params.custom_params;"
                " expected it in one place, or the same in both"
            )
        sampler = sampler or inner_sampler
        base64 = base64 or _flag(_CUSTOM + BASE64, custom.get(BASE64))
        nucleus = nucleus or _flag(_CUSTOM + NUCLEUS, custom.get(NUCLEUS))
    elif custom is not None and (threshold or sampler or nucleus or _mentions(custom)):
        raise InvalidInputError(f"sampling_params.custom_params: got {custom!r}, expected an object")
    if nucleus:
        if threshold or sampler:
            raise InvalidInputError(
                f"{NUCLEUS}: got it with {SOURCE if sampler else THRESHOLD}; expected one of them: it"
                " is for slime, in whose fields the sets of top_p come"
            )
        threshold, base64 = slime_fields.nucleus_threshold(params), True
    if threshold and sampler:
        raise InvalidInputError(
            f"{SOURCE}: got {SAMPLER!r} and {THRESHOLD}; expected one of them: the sampler's sets follow"
            " the request's own top_k, top_p and min_p"
        )
    return SetsRequest(
        threshold=threshold,
        is_from_sampler=sampler,
        is_base64=base64,
        is_for_slime=nucleus,
        is_sent_at_end=at_end,
        resumed_tokens=resumed,
        returns_prompt_ids=returns_ids,
    )


def _check(
    process: HttpProcess, requests: Sequence[SetsRequest], params: Sequence[Any], return_logprob: Any
) -> None:
    """Raise InvalidInputError if this process cannot serve the requested sets."""
    field = next(one.field for one in requests if one.field)
    logprobs = return_logprob if isinstance(return_logprob, list) else [return_logprob] * len(requests)
    for one, item, logprob in zip(requests, params, logprobs, strict=False):
        if not one.field:
            continue
        if logprob is not True:
            raise InvalidInputError(f"{field}: needs return_logprob to be true, got {return_logprob!r}")
        item = item if isinstance(item, Mapping) else {}
        if (item.get("beam_width") or 1) > 1:
            raise InvalidInputError(f"{field}: beam search (beam_width > 1) has no candidate sets")
        if problem := request_problem(item.get("temperature")):
            raise InvalidInputError(f"sampling_params, with {field}: {problem}")
    problems = [*process.problems()]
    if any(one.is_from_sampler for one in requests) and process.capabilities.sampler:
        problems.append(process.capabilities.sampler)
    if problems:
        raise InvalidInputError(f"{field}: candidate sets are not served here: {'; '.join(problems)}")


@cache
def _adds_prompt_ids() -> bool:
    from sglang.srt.managers.io_struct import GenerateReqInput

    return PROMPT_IDS not in GenerateReqInput.__dataclass_fields__


def _mentions(custom: Any) -> bool:
    """Return whether `custom_params` name a field; if they are no object, anywhere in their value."""
    if isinstance(custom, Mapping):
        return not custom.keys().isdisjoint(FIELDS)
    try:
        text = json.dumps(custom, default=str)
    except RecursionError:
        return True
    return any(name in text for name in FIELDS)


def _spread(name: str, value: Any, num_prompts: int) -> list[Any]:
    if not isinstance(value, list):
        return [value] * num_prompts
    if len(value) != num_prompts:
        raise InvalidInputError(
            f"{name}: got {len(value)} values for {num_prompts} prompts, expected one per prompt"
        )
    return value


def _threshold(name: str, value: Any) -> float:
    if value is None:
        return 0.0
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
