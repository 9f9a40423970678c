"""The definitions: one plain loop for every layout of this package, as trainers write it today.

Slow on purpose and right by inspection. Tests hold the fast paths to these, bit for bit, and the
benchmarks take them as the baseline. Inputs are plain lists (tensors are allowed as rewards).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["collate_rl", "collate_sft", "nest", "unnest"]

Ints = Sequence[list[int]]
Floats = Sequence[list[float] | torch.Tensor]


def collate_rl(
    prompts: Ints,
    responses: Ints,
    rewards: Floats,
    loss_masks: Ints,
    logprobs: Floats | None = None,
    *,
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    """Left-padded sequences, and response fields right-aligned in the longest response."""
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    width = max(len(r) for r in responses)
    sequences, attention_masks, response_masks = [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        pad = longest - len(prompt) - len(response)
        sequences.append([pad_token_id] * pad + prompt + response)
        attention_masks.append([0] * pad + [1] * (len(prompt) + len(response)))
        response_masks.append([0] * (width - len(response)) + [1] * len(response))

    def right(rows: Sequence[Any]) -> torch.Tensor:
        out = torch.zeros(len(rows), width, dtype=torch.float32)
        for i, row in enumerate(rows):
            values = row.detach() if isinstance(row, torch.Tensor) else torch.tensor(row, dtype=torch.float32)
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
    return batch


def collate_sft(
    input_ids: Ints, num_actions: Sequence[int], loss_masks: Ints, *, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Left-padded sequences, and the loss mask of the last `num_actions` tokens."""
    longest, width = max(len(ids) for ids in input_ids), max(num_actions)
    sequences, attention_masks, masks = [], [], []
    for ids, count, mask in zip(input_ids, num_actions, loss_masks, strict=True):
        pad = longest - len(ids)
        sequences.append([pad_token_id] * pad + ids)
        attention_masks.append([0] * pad + [1] * len(ids))
        masks.append([0] * (width - count) + mask)
    return {
        "sequences": torch.tensor(sequences, dtype=torch.int64),
        "attention_mask": torch.tensor(attention_masks, dtype=torch.int64),
        "loss_mask": torch.tensor(masks, dtype=torch.int64),
    }


def nest(field: torch.Tensor, mask: torch.Tensor, pad: float = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What travels of `field` [B, W, ...]: every row's columns, and the values that stand there.

    A column is kept where the mask is not 0, and where the row holds anything else than `pad`.
    """
    rows = []
    for row, kept in zip(field, mask, strict=True):
        differs = (row != pad).flatten(1).any(1) if row.ndim > 1 else row != pad
        columns = torch.nonzero((kept != 0) | differs).flatten()
        rows.append((columns, row[columns]))
    return rows


def unnest(rows: list[tuple[torch.Tensor, torch.Tensor]], width: int, pad: float = 0) -> torch.Tensor:
    """The padded field [B, width, ...] again."""
    values = rows[0][1]
    out = torch.full((len(rows), width, *values.shape[1:]), pad, dtype=values.dtype)
    for i, (columns, values) in enumerate(rows):
        out[i, columns] = values
    return out
