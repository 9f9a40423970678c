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

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_topp.batch import ragged_rows as ragged
from sglang_topp.batch.batch_candidate_sets import BatchCandidateSets
from sglang_topp.batch.ragged_rows import RaggedRows
from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import first_true, integer_array
from sglang_topp.errors import InvalidInputError


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
    sequence_fields: Mapping[str, RaggedRows] | None = None,
    pad_token_id: int,
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
        sequence_fields: integers of prompt and response by name, such as routed experts. A field has B rows;
            row i is an integer array or tensor [P_i + R_i, ...], or [P_i + R_i - 1, ...] without the last
            token's. The field becomes [B, S, ...], in the columns of `sequences`, with 0 where no value is,
            of the smallest dtype that holds the rows' (int32 for uint16, and int64 for uint32).
        pad_token_id: fills `sequences` before the prompt.

    Raises:
        InvalidInputError: an argument is invalid. The message names the field and the sample. Each row of
            rewards, masks, log-probs, sets, and fields must have the length of its response. The prompt of a
            response must not be empty, because nothing would predict the first token. The sampled token of a
            candidate set must be the response's token at the same position. A token with loss mask 1 must
            have a candidate set. A name in `fields` or `sequence_fields` must not be in the other, or a
            standard field of the batch. `pad_token_id` must be an integer.
    """
    prompt_lengths, lengths = sample_lengths(prompts, responses)
    batch, first = _right_aligned(prompt_lengths + lengths, pad_token_id)
    width, rows = int(lengths.max()), np.arange(1, len(lengths) + 1)
    start, shape = rows * width - lengths, (len(rows), width)
    columns = (prompts, responses, rewards, loss_masks, logprobs, candidates, fields, sequence_fields)
    written: RLBatch = write_samples(batch, prompt_lengths, lengths, first, start, shape, *columns)
    return written


def collate_rollouts(
    rollouts: Sequence[Any],
    rewards: Sequence[Any],
    *,
    candidates: Sequence[CandidateSets] | None = None,
    fields: Mapping[str, RaggedRows] | None = None,
    pad_token_id: int,
) -> RLBatch:
    """Collate a client's `Rollout` objects into a batch like that of `collate_rl`.

    The batch's `logprobs` are the log-probs under the policy that drew the tokens. These log-probs belong in
    the denominator of importance ratios. For rollouts with candidate sets, each token's log-prob is
    normalized over the token's set in the rollout. For rollouts without sets, each token's log-prob is
    normalized over the whole vocabulary. Tokens that `Rollout.extend` appended have a loss mask of 0. The
    rollouts' `token_fields` are further entries, as the `sequence_fields` of `collate_rl` are.

    Args:
        rollouts: B rollouts, for example from `RolloutClient.generate` or `load_rollouts`. Either all
            rollouts or none have candidate sets.
        rewards: for each rollout, either one number for the whole response (such as an advantage), or one
            number per response token.
        candidates: the sets that replace the rollouts' own sets in the batch, for example a teacher's sets
            (`Score.candidates`).
        fields: as in `collate_rl`.
        pad_token_id: fills `sequences` before the prompt.

    Raises:
        InvalidInputError: an argument is invalid (see `collate_rl`), there are no rollouts, only some
            rollouts have candidate sets, or the rollouts' sets have no log-probs.
    """
    columns = rollout_columns(rollouts, rewards, candidates)
    return collate_rl(**columns, fields=fields, pad_token_id=pad_token_id)


def rollout_columns(
    rollouts: Sequence[Any], rewards: Sequence[Any], candidates: Sequence[CandidateSets] | None
) -> dict[str, Any]:
    """Check the arguments of `collate_rollouts`, and return those of `collate_rl`."""
    if not ragged.count_rows("rollouts", rollouts, "a sequence of rollouts"):
        raise InvalidInputError("rollouts: got none, expected at least one")
    for i, one in enumerate(rollouts):
        if not hasattr(one, "output_ids"):
            raise InvalidInputError(f"rollouts[{i}]: got {type(one).__name__}, expected a Rollout")
        if one.token_fields.keys() != (names := rollouts[0].token_fields.keys()):
            raise InvalidInputError(
                f"rollouts[{i}].token_fields: got {[*one.token_fields]}, expected {[*names]}, as in"
                " rollouts[0]"
            )
        for name, field in one.token_fields.items():
            if field.start:
                raise InvalidInputError(
                    f"rollouts[{i}].token_fields: {name}: got rows from position {field.start} on, expected"
                    " them from 0 on"
                )
    own = [one.candidates for one in rollouts]
    with_sets = [sets for sets in own if sets is not None]
    if with_sets and len(with_sets) < len(own):
        raise InvalidInputError(
            f"rollouts[{own.index(None)}]: has no candidate sets, but {len(with_sets)} of {len(own)}"
            " rollouts have them; expected sets in all or in none"
        )
    return {
        "prompts": [one.prompt_ids for one in rollouts],
        "responses": [one.output_ids for one in rollouts],
        "rewards": _per_token(rewards, [len(one.output_ids) for one in rollouts]),
        "loss_masks": [one.loss_mask for one in rollouts],
        "logprobs": [sets.masked_logprobs for sets in with_sets] or [one.logprobs for one in rollouts],
        "candidates": candidates if candidates is not None else with_sets or None,
        "sequence_fields": {
            name: [one.token_fields[name].values for one in rollouts] for name in rollouts[0].token_fields
        },
    }


def _per_token(rewards: Sequence[Any], lengths: list[int]) -> list[Any]:
    """Return each rollout's rewards per token. If a reward is one number, every token gets the number."""
    if (num_rewards := ragged.count_rows("rewards", rewards, "one entry per rollout")) != len(lengths):
        raise InvalidInputError(f"rewards: got {num_rewards}, expected {len(lengths)}, one per rollout")
    rows: list[Any] = []
    for i, (reward, length) in enumerate(zip(ragged.to_host(rewards), lengths, strict=True)):
        if not np.ndim(reward) and np.asarray(reward).dtype.kind not in "biuf":
            raise InvalidInputError(
                f"rewards[{i}]: got {rewards[i]!r}, expected a number, or one number per token"
            )
        rows.append(reward if np.ndim(reward) else np.full(length, reward, np.float64))
    return rows


def _right_aligned(lengths: NDArray[np.int64], pad_token_id: Any) -> tuple[dict[str, Any], NDArray[np.int64]]:
    """Return a batch without tokens, and the index of each sample's first column, flattened."""
    longest = int(lengths.max())
    first, shape = np.arange(1, len(lengths) + 1) * longest - lengths, (len(lengths), longest)
    batch = {
        "sequences": torch.from_numpy(ragged.filled(shape, pad_token_id)),
        "attention_mask": torch.from_numpy(ragged.write_ones(first, lengths, shape)),
    }
    return batch, first


def sample_lengths(prompts: RaggedRows, responses: RaggedRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return int64 [B] twice: the lengths of the prompts and of the responses."""
    prompt_lengths = ragged.row_lengths("prompts", prompts)
    lengths = ragged.row_lengths("responses", responses, "prompts", len(prompt_lengths))
    if (i := first_true((prompt_lengths == 0) & (lengths > 0))) is not None:
        raise InvalidInputError(
            f"prompts[{i}]: is empty, so nothing predicts the response's first token; start it with the"
            " tokenizer's first special token"
        )
    return prompt_lengths, lengths


def write_samples(
    batch: Any,
    prompt_lengths: NDArray[np.int64],
    lengths: NDArray[np.int64],
    first: NDArray[np.int64],
    start: NDArray[np.int64],
    shape: tuple[int, int],
    prompts: RaggedRows,
    responses: RaggedRows,
    rewards: RaggedRows,
    loss_masks: RaggedRows,
    logprobs: RaggedRows | None,
    candidates: Sequence[CandidateSets] | None,
    fields: Mapping[str, RaggedRows] | None,
    sequence_fields: Mapping[str, RaggedRows] | None,
) -> Any:
    """Check the samples, and write them into a batch whose `sequences` hold padding.

    Args:
        batch: the dict that gets the fields, and is returned.
        prompt_lengths, lengths: int64 [B] each, as `sample_lengths` returns them.
        first: int64 [B], the index of each sample's first token in the flattened `sequences`.
        start: int64 [B], the index of each response's first value in the other fields, flattened.
        shape: the shape of these fields.

    The other arguments are those of `collate_rl`.
    """
    fields, sequence_fields = fields or {}, sequence_fields or {}
    own_names = {*batch, "response_mask", "loss_mask", "rewards", "logprobs", "candidates"}
    for name in (*fields, *sequence_fields):
        if name in own_names or (name in sequence_fields and name in fields):
            raise InvalidInputError(
                f"fields: got {name!r}, which is a field of the batch; choose another name"
            )
    scored = {"rewards": rewards, **({} if logprobs is None else {"logprobs": logprobs}), **fields}
    for name, rows in {"loss_masks": loss_masks, **scored}.items():
        ragged.check_lengths(name, rows, lengths, "responses")
    masks = ragged.mask_rows("loss_masks", loss_masks)

    sequences, middle = batch["sequences"].numpy(), first + prompt_lengths
    ragged.write_rows("prompts", ragged.to_host(prompts), first, sequences)
    ragged.write_rows("responses", ragged.to_host(responses), middle, sequences)
    batch["response_mask"] = torch.from_numpy(ragged.write_ones(start, lengths, shape))
    batch["loss_mask"] = torch.from_numpy(
        ragged.write_rows("loss_masks", masks, start, np.zeros(shape, np.float32))
    )
    for name, given in scored.items():
        rows = ragged.to_host(given)
        dtype = ragged.field_dtype(rows) if name in fields else np.float32
        batch[name] = torch.from_numpy(ragged.write_rows(name, rows, start, np.zeros(shape, dtype)))
    for name, given in sequence_fields.items():
        batch[name] = ragged.write_sequence_rows(
            name, given, first, prompt_lengths + lengths, sequences.shape
        )
    if candidates is not None:
        ragged.check_lengths("candidates", candidates, lengths, "responses")
        for i, one in enumerate(candidates):
            if not isinstance(one, CandidateSets):
                raise InvalidInputError(f"candidates[{i}]: got {type(one).__name__}, expected CandidateSets")
        batch["candidates"] = BatchCandidateSets.from_rows(candidates)
        flat = sequences.reshape(-1)
        ids = [flat[low:high] for low, high in zip(middle, middle + lengths, strict=True)]
        _check_sets(batch["candidates"], np.concatenate(ids), np.concatenate(masks))
    return batch


def _check_sets(candidates: BatchCandidateSets, ids: NDArray[np.int64], loss_mask: NDArray[np.int8]) -> None:
    """Check that sampled tokens equal the responses' tokens, and that tokens with loss mask 1 have sets.

    `ids` and `loss_mask` are those of the responses' tokens, sample after sample.
    """
    sets, offsets = candidates.sets, candidates.row_offsets
    is_other = (sets.sizes > 0) & (sets.sampled_ids != ids)
    if (at := first_true(is_other | ((sets.sizes == 0) & (loss_mask != 0)))) is not None:
        row = int(np.searchsorted(offsets, at, side="right")) - 1
        t = at - int(offsets[row])
        problem = f"position {t} has no candidates, but its loss mask is 1; expected 0, the policy did not"
        problem += " sample that token"
        if is_other[at]:
            drawn = f"the token sampled at position {t} is {sets.sampled_ids[at]}"
            problem = f"{drawn}, but responses[{row}][{t}] is {ids[at]}"
        raise InvalidInputError(f"candidates[{row}]: {problem}")


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
    ids, masks, lengths, mask_lengths = read_examples(input_ids, num_actions, loss_masks)
    batch, first = _right_aligned(lengths, pad_token_id)
    ragged.write_rows("input_ids", ids, first, batch["sequences"].numpy())
    rows, width = np.arange(1, len(ids) + 1), int(mask_lengths.max())
    loss_mask = np.zeros((len(ids), width), np.float32 if normalize_loss_mask else np.int64)
    ragged.write_rows("loss_masks", masks, rows * width - mask_lengths, loss_mask)
    if normalize_loss_mask:
        loss_mask *= 1 / max(1, int(np.count_nonzero(loss_mask)))
    return cast(SFTBatch, {**batch, "loss_mask": torch.from_numpy(loss_mask)})


def read_examples(
    input_ids: RaggedRows, num_actions: Sequence[int], loss_masks: RaggedRows | None
) -> tuple[RaggedRows, list[NDArray[np.int8]], NDArray[np.int64], NDArray[np.int64]]:
    """Check the arguments of `collate_sft`, and return `(ids, masks, lengths of ids, lengths of masks)`.

    A mask covers the last ids of its sample. It never covers the first, because nothing predicts it.
    """
    lengths = ragged.row_lengths("input_ids", input_ids)
    actions = integer_array("num_actions", num_actions, f"{len(lengths)} integers").astype(np.int64)
    if len(actions) != len(lengths):
        raise InvalidInputError(
            f"num_actions: got {len(actions)} of them, expected {len(lengths)} integers, as in input_ids"
        )
    if (i := first_true((actions < 0) | (actions > lengths))) is not None:
        raise InvalidInputError(
            f"num_actions[{i}]: got {actions[i]}, expected 0 to {lengths[i]}, the tokens there are"
        )
    if loss_masks is None:
        masks = [np.ones(count, np.int8) for count in actions.tolist()]
    else:
        ragged.check_lengths("loss_masks", loss_masks, actions, "num_actions")
        masks = ragged.mask_rows("loss_masks", loss_masks)
    trained = np.minimum(actions, np.maximum(lengths - 1, 0))
    masks = [mask[len(mask) - count :] for mask, count in zip(masks, trained.tolist(), strict=True)]
    return ragged.to_host(input_ids), masks, lengths, trained
