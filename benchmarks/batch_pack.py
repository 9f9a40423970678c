"""Benchmark of packing sequences, against Python loops, and of collating a batch with candidate sets.

The samples come from the benchmark `batch_collate`. A packed row holds up to 16384 tokens. The rows are
divided among 8 data-parallel ranks. Every sample is padded to a multiple of 8 tokens: each of 2
context-parallel ranks takes 2 chunks of a sample, and 2 tensor-parallel ranks divide each chunk.

Most tables compare `PackedCollator` with `reference_loops.py`, which loops over samples and joins lists of
tokens. One table compares `PackedCollator` with a loop over tokens, because SkyRL measured a speedup of 34 x
over such a loop (pull request 1808). This table packs fewer samples than the other tables, because the loop
takes seconds.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.batch_collate import candidate_sets, rollouts
from benchmarks.harness.paired_timing import compare, compare_counts
from sglang_topp.batch import PackedCollator, collate_rl, split_micro_batches, take_batch
from sglang_topp.batch.micro_batches import first_fit_decreasing
from tests.batch import reference_loops

__all__ = ["run"]

_RANKS = 8
_BUDGET = 16_384


def run() -> None:
    arrays = rollouts()
    lists: dict[str, Any] = {name: [row.tolist() for row in rows] for name, rows in arrays.items()}
    ids = [p + r for p, r in zip(lists["prompts"], lists["responses"], strict=True)]
    id_arrays = [np.array(row, np.int32) for row in ids]
    counts, masks = [len(r) for r in lists["responses"]], lists["loss_masks"]
    lengths = [len(row) for row in ids]
    collator = PackedCollator(max_tokens=_BUDGET, pad_token_id=0, dp_size=_RANKS, tp_size=2, cp_size=2)
    multiples = {
        "pad_token_id": 0,
        "sequence_multiple": collator.sequence_multiple,
        "row_multiple": collator.row_multiple,
    }
    footprints = [-(-n // collator.sequence_multiple) * collator.sequence_multiple for n in lengths]

    def sft_loop(batch: int = len(ids)) -> object:
        bins = reference_loops.first_fit_decreasing(footprints[:batch], _BUDGET)
        return reference_loops.pack_sft(bins, ids[:batch], counts[:batch], masks[:batch], **multiples)

    def rl_loop() -> object:
        bins = reference_loops.first_fit_decreasing(footprints, _BUDGET)
        return reference_loops.pack_rl(bins, **lists, **multiples)

    compare(
        "packed SFT, B = 1024",
        {
            "loop": sft_loop,
            "PackedCollator, from lists": lambda: collator.collate_sft(ids, counts, masks),
            "PackedCollator, from arrays": lambda: collator.collate_sft(
                id_arrays, counts, arrays["loss_masks"]
            ),
        },
        target=34,
    )
    few = 128
    compare(
        f"packed SFT, B = {few}, against a loop over tokens",
        {
            "loop over tokens": lambda: _loop_over_tokens(ids[:few], counts[:few], masks[:few], multiples),
            "loop over samples": lambda: sft_loop(few),
            "PackedCollator, from lists": lambda: collator.collate_sft(ids[:few], counts[:few], masks[:few]),
        },
        rounds=5,
        target=34,
    )
    compare(
        "packed RL, B = 1024",
        {
            "loop": rl_loop,
            "PackedCollator, from lists": lambda: collator.collate_rl(**lists),
            "PackedCollator, from arrays": lambda: collator.collate_rl(**arrays),
        },
        target=34,
    )
    compare(
        "first-fit decreasing alone",
        {
            "loop": lambda: reference_loops.first_fit_decreasing(footprints, _BUDGET),
            "first_fit_decreasing": lambda: first_fit_decreasing(np.array(footprints), _BUDGET),
        },
    )
    packed = collator.collate_sft(ids, counts, masks)["sequences"]
    fill = sum(lengths) / packed.numel()
    print(f"\n{len(packed)} rows of {packed.shape[1]} columns (budget {_BUDGET}), {fill:.1%} full")
    _compare_whole_batch(arrays, lengths)


def _loop_over_tokens(
    ids: list[list[int]], counts: list[int], masks: list[list[int]], multiples: dict[str, int]
) -> tuple[torch.Tensor, ...]:
    """Pack like `reference_loops.pack_sft`, but loop over every token, and return no position ids."""
    multiple = multiples["sequence_multiple"]
    footprints = [-(-len(row) // multiple) * multiple for row in ids]
    bins = reference_loops.first_fit_decreasing(footprints, _BUDGET)
    widest = max(sum(footprints[i] for i in members) for members in bins)
    width = -(-widest // multiples["row_multiple"]) * multiples["row_multiple"]
    sequences = torch.full((len(bins), width), multiples["pad_token_id"])
    attention_mask = torch.zeros_like(sequences)
    loss_mask = torch.zeros(len(bins), width)
    for row, members in enumerate(bins):
        start = 0
        for i in members:
            length, prompt = len(ids[i]), len(ids[i]) - counts[i]
            sequences[row, start : start + length] = torch.tensor(ids[i])
            attention_mask[row, start : start + length] = 1
            for t in range(1, length):
                if t >= prompt:
                    loss_mask[row, start + t - 1] = float(masks[i][t - prompt])
            start += footprints[i]
    return sequences, attention_mask, loss_mask / max(1, int(loss_mask.sum()))


def _compare_whole_batch(arrays: dict[str, list[np.ndarray]], lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    sets = [candidate_sets(rng, ids, np.ones(len(ids), bool)) for ids in arrays["responses"]]
    tokens = sum(lengths)
    collator = PackedCollator(max_tokens=_BUDGET, pad_token_id=0, dp_size=_RANKS)

    def collate_and_split() -> object:
        batch = collate_rl(**arrays, candidates=sets, pad_token_id=0)
        plan = split_micro_batches(lengths, _BUDGET, ranks=_RANKS)
        return [list(plan.of(batch, rank)) for rank in range(_RANKS)]

    def pack_and_shard() -> object:
        batch = collator.collate_rl(**arrays, candidates=sets)
        rows = np.arange(len(batch["sequences"]))
        return [[take_batch(batch, row[None]) for row in shard] for shard in np.split(rows, _RANKS)]

    candidates = sum(len(part.token_ids) for part in sets)
    print(f"\n{tokens / 1e6:.2f} M tokens, {candidates / 1e6:.1f} M candidates")
    steps = {
        "collate_rl alone, without sets": lambda: collate_rl(**arrays, pad_token_id=0),
        "collate_rl, split_micro_batches": collate_and_split,
        "PackedCollator.collate_rl, one micro-batch per row": pack_and_shard,
    }
    compare("collate with candidate sets, shard over 8 ranks, split into micro-batches", steps, rounds=5)
    cpu_s = {}
    for label, step in steps.items():
        start = time.process_time()
        step()
        cpu_s[label] = time.process_time() - start
    compare_counts(
        "collate with candidate sets, shard over 8 ranks, split into micro-batches: processor time",
        "ms per M tokens",
        {label: seconds / tokens * 1e9 for label, seconds in cpu_s.items()},
    )
