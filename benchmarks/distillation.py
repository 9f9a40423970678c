"""Benchmark that compares distillation over a teacher's candidate sets with distillation from full logits.

Each contender computes the forward KL and its gradients. On the CPU, contenders use float32 and one thread.
On a machine with a GPU, contenders use bfloat16, and the tensors are as large as a real trainer's.
`benchmarks/replay.py` generates the random candidate sets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness.paired_timing import compare
from benchmarks.harness.peak_memory import Work, compare_peaks
from benchmarks.replay import H, T, V, make_sets, mask_logits
from sglang_topp import CandidateSets
from sglang_topp.replay import distillation_loss

__all__ = ["run"]

CHUNK = 128


def run() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _run_on_cpu()
    finally:
        torch.set_num_threads(threads)
    if torch.cuda.is_available():
        _run_on_gpu(16_384, 4096, 151_936)
    else:
        print("\nGPU: not measured, this machine has none")


def _run_on_cpu() -> None:
    shape = f"T = {T}, H = {H}, V = {V}, {len(make_sets(T, V).token_ids)} candidates"
    whole, chunked = "distillation_loss", f"distillation_loss, {CHUNK} rows at a time"
    with_tail = {
        "full logits, gathered": dense_tail(T, H, V),
        whole: candidate_distillation(T, H, V, "tail"),
        chunked: candidate_distillation(T, H, V, "tail", CHUNK),
    }
    compare(
        f"distillation with a tail, forward + backward; {shape}", with_tail, rounds=5, picture="distillation"
    )
    compare_peaks(
        "distillation with a tail, peak memory beyond inputs and gradients",
        with_tail,
        target=4,
        picture="distillation",
    )
    del with_tail
    renormalized = {
        "full logits, dense mask": dense_renormalized(T, H, V),
        whole: candidate_distillation(T, H, V, "renormalized"),
    }
    compare(
        f"distillation, renormalized, forward + backward; {shape}",
        renormalized,
        rounds=5,
        target=20,
        picture="distillation",
    )
    compare_peaks(
        "distillation, renormalized, peak memory beyond inputs and gradients",
        renormalized,
        target=20,
        picture="distillation",
    )


def candidate_distillation(
    t: int,
    h: int,
    v: int,
    outside: str = "tail",
    chunk: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Work:
    hidden, weight, sets = _inputs(t, h, v, dtype, device)

    def work() -> list[Tensor]:
        loss = distillation_loss(
            hidden, weight, sets, direction="forward", outside=outside, chunk_rows=chunk
        ).kl.sum()
        return _gradients(loss, hidden, weight)

    return work


def dense_tail(t: int, h: int, v: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Work:
    """Return a function that computes the loss and its gradients from full logits, as most trainers do.

    The loss treats all tokens outside the candidate set as one token, the tail. The tail's probability is 1
    minus the total probability of the candidates.
    """
    hidden, weight, sets = _inputs(t, h, v, dtype, device)
    positions, ids, teacher = _flat(sets, device)
    kept = torch.zeros(t, device=device).index_add_(0, positions, teacher.exp())
    rest = (1 - kept).clamp(min=0)

    def work() -> list[Tensor]:
        logprobs_TV = torch.log_softmax((hidden @ weight.t()).float(), dim=1)
        student = logprobs_TV[positions, ids]
        mass = torch.zeros(t, device=device).index_add(0, positions, student.exp())
        tail = torch.log1p(-mass.clamp(max=1 - 1e-6))
        loss = (teacher.exp() * (teacher - student)).sum() + (torch.xlogy(rest, rest) - rest * tail).sum()
        return _gradients(loss, hidden, weight)

    return work


def dense_renormalized(t: int, h: int, v: int) -> Work:
    hidden, weight, sets = _inputs(t, h, v, torch.float32, "cpu")
    positions, ids, teacher = _flat(sets, "cpu")
    kept = torch.zeros(t).index_add_(0, positions, teacher.exp())
    teacher = teacher - kept.log()[positions]

    def work() -> list[Tensor]:
        logprobs_TV = torch.log_softmax(mask_logits(hidden @ weight.t(), sets), dim=1)
        loss = (teacher.exp() * (teacher - logprobs_TV[positions, ids])).sum()
        return _gradients(loss, hidden, weight)

    return work


def _inputs(t: int, h: int, v: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, CandidateSets]:
    torch.manual_seed(0)
    hidden = torch.randn(t, h, dtype=dtype, device=device)
    weight = 0.02 * torch.randn(v, h, dtype=dtype, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), make_sets(t, v)


def _flat(sets: CandidateSets, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the position, token id, and log-prob of each candidate."""
    sizes = torch.tensor(sets.sizes, device=device)
    ids = torch.tensor(sets.token_ids, dtype=torch.int64, device=device)
    return torch.repeat_interleave(sizes), ids, torch.tensor(sets.logprobs, device=device)


def _gradients(loss: Tensor, hidden: Tensor, weight: Tensor) -> list[Tensor]:
    gradients = torch.autograd.grad(loss, (hidden, weight))
    if hidden.is_cuda:
        torch.cuda.synchronize()
    return list(gradients)


def _run_on_gpu(t: int, h: int, v: int, device: str = "cuda") -> None:
    dtype = torch.bfloat16
    compare(
        f"GPU, {dtype}, forward + backward; T = {t}, H = {h}, V = {v}",
        {
            "full logits, gathered": dense_tail(t, h, v, dtype, device),
            "with a tail": candidate_distillation(t, h, v, "tail", None, dtype, device),
            "renormalized": candidate_distillation(t, h, v, "renormalized", None, dtype, device),
        },
        rounds=5,
        picture="distillation",
    )


if __name__ == "__main__":
    run()
