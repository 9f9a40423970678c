"""Reference for replay: dense float64 logits, one position at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_topp import CandidateSets

EMPTY, SINGLE = 0, 1


def random_sets(sizes: list[int], vocab_size: int, *, seed: int = 0) -> CandidateSets:
    """Return sets of the given sizes. The target is a random member, not always the most likely one."""
    rng = np.random.default_rng(seed)
    ids, logprobs, sampled = [], [], []
    for size in sizes:
        members = rng.choice(vocab_size, size, replace=False)
        values = np.round(rng.normal(-3, 2, size).clip(max=-0.01), 1).astype(np.float32)  # ties are common
        order = np.lexsort((members, -values))
        ids.append(members[order])
        logprobs.append(values[order])
        sampled.append(rng.choice(members) if size else -1)
    return CandidateSets(
        np.concatenate([np.zeros(0, np.int64), *ids]),
        np.concatenate([np.zeros(0, np.float32), *logprobs]),
        np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]),
        np.array(sampled, np.int32),
    )


def targets_of(sets: CandidateSets) -> Tensor:
    return torch.tensor(sets.sampled_ids, dtype=torch.int64)


def dense_mask(sets: CandidateSets, vocab_size: int) -> Tensor:
    """Return bool [T, vocab_size], True at the candidates, and everywhere in a row without candidates."""
    mask = torch.zeros(len(sets), vocab_size, dtype=torch.bool)
    for t, (ids, _) in enumerate(sets):
        mask[t, torch.tensor(ids, dtype=torch.int64) if len(ids) else slice(None)] = True
    return mask


def head_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logit_scale * logits
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor) and temperature.ndim:
        return logits / temperature[:, None]
    return logits / temperature


def entropy_of(logprobs: Tensor) -> Tensor:
    possible = logprobs[logprobs > -torch.inf]
    return -(possible.exp() * possible).sum()


def scores(
    logits: Tensor, targets: Tensor, sets: CandidateSets, kl_to: Tensor | None = None
) -> dict[str, Tensor]:
    """Return every score over the support, differentiable, in the dtype of `logits`."""
    zero = logits.sum() * 0 if logits.isfinite().all() else logits.new_zeros(())
    logprobs, entropies, by_candidate, kls = [], [], [], []
    for t, (ids, _) in enumerate(sets):
        if len(ids) == EMPTY:
            logprobs.append(zero)
            entropies.append(zero)
            kls.append(zero)
            continue
        ids_K = torch.tensor(ids, dtype=torch.int64)
        logprob_K = torch.log_softmax(logits[t, ids_K], dim=0)
        logprobs.append(logprob_K[(ids_K == targets[t]).nonzero().item()])
        entropies.append(entropy_of(logprob_K))
        by_candidate.append(logprob_K)
        if kl_to is not None:
            other_K = kl_to[int(sets.offsets[t]) : int(sets.offsets[t + 1])].to(logprob_K)
            other_K = torch.log_softmax(other_K, dim=0)
            possible = logprob_K > -torch.inf
            kls.append((logprob_K.exp() * (logprob_K - other_K))[possible].sum())
    empty = [logits.new_zeros(0)]
    return {
        "logprobs": torch.stack(logprobs) if logprobs else empty[0],
        "entropy": torch.stack(entropies) if entropies else empty[0],
        "candidate_logprobs": torch.cat(by_candidate or empty),
        "kl": torch.stack(kls) if kl_to is not None else empty[0],
    }


def full_scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropy over the whole vocabulary."""
    logprobs = torch.log_softmax(logits, dim=1)
    return logprobs[torch.arange(len(targets)), targets], torch.stack([entropy_of(row) for row in logprobs])


def mixed(values: dict[str, Tensor], seed: int = 1) -> Tensor:
    """Return a scalar in which every value has a different weight."""
    rng = torch.Generator().manual_seed(seed)
    return sum(
        (value * torch.randn(value.shape, generator=rng, dtype=torch.float64).to(value)).sum()
        for value in values.values()
    )


def leaves(*tensors: Tensor | None, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Return detached copies that require gradients, rounded to `dtype` and converted back."""
    return [
        None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in tensors
    ]


def error(got: Tensor, exact: Tensor) -> float:
    """Return the largest difference, relative to the largest value."""
    got, exact = got.detach(), exact.detach()
    if not exact.numel():
        return 0.0
    scale = max(float(exact.abs().max()), 1e-30)
    return float((got.double() - exact.double()).abs().max()) / scale
