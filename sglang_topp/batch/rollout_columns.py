"""Convert the client's `Rollout` objects to the arguments of `collate_rl`: lists with one row per rollout.

`collate_rl` builds a training batch from these lists. `collate_rollouts` calls `rollout_columns` to
convert `Rollout` objects to these lists, and then builds the same kind of batch.

Shape legend: B rollouts. Rollout i has P_i prompt tokens and R_i response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from sglang_topp.batch.tensors_to_numpy import to_host
from sglang_topp.batch.write_ragged_rows import RaggedRows, count_rows
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError

__all__ = ["RolloutColumns", "RolloutLike", "rollout_columns"]


class RolloutLike(Protocol):
    """The attributes of `sglang_topp_client.Rollout` that `collate_rollouts` reads."""

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """int32 [P_i]: the prompt's tokens."""

    @property
    def output_ids(self) -> NDArray[np.int32]:
        """int32 [R_i]: the response's tokens: generated tokens, and tokens that tools appended."""

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """float32 [R_i]: each token's log-prob over the vocabulary, or 0 for tokens that tools appended."""

    @property
    def loss_mask(self) -> NDArray[np.int8]:
        """int8 [R_i]: 1 for generated tokens, 0 for tokens that tools appended.

        Count the ones with `loss_mask.sum()`. Python's built-in `sum` overflows above 127.
        """

    @property
    def candidates(self) -> CandidateSets | None:
        """The candidate sets of the R_i response tokens, or None if no sets were requested."""


class RolloutColumns(TypedDict):
    """The first six arguments of `collate_rl`."""

    prompts: RaggedRows
    responses: RaggedRows
    rewards: RaggedRows
    loss_masks: RaggedRows
    logprobs: RaggedRows
    candidates: Sequence[CandidateSets] | None


def rollout_columns(
    rollouts: Sequence[RolloutLike], rewards: Sequence[Any], candidates: Sequence[CandidateSets] | None
) -> RolloutColumns:
    """Check the arguments of `collate_rollouts`, and convert them to the arguments of `collate_rl`."""
    if not count_rows("rollouts", rollouts, "a sequence of rollouts"):
        raise InvalidInputError("rollouts: got none, expected at least one")
    if (i := next((i for i, one in enumerate(rollouts) if not hasattr(one, "output_ids")), None)) is not None:
        raise InvalidInputError(f"rollouts[{i}]: got {type(rollouts[i]).__name__}, expected a Rollout")
    own = [one.candidates for one in rollouts]
    with_sets = [sets for sets in own if sets is not None]
    if with_sets and len(with_sets) < len(own):
        raise InvalidInputError(
            f"rollouts[{own.index(None)}]: has no candidate sets, but {len(with_sets)} of {len(own)} rollouts"
            " have them; expected sets in all or in none"
        )
    if candidates is None and with_sets:
        candidates = with_sets
    return {
        "prompts": [one.prompt_ids for one in rollouts],
        "responses": [one.output_ids for one in rollouts],
        "rewards": _per_token(rewards, [len(one.output_ids) for one in rollouts]),
        "loss_masks": [one.loss_mask for one in rollouts],
        "logprobs": [sets.masked_logprobs for sets in with_sets] or [one.logprobs for one in rollouts],
        "candidates": candidates,
    }


def _per_token(rewards: Sequence[Any], lengths: list[int]) -> list[Any]:
    """Return each rollout's rewards per token. If a reward is one number, every token gets the number."""
    if (num_rewards := count_rows("rewards", rewards, "one entry per rollout")) != len(lengths):
        raise InvalidInputError(f"rewards: got {num_rewards}, expected {len(lengths)}, one per rollout")
    rows: list[Any] = []
    for i, (reward, length) in enumerate(zip(to_host(list(rewards)), lengths, strict=True)):
        if np.ndim(reward):
            rows.append(reward)
        elif np.asarray(reward).dtype.kind in "biuf":
            rows.append(np.full(length, reward, np.float64))
        else:
            raise InvalidInputError(
                f"rewards[{i}]: got {reward!r}, expected a number, or one number per token"
            )
    return rows
