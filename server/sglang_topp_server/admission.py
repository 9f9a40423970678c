"""Does the engine survive a request? Asked of every one, once the engine has told how large its model is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_topp.engine_request import (
    GRAMMARS,
    Model,
    check_sampling_params,
    check_token_ids,
    overlong_param,
    overlong_text,
)
from sglang_topp.errors import BadRequestError, InvalidInputError
from sglang_topp_client.request import SampleRequest
from sglang_topp_server.schema import RolloutRequest
from sglang_topp_server.score_schema import ScoreBody

__all__ = ["check_admissible", "check_scores"]


def check_admissible(request: RolloutRequest, model: Model, *, takes_grammars: bool) -> None:
    """Check a request that `parse_request` has read against the model that is to serve it.

    Args:
        request: what is asked for.
        model: how large the model is.
        takes_grammars: whether the engine survives a grammar that leaves no token to draw; which ones do,
            nobody can tell beforehand.

    Raises:
        InvalidInputError: 400, with a sentence that names the field, what it got and what it takes.
        BadRequestError: 413, a text is longer than the engine can tokenise while others wait.
    """
    for i, rollout in request.given.items():
        check_token_ids(f"rollouts[{i}].prompt_ids", rollout.prompt_ids, model.vocab_size)
        check_token_ids(f"rollouts[{i}].output_ids", rollout.output_ids, model.vocab_size)
    fresh = [one for one in request.wanted if one.prompt_index not in request.given]
    _check_prompts("prompts", request.prompts, fresh, model)
    params = request.sampling_params
    each = params if isinstance(params, list) else [params or {}]
    for i, given in enumerate(each):
        name = f"sampling_params[{i}]" if isinstance(params, list) else "sampling_params"
        _refuse_long(overlong_param(name, given))
        check_sampling_params(name, given, model)
        if not takes_grammars and (key := next((key for key in GRAMMARS if given.get(key)), None)):
            raise InvalidInputError(
                f"{name}.{key}: got one, expected none: a grammar that leaves no token to draw would end this"
                " engine; start it with SGLANG_SANITIZE_NAN_LOGITS=1, as `sglang-topp serve` does"
            )


def check_scores(request: ScoreBody, model: Model) -> None:
    """Check a request that `parse_scores` has read against the model that is to score.

    Raises:
        InvalidInputError: 400, with a sentence that names the field, what it got and what it takes.
        BadRequestError: 413, a text is longer than the engine can tokenise while others wait.
    """
    _check_prompts("sequences", request.sequences, request.wanted, model)


def _check_prompts(name: str, given: Any, wanted: Sequence[SampleRequest], model: Model) -> None:
    """Check each prompt; `name` and `given` are the field's."""
    is_list = len(wanted) > 1 or _holds_prompts(given)
    for one in wanted:
        at = f"{name}[{one.prompt_index}]" if is_list else name
        if isinstance(one.prompt, str):
            _refuse_long(overlong_text(at, one.prompt, model))
        else:
            check_token_ids(at, one.prompt, model.vocab_size)


def _holds_prompts(prompts: Any) -> bool:
    """Whether a list is one of prompts, and not the token ids of one."""
    return isinstance(prompts, list) and not isinstance(prompts[0], int)


def _refuse_long(sentence: str | None) -> None:
    if sentence is not None:
        raise BadRequestError(sentence, status=413)
