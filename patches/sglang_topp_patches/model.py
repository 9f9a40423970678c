"""The served model's sizes, and the checks against them that SGLang lacks: a request for candidate sets
is answered with a 400 where SGLang's scheduler would die of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from inspect import signature
from typing import Any

from sglang_topp.engine_request import (
    Model,
    check_sampling_params,
    check_token_ids,
    overlong_param,
    overlong_text,
)
from sglang_topp.errors import InvalidInputError

__all__ = ["check_request", "note_model", "num_prompts", "to_record"]

_MAX_SAMPLES = 8192  # of one request, as the sidecar has it by default
_TOKEN_CHARS = 64  # where nothing is known
_JSON = (bool, int, float, str, list, dict)
_ONE_OR_PER_PROMPT = (
    *("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "cache_salt"),
    *("return_hidden_states", "return_sampling_mask", "sampling_logprobs_mode", "lora_path", "lora_id"),
    *("custom_logit_processor", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *("decode_tp_size", "extra_key"),
)
# SGLang's buffers between a prefill and a decode server (`MetadataBuffers`) have room for so many.
_HANDED_OVER_TOP_LOGPROBS = 128
_model: Model | None = None
_most_top_logprobs = 0
_is_disaggregated = False
_hidden_size = 0
_dtype = ""


def note_model(result: None, self: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook on `TokenizerManager.__init__`."""
    global _model, _most_top_logprobs, _hidden_size, _dtype, _is_disaggregated
    config, tokenizer = self.model_config, self.tokenizer
    _hidden_size, _dtype = config.hidden_size, str(config.dtype).removeprefix("torch.")
    # Not every tokenizer can list its tokens; the bound on a text does not follow the longest anyway.
    tokens: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    longest = max(map(len, tokens), default=_TOKEN_CHARS)
    _model = Model(config.vocab_size, config.context_len, longest)
    _is_disaggregated = server_args.disaggregation_mode != "null"
    _most_top_logprobs = _HANDED_OVER_TOP_LOGPROBS if _is_disaggregated else config.vocab_size


def to_record() -> dict[str, int] | None:
    """What `GET /server_info` shows as `model`."""
    return None if _model is None else asdict(_model)


def check_request(field: Callable[[str], Any]) -> None:
    """Check a request for candidate sets; `field` looks one of its fields up, None where it is not there.

    Raises:
        InvalidInputError: the sentence names the field, what it got and what it takes.
    """
    if _model is None:
        raise InvalidInputError("the model's sizes are not known in this process; nothing can be checked")
    for name, text in _each("text", field("text"), str):
        if not text:
            # No token at all: the scheduler fails where it lays out the prompt's keys.
            raise InvalidInputError(f"{name}: got an empty text, expected at least one token")
        if sentence := overlong_text(name, text, _model):
            raise InvalidInputError(sentence)
    # Beside a text they are what SGLang takes.
    ids = field("input_ids")
    is_batch = _holds(ids, list)
    if isinstance(ids, list) and not ids and field("text") is not None:  # without a text SGLang refuses it
        raise InvalidInputError("input_ids: got no token id, expected at least one")
    for name, one in (
        _each("input_ids", ids, list) if is_batch else [("input_ids", () if ids is None else ids)]
    ):
        if is_batch and not one:
            raise InvalidInputError(f"{name}: got no token id, expected at least one")
        check_token_ids(name, one, _model.vocab_size)
    if field("text") is None and ids is None:
        _check_embeds(field("input_embeds"))
    count = _check_lists(field, _model)
    if isinstance(field("text"), list) and ids is not None and (not is_batch or len(ids) != count):
        raise InvalidInputError(f"input_ids: expected a list for each of {count} prompts, or none at all")
    overrides = field("positional_embed_overrides")
    given = overrides if isinstance(overrides, list) and overrides else [overrides]
    if any(isinstance(one, _JSON) for one in given):
        # A field for objects of the Python interface: the scheduler fails on anything else.
        raise InvalidInputError("positional_embed_overrides: got JSON, which cannot hold it; leave it out")
    for name, processor in _each("custom_logit_processor", field("custom_logit_processor"), str):
        _check_processor(name, processor)
    if (session := field("session_params")) is not None:
        known = _session_fields()
        if not isinstance(session, dict) or not session.keys() <= known:
            raise InvalidInputError(f"session_params: expected an object with {', '.join(sorted(known))}")
    for name, params in _each("sampling_params", field("sampling_params"), dict):
        # SGLang copies the prompts `n` times before it looks at anything.
        n, most = params.get("n", 1), max(1, _MAX_SAMPLES // count)
        if not isinstance(n, int) or n > most:
            raise InvalidInputError(
                f"{name}.n: got {n}, expected an integer of at most {most} for {count} prompts"
            )
        if _is_disaggregated and n > 1:
            raise InvalidInputError(f"{name}.n: got {n}, expected 1: SGLang's decode server never ends it")
        if _is_disaggregated and params.get("max_new_tokens") == 0:
            # The prefill server draws a token all the same, and the decode server ends without asking for it.
            raise InvalidInputError(
                f"{name}.max_new_tokens: got 0, expected 1 or more: on a disaggregated server a prompt's sets"
                " come with the first token"
            )
        if sentence := overlong_param(name, params):
            raise InvalidInputError(sentence)
        check_sampling_params(name, params, _model)


def num_prompts(field: Callable[[str], Any]) -> int | None:
    """How many prompts a request holds; None where it is one that stands in no list."""
    text, ids, embeds = field("text"), field("input_ids"), field("input_embeds")
    if isinstance(text, list):
        return len(text)
    if text is None and _holds(ids, list):
        return len(ids)
    # One prompt of embeddings is a list of lists itself.
    if text is None and ids is None and _holds(embeds, list) and _holds(embeds[0], list):
        return len(embeds)
    return None


def _session_fields() -> set[str]:
    from sglang.srt.managers.io_struct import SessionParams

    return set(signature(SessionParams).parameters)


def _check_processor(name: str, given: str) -> None:
    """The scheduler fails on another form. What is in it is run there, and not looked at here."""
    try:
        bytes.fromhex(json.loads(given)["callable"])
    except (ValueError, KeyError, TypeError):
        raise InvalidInputError(
            f"{name}: expected what `CustomLogitProcessor.to_str` of SGLang returns"
        ) from None


def _check_embeds(embeds: Any) -> None:
    """Embeddings that do not fit the model's first layer end the scheduler there."""
    if not isinstance(embeds, list):
        return
    if _dtype != "bfloat16":
        raise InvalidInputError(
            f"input_embeds: SGLang hands them on in bfloat16, and this model takes {_dtype}; send text or ids"
        )
    prompts = embeds if _holds(embeds, list) and _holds(embeds[0], list) else [embeds]
    for prompt in prompts:
        widths = {len(row) if isinstance(row, list) else 1 for row in prompt}
        if widths != {_hidden_size}:
            raise InvalidInputError(
                f"input_embeds: got rows of {sorted(widths)} numbers, expected one or more of {_hidden_size}"
            )


def _check_lists(field: Callable[[str], Any], model: Model) -> int:
    """Check what comes as one value or one per prompt; returns the number of prompts."""
    count = num_prompts(field)
    for name in _ONE_OR_PER_PROMPT:
        value = field(name)
        if name == "lora_id" and count is not None and isinstance(value, str):
            raise InvalidInputError(f"{name}: got {value!r}, expected one for each of {count} prompts")
        # A list for one prompt reaches the scheduler as it is.
        if isinstance(value, list) and len(value) != count:
            expected = "one value" if count is None else f"one value, or one for each of {count} prompts"
            raise InvalidInputError(f"{name}: got a list of {len(value)}, expected {expected}")
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, int):
                continue
            if name == "logprob_start_len" and one < -1:
                # Not from the prompt's end: the scheduler counts positions with it.
                raise InvalidInputError(f"{name}: got {one}, expected -1 (no prompt position) or more")
            if name == "top_logprobs_num" and one > _most_top_logprobs:
                is_all = _most_top_logprobs == model.vocab_size
                why = "the model's vocabulary" if is_all else "on a disaggregated server"
                raise InvalidInputError(f"{name}: got {one}, expected at most {_most_top_logprobs}, {why}")
    if _holds(ids := field("token_ids_logprob"), list) and len(ids) != count:
        or_lists = "" if count is None else f", or a list of them for each of {count} prompts"
        raise InvalidInputError(f"token_ids_logprob: got {len(ids)} lists, expected token ids{or_lists}")
    return count or 1


def _holds(value: Any, kind: type) -> bool:
    """Whether a list begins with one of these."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], kind)


def _each(name: str, value: Any, kind: type) -> list[tuple[str, Any]]:
    """The entries of a field that holds one for all or one per prompt, by name; what is of another type is
    SGLang's to refuse."""
    entries = enumerate(value) if isinstance(value, list) else ()
    given = [(f"{name}[{i}]", one) for i, one in entries] or [(name, value)]
    return [(at, one) for at, one in given if isinstance(one, kind)]
