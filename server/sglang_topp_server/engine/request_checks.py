"""Refuse requests that would crash or block the engine.

The checks depend on the sizes of the engine's model, such as its vocabulary size.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sglang_topp.engine_contract import (
    GRAMMARS,
    Model,
    check_sampling_params,
    check_token_ids,
    overlong_param,
    overlong_text,
)
from sglang_topp.errors import BadRequestError, InvalidInputError
from sglang_topp_client.requests import SampleRequest
from sglang_topp_server.schemas.requests import RolloutsBody, SampleCall, ScoresBody

__all__ = ["check_rollout_request", "check_score_request"]


def check_rollout_request(request: SampleCall[RolloutsBody], model: Model, survives_grammars: bool) -> None:
    """Check that a parsed rollout request would not crash or block the engine.

    Args:
        request: the request, as `parse_rollouts` returns it.
        model: the vocabulary size and other sizes of the engine's model.
        survives_grammars: whether the engine survives a grammar that forbids every next token. If
            `survives_grammars` is False, this function refuses every request with a grammar. No check can
            tell in advance whether a grammar will forbid every next token.

    Raises:
        InvalidInputError: a value would crash the engine (HTTP status 400). The error's message names
            the field, the value, and the accepted values.
        BadRequestError: a text is too long (HTTP status 413). Other requests would have to wait while the
            engine tokenizes the long text.
    """
    for i, rollout in request.given.items():
        check_token_ids(f"rollouts[{i}].prompt_ids", rollout.prompt_ids, model.vocab_size)
        check_token_ids(f"rollouts[{i}].output_ids", rollout.output_ids, model.vocab_size)
    fresh = [one for one in request.wanted if one.prompt_index not in request.given]
    _check_prompts("prompts", request.body.prompts, fresh, model)
    params = request.body.sampling_params
    each = params if isinstance(params, list) else [params or {}]
    for i, given in enumerate(each):
        name = f"sampling_params[{i}]" if isinstance(params, list) else "sampling_params"
        _refuse_long(overlong_param(name, given))
        check_sampling_params(name, given, model)
        if not survives_grammars and (key := next((key for key in GRAMMARS if given.get(key)), None)):
            raise InvalidInputError(
                f"{name}.{key}: got one, expected none: a grammar that leaves no token to draw would end this"
                " engine; start it with SGLANG_SANITIZE_NAN_LOGITS=1, as `sglang-topp serve` does"
            )


def check_score_request(request: SampleCall[ScoresBody], model: Model, _: bool) -> None:
    """Check that a parsed score request would not crash or block the engine.

    Raises:
        InvalidInputError: a value would crash the engine (HTTP status 400). The error's message names
            the field, the value, and the accepted values.
        BadRequestError: a text is too long (HTTP status 413). Other requests would have to wait while the
            engine tokenizes the long text.
    """
    _check_prompts("sequences", request.body.sequences, request.wanted, model)


def _check_prompts(name: str, given: Any, wanted: Sequence[SampleRequest], model: Model) -> None:
    """Check each prompt. `name` is the request field that holds the prompts, and `given` is its value."""
    is_list = len(wanted) > 1 or _holds_prompts(given)
    for one in wanted:
        at = f"{name}[{one.prompt_index}]" if is_list else name
        if isinstance(one.prompt, str):
            _refuse_long(overlong_text(at, one.prompt, model))
        elif isinstance(one.prompt, tuple):
            _refuse_long(overlong_text(at, json.dumps(one.prompt, ensure_ascii=False), model))
        else:
            check_token_ids(at, one.prompt, model.vocab_size)


def _holds_prompts(prompts: Any) -> bool:
    """Return whether `prompts` is a list of prompts rather than one prompt."""
    return isinstance(prompts, list) and not isinstance(prompts[0], int | dict)


def _refuse_long(sentence: str | None) -> None:
    if sentence is not None:
        raise BadRequestError(sentence, status=413)
