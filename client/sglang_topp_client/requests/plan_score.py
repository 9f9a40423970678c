"""Requests for `score`: check a caller's arguments, and build one `ScoreRequest` per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError, describe
from sglang_topp_client.requests.plan_generate import (
    SampleRequest,
    TopLogprobsP,
    one_each,
    thresholds_of,
)
from sglang_topp_client.requests.prompts import Prompt, prompts_of
from sglang_topp_client.rollout import DISTRIBUTION, Rollout

__all__ = ["ScoreRequest", "Sequences", "Start", "plan_scores"]

Sequences: TypeAlias = (
    str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | Rollout | Sequence[Rollout]
)
Start: TypeAlias = int | Sequence[int | None] | None

# With these sampling parameters, the engine scores at temperature 1 and generates no token.
_NO_TOKEN = {"max_new_tokens": 0, "temperature": 1.0}
_MAX_START = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class ScoreRequest(SampleRequest):
    """One sequence to score, sent as a prompt with `max_new_tokens` 0.

    Attributes:
        start: the first scored position, at least 1.
    """

    start: int = 1


def plan_scores(
    sequences: Sequences, top_logprobs_p: TopLogprobsP = None, start: Start = None
) -> list[ScoreRequest]:
    """Check a caller's arguments, and build one request per sequence.

    Args:
        sequences: one sequence or several. A sequence is text, token ids, or a Rollout, whose prompt and
            output tokens form the sequence.
        top_logprobs_p: one threshold for all sequences, or one threshold per sequence. With None or 0, the
            scores have no sets.
        start: the first scored position, one for all sequences or one per sequence. By default (None), a
            Rollout is scored from its first generated token on, and any other sequence from position 1 on.

    Raises:
        InvalidInputError: an argument is wrong; the error names the argument.
    """
    rollouts = _rollouts(sequences)
    prompts = prompts_of("sequences", list(map(_ids, rollouts)) if rollouts else sequences)
    count = len(prompts)
    thresholds = thresholds_of(top_logprobs_p, count, per="sequence")
    given: list[Any] = [start] * count
    names = ["start"] * count
    if hasattr(start, "__len__") and not isinstance(start, str | bytes):
        given = list(one_each("start", start, count, per="sequence"))
        names = [f"start[{i}]" for i in range(count)]
    firsts = [len(rollout.prompt_ids) for rollout in rollouts] or [1] * count
    # A gateway sends a request with the rollout's routing key to the server that generated the rollout. This
    # server probably has the sequence in its prefix cache.
    keys = [rollout.routing_key for rollout in rollouts] or [""] * count
    return [
        ScoreRequest(
            prompt_index=index,
            prompt=prompt,
            sampling_params=_NO_TOKEN,
            samples=(0,),
            top_logprobs_p=threshold,
            top_logprobs_source=None if threshold is None else DISTRIBUTION,
            routing_key=keys[index],
            start=firsts[index] if given[index] is None else _start(names[index], given[index], prompt),
        )
        for index, (prompt, threshold) in enumerate(zip(prompts, thresholds, strict=True))
    ]


def _rollouts(sequences: Any) -> list[Rollout]:
    """Return `sequences` as a list of Rollouts, or an empty list if `sequences` holds no Rollout."""
    if isinstance(sequences, Rollout):
        return [sequences]
    if not isinstance(sequences, list | tuple) or not any(isinstance(one, Rollout) for one in sequences):
        return []
    for i, one in enumerate(sequences):
        if not isinstance(one, Rollout):
            raise InvalidInputError(
                f"sequences[{i}]: got {type(one).__name__} among Rollouts, expected one kind in one request"
            )
    return list(sequences)


def _ids(rollout: Rollout) -> NDArray[np.int32]:
    return np.concatenate([rollout.prompt_ids, rollout.output_ids])


def _start(name: str, given: Any, prompt: Prompt) -> int:
    if isinstance(given, bool) or not isinstance(given, int | np.integer):
        raise InvalidInputError(f"{name}: got {describe(given)}, expected a position of 1 or more, or None")
    if given < 1:
        raise InvalidInputError(
            f"{name}: got {describe(given)}, expected 1 or more: the token at position 0 has no distribution,"
            " because no token precedes it"
        )
    # For a text, the client cannot check that `start` is within the sequence, because only the engine knows
    # how many tokens the text has.
    most = _MAX_START if isinstance(prompt, str) else len(prompt)
    if given > most:
        raise InvalidInputError(
            f"{name}: got {describe(given)}, expected at most {most}"
            + ("" if isinstance(prompt, str) else ", the number of the sequence's tokens")
        )
    return int(given)
