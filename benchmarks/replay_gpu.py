"""Benchmark of scoring over candidate sets on a GPU, in bfloat16, with tensors as large as a real trainer's.

The sets are those of `benchmarks.replay`.
"""

from __future__ import annotations

import numpy as np
import torch

from benchmarks.harness.paired_timing import compare
from benchmarks.replay import candidate_head, epochs, full_head, head_inputs, make_sets, targets_of
from sglang_topp.replay import Scores, score

__all__ = ["run"]


def run() -> None:
    if torch.cuda.is_available():
        compare_all(65_536, 4096, 151_936)
    else:
        print("\nGPU: not measured, this machine has none")


def compare_all(t: int, h: int, v: int, device: str = "cuda") -> None:
    dtype = torch.bfloat16
    compare(
        f"GPU, {dtype}, forward + backward; T = {t}, H = {h}, V = {v}",
        {
            "score without sets, full logits in chunks": full_head(t, h, v, None, dtype, device),
            "score": candidate_head(t, h, v, None, dtype, device),
        },
        rounds=5,
        target=30,
        picture="replay_gpu",
    )
    compare(
        f"GPU, {dtype}, one reference and four PPO epochs over the same sets; T = {t}, H = {h}, V = {v}",
        {
            "score(sets)": epochs(t, h, v, to_torch=False, dtype=dtype, device=device),
            "score(sets.to_torch())": epochs(t, h, v, to_torch=True, dtype=dtype, device=device),
        },
        rounds=9,
    )
    hidden, weight = head_inputs(t, h, v, dtype, device)
    sets = make_sets(t, v)
    targets = targets_of(sets, device)
    entries = np.repeat(sets.sizes > 1, sets.sizes)
    rows = torch.tensor(sets.token_ids[entries], dtype=torch.int64, device=device)

    def read_once() -> None:
        # `embedding_bag` reads every row, but writes only one sum per 256 rows. `embedding_bag` therefore
        # spends nearly all of its time on reading.
        torch.nn.functional.embedding_bag(
            rows, weight.detach(), torch.arange(0, len(rows), 256, device=device)
        )
        if rows.is_cuda:
            torch.cuda.synchronize()

    def forward() -> Scores:
        with torch.no_grad():
            scores = score(hidden, weight, targets, sets)
        if rows.is_cuda:
            torch.cuda.synchronize()
        return scores

    compare(
        "GPU, forward pass against one read of the gathered rows (embedding_bag); above 0.33 is the goal",
        {"read once": read_once, "score, forward": forward},
        rounds=9,
        picture="replay_gpu",
    )


if __name__ == "__main__":
    run()
