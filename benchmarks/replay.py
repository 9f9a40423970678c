"""Benchmark of scoring over candidate sets (replay), against full logits with a dense mask.

Each contender runs a forward and a backward pass on the CPU, in float32 and in one thread. `replay_gpu`
measures a GPU. Random set sizes imitate those at top-p 0.97: mean about 8, median 2, 99th percentile about
80, and 46 % singletons.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.paired_timing import compare
from benchmarks.harness.peak_memory import Work, compare_peaks
from sglang_topp import CandidateSets
from sglang_topp.replay import (
    Layout,
    score,
    score_logits,
)

__all__ = [
    "candidate_head",
    "epochs",
    "full_head",
    "head_inputs",
    "make_sets",
    "mask_logits",
    "run",
    "targets_of",
]

T, H, V = 2048, 1024, 32_768
TINY = (16, 8, 64)


def run() -> None:
    # Use one thread. On a shared machine, several threads wait for each other, and the times would include
    # these waits.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _run_on_cpu()
    finally:
        torch.set_num_threads(threads)


def _run_on_cpu() -> None:
    sets = make_sets(T, V)
    shape = f"T = {T}, H = {H}, V = {V}, {len(sets.token_ids)} candidates"
    compare(
        f"candidate-only head, forward + backward; {shape}",
        {"full logits, dense mask": dense_head(T, H, V), "score": candidate_head(T, H, V)},
        rounds=5,
        target=20,
        picture="replay",
    )
    compare_peaks(
        "candidate-only head, peak memory beyond inputs and gradients",
        {
            "full logits, dense mask": (dense_head, (T, H, V)),
            "score": (candidate_head, (T, H, V)),
        },
        warmup=TINY,
        target=20,
        picture="replay",
    )
    for size in (8192, V):
        compare(
            f"large sets, {size} candidates a position, forward + backward; T = 256, H = {H}, V = {V}",
            {
                "full logits, dense mask": dense_head(256, H, V, size),
                "score": candidate_head(256, H, V, size),
            },
            rounds=5,
        )
        compare_peaks(
            f"large sets, {size} candidates a position, peak memory beyond inputs and gradients",
            {
                "full logits, dense mask": (dense_head, (256, H, V, size)),
                "score": (candidate_head, (256, H, V, size)),
            },
            warmup=TINY,
        )
    compare(
        f"candidate-only head by set size, all sets of one size; T = {T}, H = {H}, V = {V}",
        {f"sets of {size}": candidate_head(T, H, V, size) for size in (8, 16, 32, 64, 128)},
        rounds=5,
    )
    compare(
        f"one reference and four PPO epochs over the same sets; {shape}",
        {
            "score(sets)": epochs(T, H, V, to_torch=False),
            "score(sets.to_torch())": epochs(T, H, V, to_torch=True),
        },
        rounds=9,
    )
    compare(
        f"from logits, forward + backward; {shape}",
        {"dense mask": dense_logits(T, H, V), "score_logits": sparse_logits(T, H, V)},
        rounds=5,
        target=5,
        picture="replay",
    )
    compare_peaks(
        "from logits, peak memory beyond the logits and their gradient",
        {"dense mask": (dense_logits, (T, H, V)), "score_logits": (sparse_logits, (T, H, V))},
        warmup=TINY,
        picture="replay",
    )
    compare(
        f"whole vocabulary, forward + backward; T = {T}, H = {H}, V = {V}",
        {"full logits": plain_full_head(T, H, V), "score without sets": full_head(T, H, V)},
        rounds=3,
    )
    kept = (1, 2, 4, 8)
    compare_peaks(
        "whole vocabulary, response-only: peak memory beyond inputs and gradients, in one chunk",
        {f"1/{n} of the rows kept": (response_only, (T, H, V, n, T)) for n in kept},
        warmup=(*TINY, 1, 16),
    )
    compare_peaks(
        "whole vocabulary, response-only: peak memory beyond inputs and gradients, in chunks of 128 rows",
        {f"1/{n} of the rows kept": (response_only, (T, H, V, n, 128)) for n in kept},
        warmup=(*TINY, 1, 16),
    )


def make_sets(num_positions: int, vocab_size: int, size: int | None = None) -> CandidateSets:
    """Return random sets of `size` tokens each. If `size` is None, the sizes imitate those of a rollout."""
    rng = np.random.default_rng(0)
    sizes = np.full(num_positions, size or 1)
    if size is None:
        several = rng.random(num_positions) >= 0.46
        tail = np.rint(np.exp(rng.normal(1.8, 1.3, several.sum()))).astype(int)
        sizes[several] = np.clip(1 + tail, 2, min(512, vocab_size))
    # As in a real rollout, frequent tokens occur in many sets.
    popularity = 1 / (10 + np.arange(vocab_size))
    stream = rng.choice(vocab_size, int(sizes.sum()) * 4 + 64, p=popularity / popularity.sum())
    ids, taken = [], 0
    for count in sizes:
        _, first = np.unique(stream[taken : taken + 4 * count], return_index=True)
        members = stream[taken + np.sort(first)][:count]
        if len(members) < count:
            rest = np.setdiff1d(np.arange(vocab_size), members)
            members = np.concatenate([members, rng.choice(rest, count - len(members), replace=False)])
        ids.append(members)
        taken += 4 * int(count)
    logprobs = np.concatenate([-np.arange(1, count + 1, dtype=np.float32) for count in sizes])
    sampled = [members[0] for members in ids]
    return CandidateSets(np.concatenate(ids), logprobs, np.concatenate([[0], np.cumsum(sizes)]), sampled)


def head_inputs(t: int, h: int, v: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(t, h, dtype=dtype, device=device)
    return hidden.requires_grad_(), (0.02 * torch.randn(v, h, dtype=dtype, device=device)).requires_grad_()


def _work(function: Callable[[], Tensor], leaves: list[Tensor]) -> Work:
    """Return a function that runs the forward and backward pass, and returns the gradients of `leaves`."""

    def work() -> list[Tensor]:
        for leaf in leaves:
            leaf.grad = None
        function().sum().backward()
        if leaves[0].is_cuda:
            torch.cuda.synchronize()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    return work


def _picked(logprobs_TV: Tensor, targets: Tensor) -> Tensor:
    return logprobs_TV.gather(1, targets[:, None])


def targets_of(sets: CandidateSets, device: str = "cpu") -> Tensor:
    return torch.tensor(sets.sampled_ids, dtype=torch.int64, device=device)


def mask_logits(logits_TV: Tensor, sets: CandidateSets) -> Tensor:
    """Return a copy with minus infinity outside the sets, each of which has candidates."""
    is_candidate = torch.zeros(logits_TV.shape, dtype=torch.bool)
    places = np.repeat(np.arange(len(sets)) * logits_TV.shape[1], sets.sizes) + sets.token_ids
    is_candidate.view(-1)[torch.from_numpy(places)] = True
    return logits_TV.masked_fill(is_candidate.logical_not_(), -torch.inf)


def dense_head(t: int, h: int, v: int, size: int | None = None) -> Work:
    hidden, weight = head_inputs(t, h, v, torch.float32, "cpu")
    sets = make_sets(t, v, size)
    targets = targets_of(sets)

    def function() -> Tensor:
        return _picked(torch.log_softmax(mask_logits(hidden @ weight.t(), sets), dim=1), targets)

    return _work(function, [hidden, weight])


def candidate_head(
    t: int, h: int, v: int, size: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Work:
    hidden, weight = head_inputs(t, h, v, dtype, device)
    sets = make_sets(t, v, size)
    targets = targets_of(sets, device)
    return _work(lambda: score(hidden, weight, targets, sets).logprobs, [hidden, weight])


def epochs(
    t: int,
    h: int,
    v: int,
    *,
    to_torch: bool,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Callable[[], None]:
    """Return a function that runs one training step.

    The step is one forward pass for the reference policy, then four forward-backward passes for the policy.
    """
    hidden, weight = head_inputs(t, h, v, dtype, device)
    sets = make_sets(t, v)
    targets, buffer = targets_of(sets, device), torch.zeros_like(weight)

    def step() -> None:
        candidates = sets.to_torch(device) if to_torch else sets
        with torch.no_grad():
            score(hidden, weight, targets, candidates)
        for _ in range(4):
            scores = score(hidden, weight, targets, candidates, weight_grad=buffer)
            scores.logprobs.sum().backward()
        if hidden.is_cuda:
            torch.cuda.synchronize()

    return step


def _logits(t: int, v: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(t, v).requires_grad_()


def dense_logits(t: int, h: int, v: int) -> Work:
    logits, sets = _logits(t, v), make_sets(t, v)
    targets = targets_of(sets)
    return _work(lambda: _picked(torch.log_softmax(mask_logits(logits, sets), dim=1), targets), [logits])


def sparse_logits(t: int, h: int, v: int) -> Work:
    logits, sets = _logits(t, v), make_sets(t, v)
    targets = targets_of(sets)
    return _work(lambda: score_logits(logits, targets, sets).logprobs, [logits])


def plain_full_head(t: int, h: int, v: int) -> Work:
    hidden, weight = head_inputs(t, h, v, torch.float32, "cpu")
    targets = torch.arange(t) % v
    return _work(lambda: _picked(torch.log_softmax(hidden @ weight.t(), dim=1), targets), [hidden, weight])


def full_head(
    t: int, h: int, v: int, chunk: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Work:
    hidden, weight = head_inputs(t, h, v, dtype, device)
    targets = torch.arange(t, device=device) % v
    return _work(lambda: score(hidden, weight, targets, chunk_rows=chunk).logprobs, [hidden, weight])


def response_only(t: int, h: int, v: int, n: int, chunk: int) -> Work:
    """Return a function that scores only the response: the last t // n of a sequence's t + 1 tokens."""
    hidden, weight = head_inputs(t + 1, h, v, torch.float32, "cpu")
    rows = Layout().select_rows([t + 1 - t // n], [t // n])
    targets = torch.arange(t // n) % v

    def function() -> Tensor:
        return score(rows.select(hidden), weight, targets, chunk_rows=chunk).logprobs

    return _work(function, [hidden, weight])


if __name__ == "__main__":
    run()
