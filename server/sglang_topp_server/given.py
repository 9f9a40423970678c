"""What a request brings of its answers: records to go on with, or prompts that end with what is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp.resumable import RESUMED
from sglang_topp_client.checks import shown
from sglang_topp_client.record import from_record
from sglang_topp_client.request import SampleRequest
from sglang_topp_client.rollout import Rollout

__all__ = ["read_resumed_tokens", "read_rollouts"]


def read_rollouts(records: Any) -> list[Rollout]:
    """The rollouts of records.

    Raises:
        InvalidInputError: the first that is none, by its place and field.
    """
    if not isinstance(records, list):
        raise InvalidInputError(f"rollouts: got {type(records).__name__}, expected a list of records")
    rollouts = []
    for i, record in enumerate(records):
        try:
            rollouts.append(from_record(record, may_be_extended=True))
        except WireError as error:
            raise InvalidInputError(f"rollouts[{i}].{error.field}: {error.problem}") from None
        except InvalidInputError as error:
            raise InvalidInputError(f"rollouts[{i}].{error}") from None
    return rollouts


def read_resumed_tokens(given: Any, wanted: Sequence[SampleRequest]) -> list[SampleRequest]:
    """The same requests with `resumed_tokens`, one for all or one each.

    Raises:
        InvalidInputError: it is no such number, or more than a prompt has.
    """
    if given is None:
        return list(wanted)
    counts = given if isinstance(given, list) else [given] * len(wanted)
    if len(counts) != len(wanted):
        raise InvalidInputError(f"{RESUMED}: got {len(counts)} values for {len(wanted)} prompts")
    for count, one in zip(counts, wanted, strict=True):
        if count is not None and (type(count) is not int or count < 0):
            raise InvalidInputError(f"{RESUMED}: got {shown(count)}, expected a whole number of 0 or more")
        if count and (isinstance(one.prompt, str) or count > len(one.prompt)):
            there = "a text" if isinstance(one.prompt, str) else f"{len(one.prompt)} ids"
            raise InvalidInputError(
                f"{RESUMED}: got {shown(count)} with {there} as prompt {one.prompt_index}, expected token ids"
                " that end with the tokens to go on from"
            )
    return [replace(one, resumed_tokens=count) for count, one in zip(counts, wanted, strict=True)]
