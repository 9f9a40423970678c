"""Collation: samples of different lengths -> the padded tensors of one training batch.

Shape legend: B samples, P_i and R_i tokens of sample i's prompt and response, R = max R_i,
S = max (P_i + R_i), A = max num_actions_i. Every field is right-aligned, so responses end together::

    | pad     pad     prompt  prompt  response |
    | pad     prompt  response response response |
                      |<------- R ------------>|
    |<--------------- S ---------------------->|

The loops that define both functions stand in `reference.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.batch.row_sets import RowSets
from sglang_topp.batch.rows import Rows, as_integer, right_align, right_ones, write_row
from sglang_topp.batch.samples import check_sets, read_examples, read_rollouts
from sglang_topp.candidates import CandidateSets

__all__ = ["RLBatch", "SFTBatch", "collate_rl", "collate_sft"]


class RLBatch(TypedDict):
    """What `collate_rl` returns; CPU tensors. S = max (P_i + R_i), R = max R_i.

    `log_probs[:, -R - 1 : -1]` of a model run over `sequences` lines up with every [B, R] field.
    """

    sequences: torch.Tensor
    """int64 [B, S], `pad_token_id` before every prompt."""
    attention_mask: torch.Tensor
    """int64 [B, S], 1 on prompt and response."""
    response_mask: torch.Tensor
    """int64 [B, R], 1 on the response."""
    loss_mask: torch.Tensor
    """float32 [B, R], each 0 or 1."""
    rewards: torch.Tensor
    """float32 [B, R]."""
    logprobs: NotRequired[torch.Tensor]
    """float32 [B, R]; only where log-probs were given."""
    candidates: NotRequired[RowSets]
    """Row i holds the R_i positions of response i; only where candidate sets were given."""


class SFTBatch(TypedDict):
    """What `collate_sft` returns; CPU tensors, int64."""

    sequences: torch.Tensor
    """int64 [B, S], `pad_token_id` first."""
    attention_mask: torch.Tensor
    """int64 [B, S]."""
    loss_mask: torch.Tensor
    """int64 [B, A], each 0 or 1, over the last `num_actions` tokens."""


def collate_rl(
    prompts: Rows,
    responses: Rows,
    rewards: Rows,
    loss_masks: Rows,
    logprobs: Rows | None = None,
    candidates: Sequence[CandidateSets] | None = None,
    *,
    pad_token_id: int,
    max_seq_len: int | None = None,
) -> RLBatch:
    """Collate rollouts; bit-identical to `reference.collate_rl`.

    Args:
        prompts: B rows of token ids, none empty. A row is a list, a 1-D array, or a 1-D tensor on any
            device, with or without grad; so are all rows below.
        responses: B rows of token ids.
        rewards: per token, R_i numbers in row i; rounded to float32, where what is too large is infinite.
        loss_masks: per token, R_i values in row i, each 0 or 1; a row may be a `PackedLossMask`.
        logprobs: as `rewards`, or None.
        candidates: per sample, the CandidateSets of its R_i positions, or None.
        pad_token_id: fills `sequences` before the prompt.
        max_seq_len: where some P_i + R_i is larger, warn; nothing is cut.

    Raises:
        InvalidInputError: any length differs from its response's, a value is of the wrong kind, a prompt
            is empty (nothing would predict the response's first token), a set's sampled token is not
            the response's token, a token without a candidate set has a loss, or `pad_token_id` is no
            integer. The message names the field and the sample.

    Warns:
        UserWarning: a sample is longer than `max_seq_len`.
    """
    samples = read_rollouts(prompts, responses, rewards, loss_masks, logprobs, candidates)
    totals, actions = samples.prompt_lengths + samples.response_lengths, samples.response_lengths
    longest, width = int(totals.max()), int(actions.max())
    if max_seq_len is not None and longest > max_seq_len:
        i = int(totals.argmax())
        warnings.warn(
            f"sample {i} has {longest} tokens, more than max_seq_len {max_seq_len}; nothing is cut,"
            " check the limits of the rollout",
            stacklevel=2,
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
        check_sets(samples.candidates, ids, samples.loss_masks)
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
    return batch


def collate_sft(
    input_ids: Rows,
    num_actions: Sequence[int],
    loss_masks: Rows | None = None,
    *,
    pad_token_id: int,
) -> SFTBatch:
    """Collate supervised examples; bit-identical to `reference.collate_sft`.

    Args:
        input_ids: B rows of token ids, prompt and answer together; lists, 1-D arrays or 1-D tensors.
        num_actions: B integers, how many tokens at the end of each row the model is to learn.
        loss_masks: num_actions[i] values in row i, each 0 or 1; None means all 1.
        pad_token_id: fills `sequences` before the ids.

    Raises:
        InvalidInputError: lengths that do not fit, or values of the wrong kind; names field and sample.
    """
    samples = read_examples(input_ids, num_actions, loss_masks)
    longest, width = int(samples.lengths.max()), int(samples.num_actions.max())
    sequences = _padding(samples.lengths, longest, pad_token_id)
    for i, (line, ids) in enumerate(zip(sequences, samples.ids, strict=True)):
        write_row(line[longest - len(ids) :], ids, "input_ids", i)
    return {
        "sequences": torch.from_numpy(sequences),
        "attention_mask": torch.from_numpy(right_ones(samples.lengths, longest)),
        "loss_mask": torch.from_numpy(
            right_align("loss_masks", samples.loss_masks, samples.num_actions, width, np.int64)
        ),
    }


def _padding(lengths: NDArray[np.int64], width: int, pad_token_id: int) -> NDArray[np.int64]:
    """int64 [B, width] with the padding before the last `lengths[i]` columns written, nothing else."""
    pad_token_id = as_integer("pad_token_id", pad_token_id)
    if pad_token_id == 0:
        return np.zeros((len(lengths), width), np.int64)  # fresh memory is zero: no write at all
    out = np.empty((len(lengths), width), np.int64)
    for line, start in zip(out, (width - lengths).tolist(), strict=True):
        line[:start] = pad_token_id
    return out
