"""Packed batches of rollouts with random candidate sets, and their scores by a dense mask over logits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from torch import Tensor

from sglang_topp import CandidateSets
from sglang_topp.batch import PackedBatch, PackedCollator
from tests.integrations.megatron.cpu_ranks import VOCAB, Ranks, local_columns

# The prompt's and the response's length of each sample. The second has no response.
LENGTHS = [(3, 9), (5, 0), (1, 4), (6, 11), (2, 6)]
SIZES = {"mixed": [1, 2, 3, 5], "one": [1], "large": [20, 30, 45], "whole": [VOCAB], "tools": []}


def random_sets(
    rng: np.random.Generator, tokens: list[int], sizes: list[int], tools: list[int]
) -> CandidateSets:
    """Return sets of random sizes, which contain the tokens, and are empty where `tools` is 1."""
    rows = []
    for token, tool in zip(tokens, tools, strict=True):
        others = rng.permutation(np.delete(np.arange(VOCAB), token))
        rows.append([] if tool else sorted([token, *others[: rng.choice(sizes) - 1].tolist()]))
    offsets = np.cumsum([0, *map(len, rows)])
    sampled = np.where(tools, -1, tokens).astype(np.int32)
    return CandidateSets(np.array([*itertools.chain(*rows)], np.int32), None, offsets, sampled)


def make_batch(ranks: Ranks, kind: str, max_tokens: int = 32, lengths: Any = LENGTHS) -> PackedBatch:
    """Pack rollouts. Every fourth response token, or each, is a tool's: without a set, and without a loss."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length, _ in lengths]
    responses = [rng.integers(0, VOCAB, length).tolist() for _, length in lengths]
    tools = [[int(kind == "tools" or i % 4 == 2) for i in range(length)] for _, length in lengths]
    collator = PackedCollator(
        max_tokens=max_tokens,
        pad_token_id=0,
        dp_size=ranks.dp,
        tp_size=ranks.tp,
        cp_size=ranks.cp,
        pp_size=ranks.pp,
    )
    return collator.collate_rl(
        prompts,
        responses,
        [rng.normal(size=len(ids)).astype(np.float32) for ids in responses],
        [[1 - tool for tool in each] for each in tools],
        candidates=[
            random_sets(rng, ids, SIZES[kind], tool) for ids, tool in zip(responses, tools, strict=True)
        ],
    )


def dense_scores(
    ranks: Ranks, logits: Tensor, batch: PackedBatch, row: int, temperature: float, replay: bool
) -> dict[str, Tensor]:
    """Return float64 scores [R] of this rank's positions with a loss, from this rank's logits [1, S, V]."""
    edges = batch["cu_seqlens"][row].tolist()
    columns = local_columns(edges, ranks.cp, parallel_state.get_context_parallel_rank())
    scored = (batch["loss_mask"][row] * batch["response_mask"][row])[columns] > 0
    whole = gather_from_tensor_model_parallel_region(logits[0])[scored, :VOCAB].double() / temperature
    mask = torch.ones_like(whole, dtype=torch.bool)
    if replay:
        sets = batch["candidates"][row].take(columns[scored].numpy())
        for kept, (ids, _) in zip(mask, sets, strict=True):
            kept[:] = False
            kept[torch.tensor(ids, dtype=torch.int64)] = True
    targets = batch["sequences"][row].roll(-1)[columns][scored][:, None]
    scores = {}
    for name, kept in (("", mask), ("full_", torch.ones_like(mask))):
        logprobs = whole.masked_fill(~kept, -torch.inf).log_softmax(-1)
        scores[f"{name}logprobs"] = logprobs.gather(1, targets)[:, 0]
        scores[f"{name}entropy"] = -(logprobs.exp() * logprobs.masked_fill(~kept, 0.0)).sum(-1)
    return scores


def weighted_sum(scores: dict[str, Tensor], weights: Tensor) -> Tensor:
    """Return a loss in which every score of every position has another weight. `weights` is [R]."""
    return sum((weights + i).to(score.dtype) @ score for i, score in enumerate(scores.values()))
