"""What a caller asks to have scored, checked before anything is sent: one `ScoreRequest` per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sglang_topp.errors import InvalidInputError
from sglang_topp_client.checks import shown
from sglang_topp_client.request import (
    DISTRIBUTION,
    SampleRequest,
    TopLogprobsP,
    one_each,
    prompts_of,
    thresholds_of,
)
from sglang_topp_client.rollout import Rollout

__all__ = ["ScoreRequest", "Sequences", "Start", "plan_scores"]

Sequences: TypeAlias = (
    str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Rollout | Sequence[Rollout]
)
Start: TypeAlias = int | Sequence[int | None] | None

# The engine is asked for no token, at the temperature that scores are of.
_NO_TOKEN = {"max_new_tokens": 0, "temperature": 1.0}
_MAX_START = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class ScoreRequest(SampleRequest):
    """One sequence: a prompt of which the engine generates nothing, once.

    Attributes:
        start: the first position that is scored, from 1.
    """

    start: int = 1


def plan_scores(
    sequences: Sequences, top_logprobs_p: TopLogprobsP = None, start: Start = None
) -> list[ScoreRequest]:
    """Check a caller's arguments and spread them over the sequences.

    Args:
        sequences: one text, several texts, the token ids of one sequence, or of several; a Rollout, or
            several, whose prompt and output are one sequence.
        top_logprobs_p: one threshold for all, or one per sequence; None or 0 for no candidate sets.
        start: the first position that is scored, one for all or one per sequence. None is 1, and in a
            Rollout that of the first generated token.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
    """
    ids_or_texts, defaults = _of_rollouts(sequences)
    prompts = prompts_of("sequences", ids_or_texts)
    count = len(prompts)
    thresholds = thresholds_of(top_logprobs_p, count, per="sequence")
    given: list[Any] = [start] * count
    names = ["start"] * count
    if hasattr(start, "__len__") and not isinstance(start, str | bytes):
        given = list(one_each("start", start, count, per="sequence"))
        names = [f"start[{i}]" for i in range(count)]
    firsts = defaults or [1] * count
    return [
        ScoreRequest(
            prompt_index=index,
            prompt=prompt,
            sampling_params=_NO_TOKEN,
            samples=(0,),
            top_logprobs_p=threshold,
            top_logprobs_source=None if threshold is None else DISTRIBUTION,
            start=firsts[index] if given[index] is None else _start(names[index], given[index], prompt),
        )
        for index, (prompt, threshold) in enumerate(zip(prompts, thresholds, strict=True))
    ]


def _of_rollouts(sequences: Any) -> tuple[Any, list[int]]:
    """Rollouts as lists of ids, and where their outputs start; anything else as it is."""
    if isinstance(sequences, Rollout):
        sequences = [sequences]
    if not isinstance(sequences, list | tuple) or not any(isinstance(one, Rollout) for one in sequences):
        return sequences, []
    for i, one in enumerate(sequences):
        if not isinstance(one, Rollout):
            raise InvalidInputError(
                f"sequences[{i}]: got {type(one).__name__} among Rollouts, expected one kind in one request"
            )
    ids = [np.concatenate([one.prompt_ids, one.output_ids]) for one in sequences]
    return ids, [len(one.prompt_ids) for one in sequences]


def _start(name: str, given: Any, prompt: str | list[int]) -> int:
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        raise InvalidInputError(f"{name}: got {shown(given)}, expected a position of 1 or more, or None")
    if given < 1:
        raise InvalidInputError(
            f"{name}: got {shown(given)}, expected 1 or more: nothing stands before the token at position 0,"
            " so there is no distribution that it is one of"
        )
    # Of a text, the engine counts the tokens.
    most = _MAX_START if isinstance(prompt, str) else len(prompt)
    if given > most:
        raise InvalidInputError(
            f"{name}: got {shown(given)}, expected at most {most}"
            + ("" if isinstance(prompt, str) else ", the number of the sequence's tokens")
        )
    return int(given)
