"""Refuse a request for sets if a value does not fit the served model and would crash the scheduler.

SGLang does not check all values of a request against the model. This module checks texts, token ids,
embeddings, positions, list lengths, and sampling parameters. If a value does not fit, the server answers the
request with HTTP status 400.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from sglang_topp.engine_contract import (
    Model,
    check_sampling_params,
    check_token_ids,
    overlong_param,
    overlong_text,
)
from sglang_topp.errors import InvalidInputError

_MAX_SAMPLES = 8192  # the maximum number of samples per request, equal to the sidecar's default
_TOKEN_CHARS = 64  # the assumed number of characters in the longest token, if the tokenizer lists no tokens
_JSON = (bool, int, float, str, list, dict)
_ONE_OR_PER_PROMPT = (
    *("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num", "cache_salt"),
    *("return_hidden_states", "return_sampling_mask", "sampling_logprobs_mode", "lora_path", "lora_id"),
    *("custom_logit_processor", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *("decode_tp_size", "extra_key"),
)
# A prefill server sends its results to a decode server in SGLang's `MetadataBuffers`. The `MetadataBuffers`
# hold at most this number of top log-probs.
_MAX_TRANSFERRED_TOP_LOGPROBS = 128


@dataclass(frozen=True)
class ModelLimits:
    """The served model's limits for the values of a request.

    Attributes:
        model: the vocabulary size, the context length, and the number of characters in the longest token.
        hidden_size: the width of one input embedding.
        dtype: the name of the model's dtype.
        is_disaggregated: whether prefill and decode run on separate servers.
    """

    model: Model
    hidden_size: int
    dtype: str
    is_disaggregated: bool

    @classmethod
    def of(cls, manager: Any, server_args: Any) -> ModelLimits:
        """Read the limits from SGLang's `TokenizerManager` and `ServerArgs`."""
        config = manager.model_config
        # Not every tokenizer can list its tokens.
        tokens: dict[str, int] = getattr(manager.tokenizer, "get_vocab", dict)()
        longest = max(map(len, tokens), default=_TOKEN_CHARS)
        return cls(
            Model(config.vocab_size, config.context_len, longest),
            config.hidden_size,
            str(config.dtype).removeprefix("torch."),
            server_args.disaggregation_mode != "null",
        )

    @property
    def max_top_logprobs(self) -> int:
        """The largest `top_logprobs_num` that the server accepts."""
        return _MAX_TRANSFERRED_TOP_LOGPROBS if self.is_disaggregated else self.model.vocab_size

    def check_request(self, field: Callable[[str], Any]) -> None:
        """Check that a request for candidate sets has only values that fit the served model.

        Args:
            field: a function that takes the name of a request field, and returns the field's value. The
                function returns the value that the caller sent, not SGLang's normalized value. If the caller
                did not send the field, the function returns None.

        Raises:
            InvalidInputError: a value does not fit the model. The error message names the field, the value,
                and the expected values.
        """
        for name, text in _each("text", field("text"), str):
            if not text:
                # The scheduler fails on a prompt that has no tokens.
                raise InvalidInputError(f"{name}: got an empty text, expected at least one token")
            if sentence := overlong_text(name, text, self.model):
                raise InvalidInputError(sentence)
        # If a request has token ids and a text, SGLang uses the token ids.
        ids = field("input_ids")
        is_batch = _holds(ids, list)
        for name, one in _each("input_ids", ids, list) if is_batch else [("input_ids", ids)]:
            # SGLang itself refuses an empty `input_ids` that has no text beside it.
            if one == [] and (is_batch or field("text") is not None):
                raise InvalidInputError(f"{name}: got no token id, expected at least one")
            check_token_ids(name, () if one is None else one, self.model.vocab_size)
        if field("text") is None and ids is None:
            _check_embeds(field("input_embeds"), self)
        count = _check_lists(field, self)
        if isinstance(field("text"), list) and ids is not None and (not is_batch or len(ids) != count):
            raise InvalidInputError(f"input_ids: expected a list for each of {count} prompts, or none at all")
        overrides = field("positional_embed_overrides")
        given = overrides if isinstance(overrides, list) and overrides else [overrides]
        if any(isinstance(one, _JSON) for one in given):
            # `positional_embed_overrides` needs Python objects that JSON cannot express. The scheduler fails
            # if `positional_embed_overrides` holds a JSON value.
            raise InvalidInputError(
                "positional_embed_overrides: got JSON, which cannot hold it; leave it out"
            )
        for name, processor in _each("custom_logit_processor", field("custom_logit_processor"), str):
            _check_processor(name, processor)
        if (session := field("session_params")) is not None:
            known = _session_fields()
            if not isinstance(session, dict) or not session.keys() <= known:
                raise InvalidInputError(f"session_params: expected an object with {', '.join(sorted(known))}")
        for name, params in _each("sampling_params", field("sampling_params"), dict):
            # SGLang copies the prompts `n` times before it checks `n`.
            n, most = params.get("n", 1), max(1, _MAX_SAMPLES // count)
            if not isinstance(n, int) or n > most:
                raise InvalidInputError(
                    f"{name}.n: got {n}, expected an integer of at most {most} for {count} prompts"
                )
            if self.is_disaggregated and n > 1:
                raise InvalidInputError(
                    f"{name}.n: got {n}, expected 1: SGLang's decode server never ends it"
                )
            if self.is_disaggregated and params.get("max_new_tokens") == 0:
                # The prefill server draws a token even if `max_new_tokens` is 0. The decode server then ends
                # the request, and does not return this token.
                raise InvalidInputError(
                    f"{name}.max_new_tokens: got 0, expected 1 or more: on a disaggregated server a prompt's"
                    " sets come with the first token"
                )
            if sentence := overlong_param(name, params):
                raise InvalidInputError(sentence)
            check_sampling_params(name, params, self.model)


def num_prompts(field: Callable[[str], Any]) -> int | None:
    """Return the length of a request's list of prompts, or None if the request has no list of prompts."""
    text, ids, embeds = field("text"), field("input_ids"), field("input_embeds")
    if isinstance(text, list):
        return len(text)
    if text is None and _holds(ids, list):
        return len(ids)
    # One prompt of embeddings is already a list of lists, so a list of prompts is one level deeper.
    if text is None and ids is None and _holds(embeds, list) and _holds(embeds[0], list):
        return len(embeds)
    return None


def _session_fields() -> set[str]:
    from sglang.srt.managers.io_struct import SessionParams

    return set(signature(SessionParams).parameters)


def _check_processor(name: str, given: str) -> None:
    """Raise InvalidInputError unless a custom logit processor has SGLang's serialized form.

    The scheduler fails on a custom logit processor that does not have SGLang's serialized form. This function
    does not check the code of the custom logit processor.
    """
    try:
        bytes.fromhex(json.loads(given)["callable"])
    except (ValueError, KeyError, TypeError):
        raise InvalidInputError(
            f"{name}: expected what `CustomLogitProcessor.to_str` of SGLang returns"
        ) from None


def _check_embeds(embeds: Any, limits: ModelLimits) -> None:
    """Raise InvalidInputError for embeddings that do not fit the model and would crash the scheduler."""
    if not isinstance(embeds, list):
        return
    if limits.dtype != "bfloat16":
        raise InvalidInputError(
            f"input_embeds: SGLang passes them on in bfloat16, and this model takes {limits.dtype}; send text"
            " or ids"
        )
    prompts = embeds if _holds(embeds, list) and _holds(embeds[0], list) else [embeds]
    for prompt in prompts:
        widths = {len(row) if isinstance(row, list) else 1 for row in prompt}
        if widths != {limits.hidden_size}:
            raise InvalidInputError(
                f"input_embeds: got rows of {sorted(widths)} numbers, expected one or more of"
                f" {limits.hidden_size}"
            )


def _check_lists(field: Callable[[str], Any], limits: ModelLimits) -> int:
    """Check fields that hold one value, or a list with one value per prompt. Return the number of prompts."""
    count = num_prompts(field)
    for name in _ONE_OR_PER_PROMPT:
        value = field(name)
        if name == "lora_id" and count is not None and isinstance(value, str):
            raise InvalidInputError(f"{name}: got {value!r}, expected one for each of {count} prompts")
        # If `count` is None, the request's only prompt is not in a list, and the field `name` must not hold a
        # list either. SGLang would send the list to the scheduler without a check.
        if isinstance(value, list) and len(value) != count:
            expected = "one value" if count is None else f"one value, or one for each of {count} prompts"
            raise InvalidInputError(f"{name}: got a list of {len(value)}, expected {expected}")
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, int):
                continue
            if name == "logprob_start_len" and one < -1:
                # The scheduler does not treat a negative position as an offset from the end of the prompt.
                raise InvalidInputError(f"{name}: got {one}, expected -1 (no prompt position) or more")
            if name == "top_logprobs_num" and one > limits.max_top_logprobs:
                is_all = limits.max_top_logprobs == limits.model.vocab_size
                why = "the model's vocabulary" if is_all else "on a disaggregated server"
                raise InvalidInputError(
                    f"{name}: got {one}, expected at most {limits.max_top_logprobs}, {why}"
                )
    if _holds(ids := field("token_ids_logprob"), list) and len(ids) != count:
        or_lists = "" if count is None else f", or a list of them for each of {count} prompts"
        raise InvalidInputError(f"token_ids_logprob: got {len(ids)} lists, expected token ids{or_lists}")
    return count or 1


def _holds(value: Any, kind: type) -> bool:
    """Return whether `value` is a list whose first entry is of the type `kind`."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], kind)


def _each(name: str, value: Any, kind: type) -> list[tuple[str, Any]]:
    """Return each value of the type `kind` in a field, with a name such as `text[0]` for error messages.

    `value` is one value, or a list with one value per prompt. The returned list omits values that are not of
    the type `kind`, because SGLang itself refuses such values.
    """
    entries = enumerate(value) if isinstance(value, list) else ()
    given = [(f"{name}[{i}]", one) for i, one in entries] or [(name, value)]
    return [(at, one) for at, one in given if isinstance(one, kind)]
