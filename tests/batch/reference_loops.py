"""Naive versions of collation, packing, and nesting: plain loops that define the layout of a batch.

The functions in this module are slow, but simple enough to verify by reading. The tests compare the fast
functions of `sglang_topp.batch` with these functions bit for bit. The benchmarks use these functions as the
baseline. Token ids and loss masks are plain lists. Rewards, log-probs, and further fields may be lists or
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

__all__ = ["collate_rl", "collate_sft", "first_fit_decreasing", "nest", "pack_rl", "pack_sft", "unnest"]

Ints = Sequence[list[int]]
Floats = Sequence[list[float] | torch.Tensor]


def collate_rl(
    prompts: Ints,
    responses: Ints,
    rewards: Floats,
    loss_masks: Ints,
    logprobs: Floats | None = None,
    *,
    fields: Mapping[str, Sequence[Any]] | None = None,
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    """Return left-padded sequences, and right-aligned response fields as wide as the longest response."""
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    width = max(len(r) for r in responses)
    sequences, attention_masks, response_masks = [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        pad = longest - len(prompt) - len(response)
        sequences.append([pad_token_id] * pad + prompt + response)
        attention_masks.append([0] * pad + [1] * (len(prompt) + len(response)))
        response_masks.append([0] * (width - len(response)) + [1] * len(response))

    def right(rows: Sequence[Any], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        out = torch.zeros(len(rows), width, dtype=dtype)
        for i, row in enumerate(rows):
            values = row.detach() if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=dtype)
            out[i, width - len(row) :] = values
        return out

    batch = {
        "sequences": torch.tensor(sequences, dtype=torch.int64),
        "attention_mask": torch.tensor(attention_masks, dtype=torch.int64),
        "response_mask": torch.tensor(response_masks, dtype=torch.int64),
        "loss_mask": right(loss_masks),
        "rewards": right(rewards),
    }
    if logprobs is not None:
        batch["logprobs"] = right(logprobs)
    for name, rows in (fields or {}).items():
        integers = all(isinstance(row, torch.Tensor) and row.dtype == torch.int64 for row in rows)
        batch[name] = right(rows, torch.int64 if integers else torch.float32)
    return batch


def collate_sft(
    input_ids: Ints,
    num_actions: Sequence[int],
    loss_masks: Ints,
    *,
    normalize_loss_mask: bool = False,
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    """Return left-padded sequences, and right-aligned loss masks of the last `num_actions` tokens.

    The loss mask of a sample's first token is left out, because nothing predicts that token.
    """
    predicted = [
        mask[1:] if count and count == len(ids) else mask
        for ids, count, mask in zip(input_ids, num_actions, loss_masks, strict=True)
    ]
    longest, width = max(len(ids) for ids in input_ids), max(len(mask) for mask in predicted)
    sequences, attention_masks, masks = [], [], []
    for ids, mask in zip(input_ids, predicted, strict=True):
        pad = longest - len(ids)
        sequences.append([pad_token_id] * pad + ids)
        attention_masks.append([0] * pad + [1] * len(ids))
        masks.append([0] * (width - len(mask)) + mask)
    loss_mask = torch.tensor(masks, dtype=torch.int64)
    if normalize_loss_mask:
        loss_mask = loss_mask.float() * (1 / max(1, int(loss_mask.sum())))
    return {
        "sequences": torch.tensor(sequences, dtype=torch.int64),
        "attention_mask": torch.tensor(attention_masks, dtype=torch.int64),
        "loss_mask": loss_mask,
    }


def first_fit_decreasing(footprints: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each sample, from the largest to the smallest, into the first bin with room."""
    bins: list[list[int]] = []
    loads: list[int] = []
    for i in sorted(range(len(footprints)), key=lambda i: -footprints[i]):
        for at, load in enumerate(loads):
            if load + footprints[i] <= capacity:
                bins[at].append(i)
                loads[at] += footprints[i]
                break
        else:
            bins.append([i])
            loads.append(footprints[i])
    return bins


def pack_sft(
    bins: Sequence[list[int]],
    input_ids: Ints,
    num_actions: Sequence[int],
    loss_masks: Ints,
    *,
    pad_token_id: int,
    sequence_multiple: int = 1,
    row_multiple: int = 1,
) -> dict[str, torch.Tensor]:
    """Pack supervised examples: row k of the result holds the samples of `bins[k]`.

    The loss mask of each token is one column to the left of the token, in the column of the preceding token.
    The loss mask is divided by its sum over the whole batch.
    """
    full_masks = [
        [0] * (len(ids) - count) + mask
        for ids, count, mask in zip(input_ids, num_actions, loss_masks, strict=True)
    ]
    batch = _pack(bins, input_ids, pad_token_id, sequence_multiple, row_multiple)
    width = batch["sequences"].shape[1]
    batch["loss_mask"] = _pack_scored(bins, full_masks, width, sequence_multiple)
    batch["loss_mask"] *= 1 / max(1, int(batch["loss_mask"].sum(dtype=torch.float64)))
    return batch


def pack_rl(
    bins: Sequence[list[int]],
    prompts: Ints,
    responses: Ints,
    rewards: Floats,
    loss_masks: Ints,
    logprobs: Floats,
    *,
    pad_token_id: int,
    sequence_multiple: int = 1,
    row_multiple: int = 1,
) -> dict[str, torch.Tensor]:
    """Pack rollouts: row k of the result holds the samples of `bins[k]`.

    The loss mask, response mask, reward, and log-prob of each token are one column to the left of the token,
    in the column of the preceding token.
    """
    ids = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    batch = _pack(bins, ids, pad_token_id, sequence_multiple, row_multiple)
    width = batch["sequences"].shape[1]
    columns = {
        "loss_mask": loss_masks,
        "response_mask": [[1] * len(response) for response in responses],
        "rewards": rewards,
        "logprobs": logprobs,
    }
    for name, rows in columns.items():
        whole = [[0] * len(prompt) + list(row) for prompt, row in zip(prompts, rows, strict=True)]
        batch[name] = _pack_scored(bins, whole, width, sequence_multiple)
    batch["response_mask"] = batch["response_mask"].long()
    return batch


def _pack(
    bins: Sequence[list[int]], ids: Ints, pad_token_id: int, sequence_multiple: int, row_multiple: int
) -> dict[str, torch.Tensor]:
    sequences, attention_masks, position_ids = [], [], []
    for members in bins:
        row, mask, positions = [], [], []
        for i in members:
            pad = -len(ids[i]) % sequence_multiple
            row += ids[i] + [pad_token_id] * pad
            mask += [1] * len(ids[i]) + [0] * pad
            positions += list(range(len(ids[i]))) + [0] * pad
        if not members:
            row, mask, positions = [pad_token_id], [1], [0]
        pad = -len(row) % row_multiple
        sequences.append(row + [pad_token_id] * pad)
        attention_masks.append(mask + [0] * pad)
        position_ids.append(positions + [0] * pad)
    width = max(len(row) for row in sequences)

    def stack(rows: list[list[int]], fill: int) -> torch.Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in rows], dtype=torch.int64)

    return {
        "sequences": stack(sequences, pad_token_id),
        "attention_mask": stack(attention_masks, 0),
        "position_ids": stack(position_ids, 0),
    }


def _pack_scored(
    bins: Sequence[list[int]], values: Sequence[list[Any]], width: int, sequence_multiple: int
) -> torch.Tensor:
    """Return `values`, one per token, as float32 [bins, width].

    The value of each token is one column to the left of the token, in the column of the preceding token.
    """
    rows = []
    for members in bins:
        row: list[Any] = []
        for i in members:
            row += values[i][1:] + [0] + [0] * (-len(values[i]) % sequence_multiple)
        rows.append(row + [0] * (width - len(row)))
    return torch.tensor(rows, dtype=torch.float32)


def nest(field: torch.Tensor, mask: torch.Tensor, pad: float = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return, for each row of `field` [B, W, ...], the columns to keep and the row's values in these columns.

    The function keeps a column of a row if the mask is not 0 in that column, or if the row holds a value
    other than `pad` in that column.
    """
    rows = []
    for row, kept in zip(field, mask, strict=True):
        differs = (row != pad).flatten(1).any(1) if row.ndim > 1 else row != pad
        columns = torch.nonzero((kept != 0) | differs).flatten()
        rows.append((columns, row[columns]))
    return rows


def unnest(rows: list[tuple[torch.Tensor, torch.Tensor]], width: int, pad: float = 0) -> torch.Tensor:
    """Rebuild the padded field [B, width, ...] from the result of `nest`."""
    values = rows[0][1]
    out = torch.full((len(rows), width, *values.shape[1:]), pad, dtype=values.dtype)
    for i, (columns, values) in enumerate(rows):
        out[i, columns] = values
    return out
