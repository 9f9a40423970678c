"""Parse the plugin's request fields once, in the HTTP process, and send what they ask for to the scheduler.

`guard.Guard` parses the raw body of `/generate` with `parse_body`, and `normalize` attaches the result to
SGLang's `GenerateReqInput`. `Guard` takes the fields of other routes out of their bodies, and `sglang.Engine`
has them as keyword arguments; `set_fields` hands those over, and `normalize` parses them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from sglang_topp.engine_contract import RESUMED, find_resume_problem
from sglang_topp.errors import InvalidInputError, PatchError
from sglang_topp_patches.capabilities import request_problem
from sglang_topp_patches.hooks import after, around, before
from sglang_topp_patches.http import slime_fields
from sglang_topp_patches.http.model_limit_checks import num_prompts
from sglang_topp_patches.http.process_state import Call, HttpProcess, current_call
from sglang_topp_patches.request import (
    BASE64,
    DISTRIBUTION,
    FIELDS,
    INDEXER_TOPK,
    NOTHING,
    NUCLEUS,
    ROUTES,
    SAMPLER,
    SOURCE,
    THRESHOLD,
    Carried,
    SetsRequest,
    attach,
    sets_request,
    without_fields,
)

_CUSTOM = "sampling_params.custom_params."
_AT_END = "sglang_topp_at_end"
_OF_NEW_WEIGHTS = "after a retraction, SGLang returns those of the second prefill for all tokens"
PROMPT_IDS = "return_prompt_token_ids"
"""A field of SGLang 0.5.13 and later, which the plugin adds to older releases."""


def parse_body(process: HttpProcess, body: Mapping[str, Any]) -> tuple[SetsRequest, ...]:
    """Parse a body for `/generate`, and check it as SGLang would after a stream has begun.

    Raises:
        InvalidInputError: as `parse`, or SGLang would refuse the sampling parameters.
    """
    requests = parse(process, body.get)
    given, manager = body.get("sampling_params"), process.manager
    for params in given if isinstance(given, list) else [given]:
        if isinstance(params, Mapping) and manager is not None:
            merged = {**(manager.preferred_sampling_params or {}), **params}
            try:
                checked = manager.sampling_params_class(**merged)
                checked.normalize(manager.tokenizer)
                checked.verify(manager.model_config.vocab_size)
            except Exception as error:  # an invalid `stop_regex` or `stop` may raise any error
                raise InvalidInputError(f"sampling_params: {error}") from error
    return requests


@around("sglang.srt.entrypoints.engine.Engine.generate")
def generate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Accept the plugin's fields as keyword arguments."""
    with _call_of(kwargs):
        return original(self, *args, **kwargs)


@around("sglang.srt.entrypoints.engine.Engine.async_generate")
async def async_generate(
    original: Callable[..., Awaitable[Any]], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Accept the plugin's fields as keyword arguments."""
    with _call_of(kwargs):
        return await original(self, *args, **kwargs)


@contextmanager
def _call_of(kwargs: dict[str, Any]) -> Iterator[None]:
    """Take the plugin's fields out of keyword arguments, and keep them for the request."""
    fields = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
    call = Call(fields=fields or None)
    token = current_call.set(call)
    try:
        yield
    finally:
        current_call.reset(token)
        call.close()
    if call.fields is not None:
        raise PatchError(f"{', '.join(fields)}: SGLang's engine did not pass its request to generate_request")


@before("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request")
def set_fields(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Copy the fields of the current call to its request, which SGLang has made without them."""
    call = current_call.get()
    if call is not None and call.fields is not None:
        vars(obj).update({**call.fields, _AT_END: call.is_openai})
        call.fields = None


@around("sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", state=HttpProcess)
def normalize(process: HttpProcess, original: Callable[[Any], None], self: Any) -> None:
    """Attach what each prompt wants."""
    call = current_call.get() or Call()
    at_end = vars(self).pop(_AT_END, False)
    if at_end:  # the answer still has log-probs only if the caller sets `logprobs`
        self.return_logprob = True
    requests, call.requests = call.requests or parse(process, vars(self).get, at_end=at_end), None
    field = next((one.field for one in requests if one.field), "")
    if field and not call.is_served:
        raise InvalidInputError(f"{field}: {call.path} cannot return candidate sets; ask /generate")
    if not requests:
        return original(self)
    self.sampling_params = without_fields(self.sampling_params, keeps_none=at_end)
    original(self)
    if field:
        process.check_room(is_streamed=bool(getattr(self, "stream", False)) and not at_end)
    if len(requests) != self.batch_size:
        raise InvalidInputError(f"got {self.batch_size} prompts, expected {len(requests)} as in the body")
    call.num_choices = self.batch_size * self.parallel_sample_num
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
    of_batch: Any = sets_request(self)
    if of_batch is not NOTHING:
        attach(item, of_batch[i])
    return item


@after("sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object")
def send_to_scheduler(tokenized: Any, self: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Send along what the request wants.

    SGLang has merged the server's default sampling parameters by now, so no default is displaced.
    """
    if (wanted := sets_request(obj)) != NOTHING:
        params = tokenized.sampling_params
        params.custom_params = Carried(wanted, params.custom_params)
        if wanted.returns_prompt_ids:
            obj.sglang_topp_prompt_ids = list(tokenized.input_ids)
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
    count = num_prompts(field)
    n = 1 if count is None else count
    params = given if isinstance(given, list) else [given] * n
    values = {name: _spread(name, field(name), n) for name in (THRESHOLD, SOURCE, RESUMED)}
    values |= {name: [field(name)] * n for name in (BASE64, NUCLEUS)}
    _check_resumed(process, values[RESUMED], field)
    returns_ids = adds_prompt_ids() and _flag(PROMPT_IDS, field(PROMPT_IDS))
    requests = [
        _parse_one(
            {name: value[i] for name, value in values.items()},
            params[i] if i < len(params) else None,
            is_sent_at_end=at_end,
            resumed_tokens=values[RESUMED][i],
            returns_prompt_ids=returns_ids,
        )
        for i in range(n)
    ]
    if any(one.field for one in requests):
        if len(params) != n:
            raise InvalidInputError(
                f"sampling_params: got {len(params)} for {n} prompts, expected one per prompt"
            )
        _check(process, requests, params, field("return_logprob"))
        for name, problem in ((ROUTES, process.capabilities.routes), (INDEXER_TOPK, _OF_NEW_WEIGHTS)):
            if field(name) and problem:
                raise InvalidInputError(f"{name}: not served here with candidate sets: {problem}")
        if any(one.is_for_slime for one in requests):
            slime_fields.check_request(field)
        if process.model is None:
            raise InvalidInputError("the model's sizes are not known in this process; nothing can be checked")
        process.model.check_request(field)
    return tuple(requests) if any(one != NOTHING for one in requests) else ()


def _names_fields(field: Callable[[str], Any], sampling_params: Any) -> bool:
    """Return whether a request names a field of the plugin, even with an invalid value."""
    if any(field(name) is not None for name in (*FIELDS, RESUMED)):
        return True
    if field(PROMPT_IDS) and adds_prompt_ids():
        return True
    params = sampling_params if isinstance(sampling_params, list) else [sampling_params]
    customs = [one.get("custom_params") for one in params if isinstance(one, Mapping)]
    return any(custom is not None and _mentions(custom) for custom in customs)


def _parse_one(values: Mapping[str, Any], params: Any, **others: Any) -> SetsRequest:
    """Return what one prompt wants, whose fields stand at the top level or in its `custom_params`.

    Args:
        values: the prompt's fields at the top level.
        params: its sampling parameters.
        others: further attributes of the `SetsRequest`.
    """
    custom = params.get("custom_params") if isinstance(params, Mapping) else None
    inner = custom if isinstance(custom, Mapping) else {}

    def read(name: str, check: Callable[[str, Any], Any]) -> Any:
        outside, inside = check(name, values[name]), check(_CUSTOM + name, inner.get(name))
        if outside and inside and outside != inside:
            raise InvalidInputError(
                f"{name}: got {outside!r} and {inside!r} in sampling_params.custom_params;"
                " expected it in one place, or the same in both"
            )
        return outside or inside

    threshold, is_from_sampler = read(THRESHOLD, _threshold), read(SOURCE, _source) == SAMPLER
    is_base64, is_for_slime = read(BASE64, _flag), read(NUCLEUS, _flag)
    asks = threshold or is_from_sampler or is_for_slime
    if custom is not None and custom is not inner and (asks or _mentions(custom)):
        raise InvalidInputError(f"sampling_params.custom_params: got {custom!r}, expected an object")
    if threshold and is_from_sampler:
        raise InvalidInputError(
            f"{SOURCE}: got {SAMPLER!r} and {THRESHOLD}; expected one of them: the sampler's sets follow"
            " the request's own top_k, top_p and min_p"
        )
    if is_for_slime:
        if threshold or is_from_sampler:
            raise InvalidInputError(
                f"{NUCLEUS}: got it with {SOURCE if is_from_sampler else THRESHOLD}; expected one of them: it"
                " is for slime, in whose fields the sets of top_p come"
            )
        threshold, is_base64 = slime_fields.nucleus_threshold(params), True
    return SetsRequest(
        threshold=threshold or 0.0,
        is_from_sampler=is_from_sampler,
        is_base64=is_base64,
        is_for_slime=is_for_slime,
        **others,
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
    served = process.capabilities
    problems = [*served.problems]
    if any(one.is_from_sampler for one in requests) and served.sampler:
        problems.append(served.sampler)
    if problems:
        raise InvalidInputError(f"{field}: candidate sets are not served here: {'; '.join(problems)}")


def _check_resumed(process: HttpProcess, counts: Sequence[Any], field: Callable[[str], Any]) -> None:
    """Raise InvalidInputError if a prompt's `resumed_tokens` is invalid, or cannot be served here."""
    if all(count is None for count in counts):
        return
    for count in counts:
        if count is not None and (type(count) is not int or count < 0):
            raise InvalidInputError(
                f"{RESUMED}: got {count!r}, expected a whole number of 0 or more, or null"
            )
    if problem := process.capabilities.resume:
        raise InvalidInputError(f"{RESUMED}: answers are not resumed here: {problem}")
    ids, params = field("input_ids"), field("sampling_params")
    is_many = isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
    prompts = ids if is_many else [ids]
    for i, count in enumerate(counts):
        if not count:
            continue
        each = params[i] if isinstance(params, list) and i < len(params) else params
        if isinstance(each, Mapping) and (problem := find_resume_problem(without_fields(each)) or ""):
            raise InvalidInputError(f"sampling_params.{problem}")
        prompt = prompts[i] if i < len(prompts) and isinstance(prompts[i], list) else []
        if count > len(prompt):
            raise InvalidInputError(
                f"{RESUMED}: got {count} with a prompt of {len(prompt) or 'no'} token ids; expected input_ids"
                " that end with the tokens to continue from"
            )
        # With --allow-auto-truncate, SGLang cuts the resumed tokens off, and the answer would repeat them.
        if process.model and len(prompt) > process.model.model.context_length:
            raise InvalidInputError(
                f"{RESUMED}: got {count} with a prompt of {len(prompt)} token ids, expected at most"
                f" {process.model.model.context_length}, the context length"
            )


@cache
def adds_prompt_ids() -> bool:
    """Return whether the plugin adds the prompt's token ids to an answer, because SGLang cannot."""
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


def _source(name: str, value: Any) -> str:
    if value not in (None, DISTRIBUTION, SAMPLER):
        raise InvalidInputError(f"{name}: got {value!r}, expected {DISTRIBUTION!r} or {SAMPLER!r}")
    return value or ""


def _flag(name: str, value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}: got {value!r}, expected true or false")
    return value
