"""Benchmark of batch collation, against a plain Python loop and against copying the collated output.

The batch has 1024 samples, with prompts of 64 to 512 tokens and responses of 16 to 2048. The first two tables
compare `collate_rl` and `collate_sft` with the loops over lists in `reference_loops.py`. The last table
compares `collate_rl` with a copy of its output into fresh memory. The time of the copy is a lower bound,
because every collation must write its whole output.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.harness.paired_timing import compare
from sglang_topp.batch import collate_rl, collate_sft
from sglang_topp.candidates import NO_TOKEN, CandidateSets
from tests.batch import reference_loops

__all__ = ["candidate_sets", "rollouts", "run"]


def rollouts(seed: int = 0, batch: int = 1024) -> dict[str, list[np.ndarray]]:
    """Return `batch` random rollouts as a dict of columns, with one array per rollout in each column."""
    rng = np.random.default_rng(seed)
    responses = rng.permutation(np.linspace(16, 2048, batch).astype(int))
    prompts = rng.integers(64, 513, batch)
    return {
        "prompts": [rng.integers(0, 150_000, n, np.int32) for n in prompts],
        "responses": [rng.integers(0, 150_000, n, np.int32) for n in responses],
        "rewards": [rng.random(n, np.float32) for n in responses],
        "loss_masks": [rng.integers(0, 2, n, np.int8) for n in responses],
        "logprobs": [-rng.random(n, np.float32) for n in responses],
    }


def candidate_sets(
    rng: np.random.Generator, sampled_ids: np.ndarray, replayed: np.ndarray, mean_size: float = 8.0
) -> CandidateSets:
    """Return sets of random sizes with mean `mean_size`, and empty sets where `replayed` is false."""
    sizes = np.where(replayed, rng.geometric(1 / mean_size, len(sampled_ids)).clip(max=512), 0)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    rank = np.arange(offsets[-1]) - np.repeat(offsets[:-1], sizes)
    chosen = rng.integers(0, np.maximum(sizes, 1))
    # The ids of a set are 7919 apart, modulo the vocabulary size. 7919 and the vocabulary size are coprime,
    # so no id occurs twice in a set.
    ids = (np.repeat(sampled_ids, sizes) + 7919 * (rank - np.repeat(chosen, sizes))) % 150_000
    logprobs = -0.1 - 0.05 * rank
    sampled = np.where(replayed, sampled_ids, NO_TOKEN)
    return CandidateSets(ids.astype(np.int32), logprobs.astype(np.float32), offsets, sampled)


def run() -> None:
    arrays = rollouts()
    lists: dict[str, Any] = {name: [row.tolist() for row in rows] for name, rows in arrays.items()}
    from_lists = {
        "loop": lambda: reference_loops.collate_rl(**lists, pad_token_id=0),
        "collate_rl, from arrays": lambda: collate_rl(**arrays, pad_token_id=0),
        "collate_rl, from lists": lambda: collate_rl(**lists, pad_token_id=0),
    }
    compare("RL collation, B = 1024", from_lists, target=12, picture="batch_collate")

    sft = [p + r for p, r in zip(lists["prompts"], lists["responses"], strict=True)]
    counts = [len(r) for r in lists["responses"]]
    masks = lists["loss_masks"]
    compare(
        "SFT collation, unpacked, B = 1024",
        {
            "loop": lambda: reference_loops.collate_sft(sft, counts, masks, pad_token_id=0),
            "collate_sft, from lists": lambda: collate_sft(sft, counts, masks, pad_token_id=0),
        },
        target=10,
    )

    views = [tensor.numpy() for tensor in collate_rl(**arrays, pad_token_id=0).values()]
    compare(
        f"RL collation from arrays, against copies of its {sum(view.nbytes for view in views) / 1e6:.0f} MB",
        {
            "numpy copies": lambda: [view.copy() for view in views],
            "collate_rl, from arrays": lambda: collate_rl(**arrays, pad_token_id=0),
        },
        rounds=15,
        target=1 / 1.5,
    )
