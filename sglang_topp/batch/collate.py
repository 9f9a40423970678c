"""Collate samples of different lengths into the padded tensors of one training batch.

Shape legend for RL: B samples. Sample i has P_i prompt tokens and R_i response tokens. R is the maximum of
R_i, and S is the maximum of P_i + R_i.

Shape legend for SFT: B samples. A sample is one sequence, and S is the length of the longest sequence. The
loss of sample i covers its last `num_actions[i]` tokens, but never its first token, which nothing predicts. A
is the largest number of tokens that the loss of a sample covers.

Every field is right-aligned, so all samples end in the last column. Two RL samples in `sequences`::

    | pad     prompt   prompt   response |
    | prompt  response response response |
              |<---------- R ----------->|
    |<--------------- S ---------------->|

`tests/batch/reference_loops.py` has slow versions of both, which define the results.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets
from sglang_topp.batch.sample_validation import (
    RolloutLike,
    Rollouts,
    check_sets_match_responses,
    read_examples,
    read_rollouts,
    rollout_columns,
)
from sglang_topp.batch.write_ragged_rows import (
    RaggedRows,
    as_integer,
    field_dtype,
    right_align,
    right_ones,
    write_row,
)
from sglang_topp.candidates import CandidateSets

__all__ = ["RLBatch", "SFTBatch", "collate_rl", "collate_rollouts", "collate_sft"]


class RLBatch(TypedDict):
    """The batch that `collate_rl` returns, in CPU memory.

    R is the length of the longest response, and S is the length of the longest sample. The caller's `fields`
    are further entries, int64 or float32 [B, R].

    At column t of `sequences`, a causal model predicts the token in column t + 1. The slice
    `[:, -R - 1 : -1]` of the model's output therefore lines up with every [B, R] field.
    """

    sequences: torch.Tensor
    """int64 [B, S], prompt and response, with `pad_token_id` before the prompt."""
    attention_mask: torch.Tensor
    """int64 [B, S], 1 on prompt and response."""
    response_mask: torch.Tensor
    """int64 [B, R], 1 on the response."""
    loss_mask: torch.Tensor
    """float32 [B, R], each 0 or 1."""
    rewards: torch.Tensor
    """float32 [B, R], one reward per response token."""
    logprobs: NotRequired[torch.Tensor]
    """float32 [B, R], the response tokens' log-probs. Present only if the caller passed log-probs."""
    candidates: NotRequired[BatchCandidateSets]
    """One row per sample: the candidate sets of the R_i response tokens. Present only if the caller passed
    candidate sets."""


class SFTBatch(TypedDict):
    """The CPU tensors that `collate_sft` returns.

    The slice `[:, -A - 1 : -1]` of a causal model's output lines up with the loss mask.
    """

    sequences: torch.Tensor
    """int64 [B, S], the token ids, with `pad_token_id` before them."""
    attention_mask: torch.Tensor
    """int64 [B, S], 0 on padding and 1 elsewhere."""
    loss_mask: torch.Tensor
    """int64 [B, A], 0 or 1 for each of the last A tokens. With `normalize_loss_mask`, the mask is
    float32 and divided by its sum over the batch."""


def collate_rl(
    prompts: RaggedRows,
    responses: RaggedRows,
    rewards: RaggedRows,
    loss_masks: RaggedRows,
    logprobs: RaggedRows | None = None,
    candidates: Sequence[CandidateSets] | None = None,
    *,
    fields: Mapping[str, RaggedRows] | None = None,
    pad_token_id: int,
    max_seq_len: int | None = None,
) -> RLBatch:
    """Collate RL samples into a padded batch. Each argument has one row per sample.

    Args:
        prompts: B rows of token ids. A prompt may be empty only if its response is empty too. A row of any
            argument is a list, a 1-D array, or a 1-D tensor on any device, with or without grad.
        responses: B rows of token ids.
        rewards: B rows of R_i numbers, one per token. The numbers are rounded to float32. A number beyond the
            range of float32 becomes infinite.
        loss_masks: B rows of R_i values, each 0 or 1.
        logprobs: B rows of R_i numbers, rounded to float32, or None.
        candidates: the CandidateSets of each sample's R_i positions, or None.
        fields: further fields by name, such as another model's log-probs. A field has B rows; row i has R_i
            values. If all rows of a field are integer arrays or integer tensors, the field becomes int64. All
            other fields become float32, even if their rows are lists of integers.
        pad_token_id: fills `sequences` before the prompt.
        max_seq_len: the length in tokens above which a sample causes a warning. Nothing is truncated.

    Raises:
        InvalidInputError: an argument is invalid. The message names the field and the sample. Each row of
            rewards, masks, log-probs, sets, and fields must have the length of its response. The prompt of a
            response must not be empty, because nothing would predict the first token. The sampled token of a
            candidate set must be the response's token at the same position. A token with loss mask 1 must
            have a candidate set. A name in `fields` must not be a standard field of the batch. `pad_token_id`
            must be an integer.

    Warns:
        UserWarning: a sample is longer than `max_seq_len`.
    """
    samples = read_rollouts(
        prompts, responses, rewards, loss_masks, logprobs, candidates, fields, RLBatch.__annotations__
    )
    return _collate(samples, pad_token_id, max_seq_len)


def collate_rollouts(
    rollouts: Sequence[RolloutLike],
    rewards: Sequence[Any],
    *,
    candidates: Sequence[CandidateSets] | None = None,
    fields: Mapping[str, RaggedRows] | None = None,
    pad_token_id: int,
    max_seq_len: int | None = None,
) -> RLBatch:
    """Collate a client's `Rollout` objects into a batch like that of `collate_rl`.

    The batch's `logprobs` are the log-probs under the policy that drew the tokens. These log-probs belong in
    the denominator of importance ratios. For rollouts with candidate sets, each token's log-prob is
    normalized over the token's set in the rollout. For rollouts without sets, each token's log-prob is
    normalized over the whole vocabulary. Tokens that `Rollout.extend` appended have a loss mask of 0.

    Args:
        rollouts: B rollouts, for example from `RolloutClient.generate` or `load_rollouts`. Either all
            rollouts or none have candidate sets.
        rewards: for each rollout, either one number for the whole response (such as an advantage), or one
            number per response token.
        candidates: the sets that replace the rollouts' own sets in the batch, for example a teacher's sets
            (`Score.candidates`).
        fields: as in `collate_rl`.
        pad_token_id: fills `sequences` before the prompt.
        max_seq_len: the length in tokens above which a sample causes a warning. Nothing is truncated.

    Raises:
        InvalidInputError: an argument is invalid (see `collate_rl`), there are no rollouts, only some
            rollouts have candidate sets, or the rollouts' sets have no log-probs.

    Warns:
        UserWarning: a sample is longer than `max_seq_len`.
    """
    columns = rollout_columns(rollouts, rewards, candidates)
    samples = read_rollouts(**columns, fields=fields, own_names=RLBatch.__annotations__)
    return _collate(samples, pad_token_id, max_seq_len)


def _collate(samples: Rollouts, pad_token_id: int, max_seq_len: int | None) -> RLBatch:
    totals, actions = samples.prompt_lengths + samples.response_lengths, samples.response_lengths
    longest, width = int(totals.max()), int(actions.max())
    if max_seq_len is not None and longest > max_seq_len:
        i = int(totals.argmax())
        warnings.warn(
            f"sample {i} has {longest} tokens, more than max_seq_len {max_seq_len}; nothing is cut,"
            " check the limits of the rollout",
            stacklevel=3,
        )
    sequences = _padding(totals, longest, pad_token_id)
    middles = (longest - actions).tolist()
    for i, (line, prompt, response) in enumerate(
        zip(sequences, samples.prompts, samples.responses, strict=True)
    ):
        middle = middles[i]
        write_row(line[middle - len(prompt) : middle], prompt, "prompts", i)
        write_row(line[middle:], response, "responses", i)
    if samples.candidates is not None:
        ids = np.concatenate([line[middle:] for line, middle in zip(sequences, middles, strict=True)])
        check_sets_match_responses(samples.candidates, ids, samples.loss_masks)
    batch: RLBatch = {
        "sequences": torch.from_numpy(sequences),
        "attention_mask": torch.from_numpy(right_ones(totals, longest)),
        "response_mask": torch.from_numpy(right_ones(actions, width)),
        "loss_mask": torch.from_numpy(
            right_align("loss_masks", samples.loss_masks, actions, width, np.float32)
        ),
        "rewards": torch.from_numpy(right_align("rewards", samples.rewards, actions, width, np.float32)),
    }
    if samples.logprobs is not None:
        batch["logprobs"] = torch.from_numpy(
            right_align("logprobs", samples.logprobs, actions, width, np.float32)
        )
    if samples.candidates is not None:
        batch["candidates"] = samples.candidates
    for name, rows in samples.fields.items():
        values = right_align(name, rows, actions, width, field_dtype(rows))
        cast(dict[str, Any], batch)[name] = torch.from_numpy(values)
    return batch


def collate_sft(
    input_ids: RaggedRows,
    num_actions: Sequence[int],
    loss_masks: RaggedRows | None = None,
    *,
    normalize_loss_mask: bool = False,
    pad_token_id: int,
) -> SFTBatch:
    """Collate supervised examples.

    Args:
        input_ids: B rows of token ids, prompt and answer together: lists, 1-D arrays, or 1-D tensors.
        num_actions: B integers, the number of tokens to train on at the end of each row. The first token of a
            row is never trained, because nothing predicts it.
        loss_masks: B rows of num_actions[i] values, each 0 or 1. None means all 1.
        normalize_loss_mask: divide the mask by its sum over the batch, as in `PackedBatch`. With the divided
            mask, the sum of `loss * mask` over the batch is the mean loss of the trained tokens. A mask of
            all zeros stays 0.
        pad_token_id: the token id that pads the rows of `sequences` on the left.

    Raises:
        InvalidInputError: lengths do not match, or a value has the wrong type. The message names the field
            and the sample.
    """
    samples = read_examples(input_ids, num_actions, loss_masks)
    longest, width = int(samples.lengths.max()), int(samples.num_actions.max())
    sequences = _padding(samples.lengths, longest, pad_token_id)
    for i, (line, ids) in enumerate(zip(sequences, samples.ids, strict=True)):
        write_row(line[longest - len(ids) :], ids, "input_ids", i)
    dtype = np.float32 if normalize_loss_mask else np.int64
    loss_mask = right_align("loss_masks", samples.loss_masks, samples.num_actions, width, dtype)
    if normalize_loss_mask:
        loss_mask *= 1 / max(1, int(np.count_nonzero(loss_mask)))
    return {
        "sequences": torch.from_numpy(sequences),
        "attention_mask": torch.from_numpy(right_ones(samples.lengths, longest)),
        "loss_mask": torch.from_numpy(loss_mask),
    }


def _padding(lengths: NDArray[np.int64], width: int, pad_token_id: int) -> NDArray[np.int64]:
    """Return int64 [B, width], with `pad_token_id` in all but the last `lengths[i]` columns of row i.

    The caller must write the last `lengths[i]` columns of each row i.
    """
    pad_token_id = as_integer("pad_token_id", pad_token_id)
    if pad_token_id == 0:
        return np.zeros((len(lengths), width), np.int64)  # `np.zeros` is faster than filling `np.empty`
    out = np.empty((len(lengths), width), np.int64)
    for line, start in zip(out, (width - lengths).tolist(), strict=True):
        line[:start] = pad_token_id
    return out
