"""Decode `rollouts` and `resumed_tokens`, the fields of `POST /rollouts` that resume earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import InvalidInputError, WireError, describe
from sglang_topp_client.codecs.rollout_json import rollout_from_json
from sglang_topp_client.requests.plan_generate import SampleRequest
from sglang_topp_client.types.rollout import Rollout

__all__ = ["read_resumed_tokens", "read_rollouts"]


def read_rollouts(records: Any) -> list[Rollout]:
    """Decode the JSON records in the body's `rollouts` field into `Rollout` objects.

    Raises:
        InvalidInputError: a record is not a valid rollout; the error names the record's index and field.
    """
    if not isinstance(records, list):
        raise InvalidInputError(f"rollouts: got {type(records).__name__}, expected a list of records")
    rollouts = []
    for i, record in enumerate(records):
        try:
            rollouts.append(rollout_from_json(record, may_be_extended=True))
        except WireError as error:
            raise InvalidInputError(f"rollouts[{i}].{error.field}: {error.problem}") from None
        except InvalidInputError as error:
            raise InvalidInputError(f"rollouts[{i}].{error}") from None
    return rollouts


def read_resumed_tokens(given: Any, wanted: Sequence[SampleRequest]) -> list[SampleRequest]:
    """Return a copy of each `SampleRequest` in `wanted`, with its `resumed_tokens` set from `given`.

    `resumed_tokens` is the number of token ids at a prompt's end that belong to an earlier answer.

    Args:
        given: the body's `resumed_tokens`, which is one number for all requests, or a list with one number
            per request. If `given` is None, the function returns the requests unchanged.
        wanted: one `SampleRequest` per prompt.

    Raises:
        InvalidInputError: `given` has the wrong number of values, a value is not an integer of 0 or more, or
            a value exceeds the number of token ids in the request's prompt. A prompt that is a text or a list
            of chat messages counts as 0 token ids.
    """
    if given is None:
        return list(wanted)
    counts = given if isinstance(given, list) else [given] * len(wanted)
    if len(counts) != len(wanted):
        raise InvalidInputError(f"{RESUMED}: got {len(counts)} values for {len(wanted)} prompts")
    for count, one in zip(counts, wanted, strict=True):
        if count is not None and (type(count) is not int or count < 0):
            raise InvalidInputError(f"{RESUMED}: got {describe(count)}, expected a whole number of 0 or more")
        if count and (not isinstance(one.prompt, list) or count > len(one.prompt)):
            prompt = {str: "a text", tuple: "chat messages"}.get(type(one.prompt), f"{len(one.prompt)} ids")
            raise InvalidInputError(
                f"{RESUMED}: got {describe(count)} with {prompt} as prompt {one.prompt_index}, expected token"
                " ids that end with this many tokens of the answer"
            )
    return [replace(one, resumed_tokens=count) for count, one in zip(counts, wanted, strict=True)]
