"""Candidate sets on a GPU: what the engine runs, beside sorting, `torch.topk`, plain torch and one copy.

CUDA events around each call, after the device was held asleep for a moment: the calls of a contender that
waits for nothing are queued by then, and only the device's time is left. Of one that waits, waiting is part.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import compare, compare_counts
from benchmarks.nucleus import sort_and_cumsum
from sglang_topp.nucleus import select, top_p_candidates

__all__ = ["contenders", "run"]

BATCHES = (1, 8, 64, 256, 512)
VOCABULARIES = (32_000, 128_256, 151_936)
THRESHOLDS = (0.8, 0.95, 0.999)
# A std of 7 makes sets of the sizes that real models show; one of 0.5 keeps most of the vocabulary.
ROWS = {"realistic": 7.0, "flat": 0.5}
# The one that the targets are for.
SHOWN = (256, 151_936, 0.95, "realistic")
STAGED = "stage_top_p, no wait"
# Of a GPU at some GHz: some milliseconds, longer than a call takes to be queued.
SLEEP_CYCLES = 20_000_000


def run() -> None:
    if not torch.cuda.is_available():
        print("\nGPU: not measured, there is none here")
        return
    for b, v, p, kind in _cases():
        logprobs = _logprobs(b, v, ROWS[kind])
        sizes = top_p_candidates(logprobs, p)[2].diff().cpu()
        is_shown = (b, v, p, kind) == SHOWN
        compare(
            f"[{b}, {v}] float32, p = {p}, {kind}; set sizes: mean {sizes.double().mean():.0f},"
            f" largest {sizes.max()}",
            contenders(logprobs, p),
            rounds=9,
            warmup=2,
            clock=device_s,
            target=30 if is_shown else None,
            picture="nucleus_gpu" if is_shown else None,
        )
    _shown_in_detail()


def _cases() -> Iterator[tuple[int, int, float, str]]:
    for kind in ROWS:
        for v in VOCABULARIES:
            for p in THRESHOLDS:
                for b in BATCHES:
                    yield b, v, p, kind


def _shown_in_detail() -> None:
    """Reads of the log-probs, scratch memory, and what the host waits for."""
    b, v, p, kind = SHOWN
    for dtype in (torch.float32, torch.bfloat16):
        logprobs = _logprobs(b, v, ROWS[kind]).to(dtype)
        every = contenders(logprobs, p)
        copy_s = compare(
            f"[{b}, {v}] {dtype}, p = {p}, {kind}; 2.5 reads are 0.8 of one copy",
            {label: every[label] for label in ("one copy", STAGED)},
            rounds=31,
            warmup=5,
            clock=device_s,
            target=2 / 2.5,
            picture="nucleus_gpu",
        )
        copied = 2 * logprobs.nbytes / copy_s.rows[0].figure.median / 1e6
        print(f"one copy reads and writes {copied:.0f} GB/s")
    logprobs = _logprobs(b, v, ROWS[kind])
    every = contenders(logprobs, p)
    compare_counts(
        f"[{b}, {v}] float32, p = {p}, {kind}: memory at its highest, results included",
        "MiB",
        {label: _peak_bytes(every[label]) / 2**20 for label in every if label != "one copy"},
    )
    compare(
        f"[{b}, {v}] float32, p = {p}, {kind}: the host's time until the call is back, the device asleep",
        every,
        rounds=9,
        warmup=2,
        clock=host_s,
        picture="nucleus_gpu",
    )


def contenders(logprobs_BV: Tensor, p: float) -> dict[str, Callable[[], object]]:
    """Each leaves the candidates of every row on the GPU; `topk` those of 1024 places, a copy none."""
    from sglang_topp.nucleus.staged import stage_top_p

    p_B = np.full(len(logprobs_BV), p)
    capacity = int(top_p_candidates(logprobs_BV, p)[2][-1])
    copy_BV = torch.empty_like(logprobs_BV)
    places = min(1024, logprobs_BV.shape[1])
    return (
        {"sort and cumsum": partial(sort_and_cumsum, logprobs_BV, p)}
        | _flashinfer(logprobs_BV, p)
        | {
            f"topk({places})": partial(torch.topk, logprobs_BV, places),
            "one copy": partial(copy_BV.copy_, logprobs_BV),
            "plain torch (select)": partial(select.top_p_candidates, logprobs_BV, p_B, None),
            "top_p_candidates, one wait": partial(top_p_candidates, logprobs_BV, p),
            STAGED: partial(stage_top_p, logprobs_BV, p_B, None, capacity=capacity),
        }
    )


def _flashinfer(logprobs_BV: Tensor, p: float) -> dict[str, Callable[[], object]]:
    """Probabilities of the whole vocabulary, renormalised: the sets are where they are not 0."""
    renormalise = _renormalise()
    if renormalise is None:
        return {}
    return {"FlashInfer top_p_renorm_probs": partial(renormalise, logprobs_BV.float().exp(), p)}


@functools.cache
def _renormalise() -> Callable[..., Tensor] | None:
    try:
        from flashinfer.sampling import top_p_renorm_probs

        top_p_renorm_probs(torch.full((1, 8), 1 / 8, device="cuda"), 0.5)
    except Exception as problem:  # it is compiled on first use, and that may end in anything
        print(f"FlashInfer does not run here: {type(problem).__name__}")
        return None
    return top_p_renorm_probs


def device_s(contender: Callable[[], object]) -> float:
    """Seconds between two events on the device's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    contender()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def host_s(contender: Callable[[], object]) -> float:
    """Seconds until the call returns, while the device sleeps: all of the sleep for one that waits."""
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
    """Log-probs of normal logits."""
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.log_softmax(torch.randn(b, v, generator=generator, device="cuda") * std, -1)
