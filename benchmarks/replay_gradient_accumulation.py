"""Benchmark of scoring over candidate sets when the LM head's gradient accumulates over micro-batches.

The benchmark compares the values of `weight_grad`, which decide how a micro-batch's backward pass adds to the
head's accumulated gradient. With `"dense"`, the pass zeroes a new matrix of the head's size, fills a few of
its rows, and adds the whole matrix. With a buffer, the pass adds the rows to the buffer in place. The
baseline computes full logits, and masks them.

The benchmark uses torch's default number of threads. torch's threads spin while they wait for each other. If
other processes compete for the cores, a thread may spin for a whole time slice. On such a busy machine,
`OMP_WAIT_POLICY=passive` or a single thread makes the benchmark much faster.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.paired_timing import compare
from benchmarks.harness.peak_memory import Work, compare_peaks
from benchmarks.replay import H, T, V, make_sets, mask_logits
from sglang_topp import CandidateSets
from sglang_topp.replay import score

__all__ = ["run"]

WAYS = ("dense", "buffer")
VOCABULARIES = (32_768, 65_536, 151_936)
STEPS = 10


def run() -> None:
    sets = make_sets(T, V)
    ids_with_gradient = np.unique(sets.token_ids[np.repeat(sets.sizes > 1, sets.sizes)])
    print(
        f"\nT = {T}, H = {H}, V = {V}, float32, {torch.get_num_threads()} threads;"
        f" {len(sets.token_ids)} candidates, {len(ids_with_gradient)} ids with a gradient;"
        f" OMP_WAIT_POLICY {os.environ.get('OMP_WAIT_POLICY', 'not set')}"
    )
    heads = {"full logits, dense mask": dense_head(T, H, V)}
    heads |= {f"score, weight_grad {way}": candidate_head(T, H, V, way) for way in WAYS}
    picture = "replay_gradient_accumulation"
    compare("accumulating, forward + backward", heads, rounds=7, target=50, picture=picture)
    compare_peaks("accumulating, peak memory beyond inputs and gradients", heads, target=50, picture=picture)
    del heads
    for way, rounds in (("buffer", 9), ("dense", 3)):
        by_size = {f"V = {v}": candidate_head(T, H, v, way, v) for v in VOCABULARIES}
        title = f"same number of candidates over larger vocabularies, weight_grad {way}"
        compare(title, by_size, rounds=rounds)
        compare_peaks(f"{title}: peak memory", by_size)
        del by_size
    with _busy_process() as run_beside:
        work = candidate_head(T, H, V, "buffer")
        compare(
            f"threads, with and without a busy process, {STEPS} steps of weight_grad buffer",
            {
                "1 thread, alone": _steps(work, 1),
                "2 threads, alone": _steps(work, 2),
                "1 thread, busy process": run_beside(_steps(work, 1)),
                "2 threads, busy process": run_beside(_steps(work, 2)),
            },
            rounds=9,
        )


def dense_head(t: int, h: int, v: int) -> Work:
    hidden, weight, sets = _inputs(t, h, v, v)
    targets = torch.tensor(sets.sampled_ids, dtype=torch.int64)

    def value() -> Tensor:
        logprobs_TV = torch.log_softmax(mask_logits(hidden @ weight.t(), sets), dim=1)
        return logprobs_TV.gather(1, targets[:, None])

    return _work(value, hidden)


def candidate_head(t: int, h: int, v: int, way: str = "buffer", spread: int | None = None) -> Work:
    hidden, weight, sets = _inputs(t, h, v, spread or v)
    targets = torch.tensor(sets.sampled_ids, dtype=torch.int64)

    def value() -> Tensor:
        where = weight.grad if way == "buffer" else way
        return score(hidden, weight, targets, sets, weight_grad=where).logprobs

    return _work(value, hidden)


def _inputs(t: int, h: int, v: int, spread: int) -> tuple[Tensor, Tensor, CandidateSets]:
    """Return hidden states, a head whose `.grad` is set, and sets with token ids spread over [0, `spread`).

    The sets contain at most 32,768 distinct token ids, however large the vocabulary is.
    """
    torch.manual_seed(0)
    hidden = torch.randn(t, h).requires_grad_()
    weight = (0.02 * torch.randn(v, h)).requires_grad_()
    weight.grad = torch.full_like(weight, 0.5)
    drawn = min(v, V)
    sets = make_sets(t, drawn)
    place = np.random.default_rng(1).permutation(spread)[:drawn]
    ids, sampled = place[sets.token_ids], place[sets.sampled_ids]
    return hidden, weight, CandidateSets(ids, sets.logprobs, sets.offsets, sampled)


def _work(value: Callable[[], Tensor], hidden: Tensor) -> Work:
    """Return a function that runs one micro-batch's forward and backward pass."""

    def work() -> list[Tensor]:
        hidden.grad = None
        value().sum().backward()
        return [] if hidden.grad is None else [hidden.grad]

    return work


def _steps(work: Work, threads: int) -> Callable[[], None]:
    def steps() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        for _ in range(STEPS):
            work()
        torch.set_num_threads(before)

    return steps


@contextmanager
def _busy_process() -> Iterator[Callable[[Callable[[], None]], Callable[[], None]]]:
    """Yield a decorator that lets another process keep one core busy while the decorated function runs.

    The other process is paused whenever no decorated function runs.
    """
    process = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    process.start()
    pid = process.pid or 0

    def beside(function: Callable[[], None]) -> Callable[[], None]:
        def together() -> None:
            os.kill(pid, signal.SIGCONT)
            try:
                function()
            finally:
                os.kill(pid, signal.SIGSTOP)

        return together

    try:
        time.sleep(5)  # wait until the process has imported this module and is busy
        os.kill(pid, signal.SIGSTOP)
        yield beside
    finally:
        process.kill()
        process.join()


def _spin() -> None:
    while True:
        pass


if __name__ == "__main__":
    run()
