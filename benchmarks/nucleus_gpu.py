"""Benchmark of top-p extraction on a GPU: this project's kernels against a sort, `topk`, and plain torch.

Each call is timed between two CUDA events. Before the first event, a sleep kernel occupies the GPU. The
contender queues its kernels while the sleep kernel runs. If a contender never waits for the GPU, its measured
time is therefore GPU time alone. If a contender waits for the GPU, the GPU is idle until the contender queues
its next kernel. The measured time includes this idle time, but not the sleep kernel.

Shape legend: B is the number of rows, and V the vocabulary size.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.paired_timing import compare, compare_counts
from benchmarks.nucleus_cpu import sort_and_cumsum
from sglang_topp.nucleus import extraction_torch, top_p_candidates

__all__ = ["contenders", "run"]

BATCHES = (1, 8, 64, 256, 512)
VOCABULARIES = (32_000, 128_256, 151_936)
THRESHOLDS = (0.8, 0.95, 0.999)
# Standard deviations of the logits. With 7, the sets are as large as a real model's. With 0.5, the sets hold
# most of the vocabulary.
ROWS = {"realistic": 7.0, "flat": 0.5}
# The only case with target speedups, as a tuple of the number of rows, the vocabulary size, the threshold,
# and the kind of logits.
MAIN_CASE = (256, 151_936, 0.95, "realistic")
STAGED = "stage_top_p, no wait"
# Before a timed call, a sleep kernel occupies the GPU for this many clock cycles, about 10 ms at 2 GHz. Every
# contender queues its kernels in less than 10 ms.
SLEEP_CYCLES = 20_000_000


def run() -> None:
    if not torch.cuda.is_available():
        print("\nGPU: not measured, this machine has none")
        return
    for b, v, p, kind in _cases():
        logprobs = _logprobs(b, v, ROWS[kind])
        sizes = top_p_candidates(logprobs, p)[2].diff().cpu()
        is_main_case = (b, v, p, kind) == MAIN_CASE
        compare(
            f"[{b}, {v}] float32, p = {p}, {kind}; set sizes: mean {sizes.double().mean():.0f},"
            f" largest {sizes.max()}",
            contenders(logprobs, p),
            rounds=9,
            warmup=2,
            clock=device_s,
            target=30 if is_main_case else None,
            picture="nucleus_gpu" if is_main_case else None,
        )
    _compare_main_case()


def _cases() -> Iterator[tuple[int, int, float, str]]:
    for kind in ROWS:
        for v in VOCABULARIES:
            for p in THRESHOLDS:
                for b in BATCHES:
                    yield b, v, p, kind


def _compare_main_case() -> None:
    """Compare the times of the extraction and of one copy of the input; print peak memory and host times."""
    b, v, p, kind = MAIN_CASE
    for dtype in (torch.float32, torch.bfloat16):
        logprobs = _logprobs(b, v, ROWS[kind]).to(dtype)
        all_contenders = contenders(logprobs, p)
        copy_s = compare(
            f"[{b}, {v}] {dtype}, p = {p}, {kind}; 2.5 reads are 0.8 of one copy",
            {label: all_contenders[label] for label in ("one copy", STAGED)},
            rounds=31,
            warmup=5,
            clock=device_s,
            target=2 / 2.5,
            picture="nucleus_gpu",
        )
        gigabytes_per_s = 2 * logprobs.nbytes / copy_s.rows[0].figure.median / 1e6
        print(f"one copy reads and writes {gigabytes_per_s:.0f} GB/s")
    logprobs = _logprobs(b, v, ROWS[kind])
    all_contenders = contenders(logprobs, p)
    compare_counts(
        f"[{b}, {v}] float32, p = {p}, {kind}: peak memory, results included",
        "MiB",
        {label: _peak_bytes(call) / 2**20 for label, call in all_contenders.items() if label != "one copy"},
    )
    compare(
        f"[{b}, {v}] float32, p = {p}, {kind}: host time until the call returns, while the device sleeps",
        all_contenders,
        rounds=9,
        warmup=2,
        clock=host_s,
        picture="nucleus_gpu",
    )


def contenders(logprobs_BV: Tensor, p: float) -> dict[str, Callable[[], object]]:
    """Return the functions to compare, by label.

    Most contenders write the candidates of every row to GPU memory. `topk` returns each row's 1024 most
    likely tokens. FlashInfer returns a renormalized probability for every token of the vocabulary. The
    contender "one copy" only copies the log-probs.
    """
    from sglang_topp.nucleus.gpu_extraction import find_top_p

    p_B = np.full(len(logprobs_BV), p)
    capacity = int(top_p_candidates(logprobs_BV, p)[2][-1])
    copy_BV = torch.empty_like(logprobs_BV)
    k = min(1024, logprobs_BV.shape[1])
    return (
        {"sort and cumsum": partial(sort_and_cumsum, logprobs_BV, p)}
        | _flashinfer(logprobs_BV, p)
        | {
            f"topk({k})": partial(torch.topk, logprobs_BV, k),
            "one copy": partial(copy_BV.copy_, logprobs_BV),
            "plain torch (select)": partial(extraction_torch.top_p_candidates, logprobs_BV, p_B, None),
            "top_p_candidates, one wait": partial(top_p_candidates, logprobs_BV, p),
            STAGED: lambda: find_top_p(logprobs_BV, p_B, None).stage(capacity),
        }
    )


def _flashinfer(logprobs_BV: Tensor, p: float) -> dict[str, Callable[[], object]]:
    """Return FlashInfer's label and function in a dict, which is empty if FlashInfer does not run."""
    top_p_renorm_probs = _import_top_p_renorm_probs()
    if top_p_renorm_probs is None:
        return {}
    return {"FlashInfer top_p_renorm_probs": partial(top_p_renorm_probs, logprobs_BV.float().exp(), p)}


@functools.cache
def _import_top_p_renorm_probs() -> Callable[..., Tensor] | None:
    try:
        from flashinfer.sampling import top_p_renorm_probs

        top_p_renorm_probs(torch.full((1, 8), 1 / 8, device="cuda"), 0.5)
    except Exception as problem:  # the first call compiles the kernel, and may raise any exception
        print(f"FlashInfer does not run here: {type(problem).__name__}")
        return None
    return top_p_renorm_probs


def device_s(contender: Callable[[], object]) -> float:
    """Return the seconds that the contender's call takes on the GPU, measured between two CUDA events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    contender()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def host_s(contender: Callable[[], object]) -> float:
    """Return the seconds that the contender's call takes on the host while a sleep kernel occupies the GPU.

    If a contender waits for the GPU, the returned time includes the wait for the sleep kernel.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start = time.perf_counter()
    contender()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed


def _peak_bytes(contender: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    contender()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _logprobs(b: int, v: int, std: float) -> Tensor:
    """Return log-probs of normally distributed logits."""
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.log_softmax(torch.randn(b, v, generator=generator, device="cuda") * std, -1)
