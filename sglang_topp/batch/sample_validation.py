"""Validate RL and SFT samples before they are collated or packed, and read them from `Rollout` objects.

Shape legend: B samples. Sample i has P_i prompt tokens, R_i response tokens, and L_i tokens in all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets
from sglang_topp.batch.loss_masks import mask_rows
from sglang_topp.batch.write_ragged_rows import (
    RaggedRows,
    as_integers,
    check_lengths,
    count_rows,
    field_dtype,
    host_rows,
    row_lengths,
)
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.to_numpy import to_host

__all__ = [
    "Examples",
    "RolloutLike",
    "Rollouts",
    "check_sets_match_responses",
    "read_examples",
    "read_rollouts",
    "rollout_columns",
]


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


@dataclass(frozen=True)
class Rollouts:
    """Validated RL samples in host memory.

    Row i of `prompts` has P_i values. Row i of every other list of rows has R_i values. `prompt_lengths[i]`
    is P_i, and `response_lengths[i]` is R_i.
    """

    prompts: RaggedRows
    responses: RaggedRows
    rewards: RaggedRows
    loss_masks: list[NDArray[np.int8]]
    logprobs: RaggedRows | None
    candidates: BatchCandidateSets | None
    fields: dict[str, RaggedRows]
    """The caller's own fields, by name: rows of integers or of floats."""
    prompt_lengths: NDArray[np.int64]
    response_lengths: NDArray[np.int64]


@dataclass(frozen=True)
class Examples:
    """Validated SFT samples in host memory.

    Sample i has L_i ids, and a loss mask over its last `num_actions[i]` ids. `num_actions[i]` is below L_i,
    because nothing predicts a sample's first token.
    """

    ids: RaggedRows
    loss_masks: list[NDArray[np.int8]]
    lengths: NDArray[np.int64]
    num_actions: NDArray[np.int64]


def read_rollouts(
    prompts: RaggedRows,
    responses: RaggedRows,
    rewards: RaggedRows,
    loss_masks: RaggedRows,
    logprobs: RaggedRows | None,
    candidates: Sequence[CandidateSets] | None,
    fields: Mapping[str, RaggedRows] | None,
    own_names: Collection[str],
) -> Rollouts:
    """Check RL samples. The arguments and errors are those of `collate_rl`.

    Args:
        own_names: the names of the standard fields of the batch that the caller builds. A name in `fields`
            must not be in `own_names`.
    """
    prompt_lengths, lengths = row_lengths("prompts", prompts), row_lengths("responses", responses)
    if len(lengths) != len(prompt_lengths):
        raise InvalidInputError(
            f"responses: got {len(lengths)} samples, expected {len(prompt_lengths)}, as in prompts"
        )
    if (empty := np.flatnonzero((prompt_lengths == 0) & (lengths > 0))).size:
        raise InvalidInputError(
            f"prompts[{empty[0]}]: is empty, so nothing predicts the response's first token; start it with"
            " the tokenizer's first special token"
        )
    check_lengths("rewards", rewards, lengths, "responses")
    check_lengths("loss_masks", loss_masks, lengths, "responses")
    if logprobs is not None:
        check_lengths("logprobs", logprobs, lengths, "responses")
    if candidates is not None:
        check_lengths("candidates", candidates, lengths, "responses")
        for i, sets in enumerate(candidates):
            if not isinstance(sets, CandidateSets):
                raise InvalidInputError(f"candidates[{i}]: got {type(sets).__name__}, expected CandidateSets")
    for name, rows in (fields or {}).items():
        if name in own_names:
            raise InvalidInputError(
                f"fields: got {name!r}, which is a field of the batch; choose another name"
            )
        check_lengths(name, rows, lengths, "responses")
    return Rollouts(
        host_rows("prompts", prompts, np.int64),
        host_rows("responses", responses, np.int64),
        host_rows("rewards", rewards, np.float32),
        mask_rows("loss_masks", loss_masks),
        None if logprobs is None else host_rows("logprobs", logprobs, np.float32),
        None if candidates is None else BatchCandidateSets.from_rows(candidates),
        {name: host_rows(name, rows, field_dtype(rows)) for name, rows in (fields or {}).items()},
        prompt_lengths,
        lengths,
    )


def read_examples(
    input_ids: RaggedRows, num_actions: Sequence[int], loss_masks: RaggedRows | None
) -> Examples:
    """Check SFT samples. The arguments and errors are those of `collate_sft`."""
    lengths = row_lengths("input_ids", input_ids)
    actions = as_integers("num_actions", num_actions, f"{len(lengths)} integers")
    if len(actions) != len(lengths):
        raise InvalidInputError(
            f"num_actions: got {len(actions)} of them, expected {len(lengths)} integers, as in input_ids"
        )
    if (wrong := np.flatnonzero((actions < 0) | (actions > lengths))).size:
        i = int(wrong[0])
        raise InvalidInputError(
            f"num_actions[{i}]: got {actions[i]}, expected 0 to {lengths[i]}, the tokens there are"
        )
    if loss_masks is None:
        masks = [np.ones(count, np.int8) for count in actions.tolist()]
    else:
        check_lengths("loss_masks", loss_masks, actions, "num_actions")
        masks = mask_rows("loss_masks", loss_masks)
    trained = np.minimum(actions, np.maximum(lengths - 1, 0))
    masks = [mask[len(mask) - count :] for mask, count in zip(masks, trained.tolist(), strict=True)]
    return Examples(host_rows("input_ids", input_ids, np.int64), masks, lengths, trained)


def check_sets_match_responses(
    candidates: BatchCandidateSets, ids: NDArray[np.int64], masks: Sequence[NDArray[np.int8]]
) -> None:
    """Check that sampled tokens equal the responses' tokens, and that tokens with loss mask 1 have sets.

    Args:
        candidates: B rows, T positions in all.
        ids: int64 [T], the responses' tokens, row after row.
        masks: B loss masks.

    Raises:
        InvalidInputError: the sampled token of a candidate set differs from the response's token at the same
            position, or a token with loss mask 1 has no candidate set. The message names the first
            invalid position.
    """

    def where(position: int) -> tuple[int, int]:
        row = int(np.searchsorted(candidates.row_offsets, position, side="right")) - 1
        return row, position - int(candidates.row_offsets[row])

    sets = candidates.sets
    replayed = sets.sizes > 0
    if (wrong := np.flatnonzero(replayed & (sets.sampled_ids != ids))).size:
        row, t = where(int(wrong[0]))
        raise InvalidInputError(
            f"candidates[{row}]: the token sampled at position {t} is {sets.sampled_ids[wrong[0]]},"
            f" but responses[{row}][{t}] is {ids[wrong[0]]}"
        )
    if (wrong := np.flatnonzero(~replayed & (np.concatenate(masks) != 0))).size:
        row, t = where(int(wrong[0]))
        raise InvalidInputError(
            f"candidates[{row}]: position {t} has no candidates, but its loss mask is 1; expected 0, the"
            " policy did not sample that token"
        )


def rollout_columns(
    rollouts: Sequence[RolloutLike], rewards: Sequence[Any], candidates: Sequence[CandidateSets] | None
) -> dict[str, Any]:
    """Check the arguments of `collate_rollouts`, and convert them to the first six of `collate_rl`."""
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
