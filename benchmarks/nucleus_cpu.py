"""Benchmark of set extraction in a CPU decode step: `nucleus.top_p_candidates` against sort-and-cumsum.

The benchmark runs on one thread. On a shared machine, several threads would wait for each other, and the
measured times would include these waits. The benchmark `nucleus_gpu` covers GPUs.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from benchmarks.harness.paired_timing import compare
from sglang_topp.nucleus import top_p_candidates

__all__ = ["run"]

VOCAB = 151_936


def run() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _decode_step()
        _hard_rows()
        _call_overhead()
    finally:
        torch.set_num_threads(threads)


def _decode_step() -> None:
    logprobs = _logprobs(32)
    sampled = logprobs.exp().multinomial(1).squeeze(1)
    compare(
        f"top-p candidates on the CPU, [32, {VOCAB}] float32, p = 0.95, {_sizes(logprobs, 0.95)}",
        {
            "sort and cumsum": partial(sort_and_cumsum, logprobs, 0.95),
            "select, bfloat16": partial(top_p_candidates, logprobs.bfloat16(), 0.95),
            "select, sampled tokens added": partial(top_p_candidates, logprobs, 0.95, sampled),
            "select": partial(top_p_candidates, logprobs, 0.95),
        },
        target=20,
        picture="nucleus_cpu",
    )


def _hard_rows() -> None:
    for title, logprobs, p in (
        ("flat rows: logits of std 0.5, p = 0.95", _logprobs(8, std=0.5), 0.95),
        ("less flat: logits of std 3, p = 0.95", _logprobs(8, std=3.0), 0.95),
        ("p = 1: the set is the vocabulary", _logprobs(8), 1.0),
    ):
        compare(
            f"{title}; [8, {VOCAB}], {_sizes(logprobs, p)}",
            {
                "sort and cumsum": partial(sort_and_cumsum, logprobs, p),
                "select": partial(top_p_candidates, logprobs, p),
            },
            rounds=5,
            picture="nucleus_cpu",
        )


def _call_overhead() -> None:
    for vocab in (512, VOCAB):
        logprobs = _logprobs(64, vocab=vocab)
        every_fourth = [0.95, 0.0, 0.0, 0.0] * 16
        compare(
            f"one call of select by batch size, vocabulary {vocab}",
            {f"B = {rows}": partial(top_p_candidates, logprobs[:rows], 0.95) for rows in (1, 8, 64)}
            | {"B = 64, every fourth row requested": partial(top_p_candidates, logprobs, every_fourth)},
            rounds=30,
            warmup=3,
        )


def sort_and_cumsum(logprobs: Tensor, p: float) -> tuple[Tensor, Tensor, Tensor]:
    """Sort every row, and keep tokens until their mass reaches `p`.

    If several tokens tie at the cutoff, the function may keep only some of these tokens. The function does
    not check its inputs.
    """
    ordered, ids = logprobs.sort(dim=-1, descending=True)
    mass = ordered.exp()
    kept = mass.cumsum(-1) - mass < p
    offsets = torch.zeros(len(logprobs) + 1, dtype=torch.int64, device=logprobs.device)
    offsets[1:] = kept.sum(-1).cumsum(0)
    return ids[kept].int(), ordered[kept], offsets


def _logprobs(rows: int, *, std: float = 7.0, vocab: int = VOCAB) -> Tensor:
    """Return log-probs of normally distributed logits.

    With logits of standard deviation 7, the set sizes are as large as a real model's.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.log_softmax(torch.randn(rows, vocab, generator=generator) * std, -1)


def _sizes(logprobs: Tensor, p: float) -> str:
    sizes = top_p_candidates(logprobs, p)[2].diff()
    return f"set sizes: mean {sizes.double().mean():.0f}, largest {sizes.max()}"
