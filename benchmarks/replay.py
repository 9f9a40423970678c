"""Benchmark of scoring over candidate sets (replay), against full logits with a dense mask, and other heads.

Each contender runs a forward and a backward pass on the CPU, in float32 and in one thread. Where there is a
GPU, the comparison with other packages runs on it, in bfloat16. To compare with all of them, install `trl`,
`cut-cross-entropy`, and `liger-kernel`. `replay_gpu` measures more on a GPU.

Random set sizes imitate those at top-p 0.97: mean about 8, median 2, 99th percentile about 80, and 46 %
singletons.

The cliff's table has sets of one size, from 8 candidates to the whole vocabulary. Where a set is a large part
of the vocabulary, scores of single candidates would take many times the time and memory of full logits. Peak
memory is what `benchmarks/harness/peak_memory.py` defines: for the dense mask, whatever the sets' size, 13
bytes for each of the T * V logits. A mask that is built from sets of the whole vocabulary needs more than
that, in NumPy arrays that do not count.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable

import numpy as np
import psutil
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
    "gather_head",
    "head_inputs",
    "make_sets",
    "mask_logits",
    "run",
    "targets_of",
]

T, H, V = 2048, 1024, 32_768
SIZES = (8, 200, 2048, 8192, V)


def run() -> None:
    # Use one thread. On a shared machine, several threads wait for each other, and the times would include
    # these waits.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _compare_heads()
        _run_on_cpu()
    finally:
        torch.set_num_threads(threads)


def _compare_heads() -> None:
    """Compare with each package that is installed and runs here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    t, h, v = (8192, 4096, 151_936) if device == "cuda" else (1024, 512, 16_384)
    hidden, weight = head_inputs(t, h, v, dtype, device)
    sets = make_sets(t, v)
    targets = targets_of(sets, device)

    def full_logits() -> Tensor:
        return _picked(torch.log_softmax((hidden @ weight.t()).float(), dim=1), targets)

    heads: dict[str, Callable[[], Tensor]] = {"full logits": full_logits}
    for name, head in {"trl": _trl, "cut-cross-entropy": _cut_cross_entropy, "liger-kernel": _liger}.items():
        try:
            version = importlib.metadata.version(name)
            errors = head(hidden, weight, targets).detach().flatten() - full_logits().detach().flatten()
        except (importlib.metadata.PackageNotFoundError, RuntimeError) as problem:
            print(f"{name}: not installed, or does not run here ({problem})")
            continue
        print(f"{name} {version}: differs from torch by at most {float(errors.abs().max()):.1e}")
        heads[name] = functools.partial(head, hidden, weight, targets)
    heads["score without sets"] = lambda: score(hidden, weight, targets).logprobs
    heads["gather and index_add, over the sets"] = lambda: gather_head(hidden, weight, sets)
    heads["score, over the sets"] = lambda: score(hidden, weight, targets, sets).logprobs
    compare(
        f"heads of other packages, forward + backward; {device}, {dtype}, T = {t}, H = {h}, V = {v}",
        {name: _work(head, [hidden, weight]) for name, head in heads.items()},
        rounds=5,
        warmup=2,
    )


def _trl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from trl.trainer.utils import selective_log_softmax

    logprobs: Tensor = selective_log_softmax(hidden @ weight.t(), targets)
    return logprobs


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    impl = "cce" if hidden.is_cuda else "torch_compile"
    loss: Tensor = linear_cross_entropy(hidden, weight, targets, reduction="none", impl=impl)
    return -loss


def _liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")
    return -(loss[0] if isinstance(loss, tuple) else loss)


def gather_head(hidden: Tensor, weight: Tensor, sets: CandidateSets) -> Tensor:
    """Return the targets' log-probs over the sets as one would write it first: gather rows of the head."""
    sizes, ids, sampled = (
        torch.tensor(array, device=hidden.device) for array in (sets.sizes, sets.token_ids, sets.sampled_ids)
    )
    position = torch.arange(len(sets), device=hidden.device).repeat_interleave(sizes)
    products = hidden.index_select(0, position) * weight.index_select(0, ids)
    logits = products.float().sum(dim=1)
    peak = torch.segment_reduce(logits.detach(), "max", lengths=sizes)
    shifted = logits - peak.index_select(0, position)
    total = torch.zeros_like(peak).index_add(0, position, shifted.exp())
    is_target = ids == sampled.index_select(0, position)
    return shifted[is_target] - total.log()


def _run_on_cpu() -> None:
    sets = make_sets(T, V)
    shape = f"T = {T}, H = {H}, V = {V}, {len(sets.token_ids)} candidates"
    heads = {"full logits, dense mask": dense_head(T, H, V), "score": candidate_head(T, H, V)}
    compare(f"candidate-only head, forward + backward; {shape}", heads, rounds=5, target=20, picture="replay")
    compare_peaks(
        "candidate-only head, peak memory beyond inputs and gradients", heads, target=20, picture="replay"
    )
    del heads
    compare(
        f"sets of 8 candidates, forward + backward; T = {T}, H = {H}, V = {V}",
        {
            "full logits, dense mask": dense_head(T, H, V, 8),
            "gather and index_add": gathered_head(T, H, V, 8),
            "score": candidate_head(T, H, V, 8),
        },
        rounds=5,
    )
    _compare_set_sizes()
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
    on_logits = {"dense mask": dense_logits(T, V), "score_logits": sparse_logits(T, V)}
    compare(f"from logits, forward + backward; {shape}", on_logits, rounds=5, target=5, picture="replay")
    compare_peaks(
        "from logits, peak memory beyond the logits and their gradient", on_logits, picture="replay"
    )
    del on_logits
    whole = {"full logits": plain_full_head(T, H, V), "score without sets": full_head(T, H, V)}
    compare(f"whole vocabulary, forward + backward; T = {T}, H = {H}, V = {V}", whole, rounds=3)
    compare_peaks("whole vocabulary, peak memory beyond inputs and gradients", whole)
    del whole
    for chunk, chunks in ((T, "in one chunk"), (128, "in chunks of 128 rows")):
        compare_peaks(
            f"whole vocabulary, response-only: peak memory beyond inputs and gradients, {chunks}",
            {f"1/{n} of the rows kept": response_only(T, H, V, n, chunk) for n in (1, 2, 4, 8)},
        )


def _compare_set_sizes() -> None:
    """Print the cliff's table: time and memory by the share of the vocabulary that is in a set."""
    t = 256
    for size in SIZES:
        heads = {"full logits, dense mask": dense_head(t, H, V, size), "score": candidate_head(t, H, V, size)}
        gib = 4 * t * size * H * 4 / 2**30  # the gather holds four tensors [candidates, H] at one time
        if 1.5 * gib < psutil.virtual_memory().available / 2**30:
            heads["gather and index_add"] = gathered_head(t, H, V, size)
        else:
            print(f"\ngather and index_add, sets of {size}: left out, as it takes {gib:.0f} GiB")
        title = f"sets of {size} candidates, {size / V:.2%} of the vocabulary; T = {t}, H = {H}, V = {V}"
        compare(f"{title}: forward + backward", heads, rounds=5)
        compare_peaks(f"{title}: peak memory beyond inputs and gradients", heads)


@functools.lru_cache(maxsize=1)
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


def gathered_head(t: int, h: int, v: int, size: int | None = None) -> Work:
    hidden, weight = head_inputs(t, h, v, torch.float32, "cpu")
    sets = make_sets(t, v, size)
    return _work(lambda: gather_head(hidden, weight, sets), [hidden, weight])


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


def dense_logits(t: int, v: int) -> Work:
    logits, sets = _logits(t, v), make_sets(t, v)
    targets = targets_of(sets)
    return _work(lambda: _picked(torch.log_softmax(mask_logits(logits, sets), dim=1), targets), [logits])


def sparse_logits(t: int, v: int) -> Work:
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
