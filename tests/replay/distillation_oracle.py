"""Reference for distillation over candidate sets: dense float64 distributions, one position at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_topp import CandidateSets

SMALLEST_TAIL = 1e-6


def teacher_sets(
    logits: Tensor, p: float, sampled: list[int], *, empty: tuple[int, ...] = ()
) -> CandidateSets:
    """Return the top-p sets of `softmax(logits)` [T, V] as an engine reports them, with `sampled` in each."""
    ids, logprobs, kept_ids = [], [], []
    for t, row in enumerate(torch.log_softmax(logits.double(), dim=1).float().numpy()):
        order = np.lexsort((np.arange(len(row)), -row))
        above = np.cumsum(np.exp(row[order], dtype=np.float64)) - np.exp(row[order], dtype=np.float64)
        inside = (above < p) | (order == sampled[t]) | (p == 1)
        members = order[inside & (t not in empty)]
        ids.append(members)
        logprobs.append(row[members])
        kept_ids.append(sampled[t] if len(members) else -1)
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in ids], dtype=np.int64)])
    return CandidateSets(
        np.concatenate([np.zeros(0, np.int32), *ids]),
        np.concatenate([np.zeros(0, np.float32), *logprobs]),
        offsets,
        np.array(kept_ids, np.int32),
    )


def kl_of(log_a: Tensor, log_b: Tensor) -> Tensor:
    possible = log_a > -torch.inf
    return (log_a.exp() * (log_a - log_b))[possible].sum()


def distillation(
    logits: Tensor, sets: CandidateSets, direction: str, outside: str, counts: list[bool] | None = None
) -> Tensor:
    """Return the KL at each position, [T], differentiable in the student's final `logits` [T, V]."""
    out = []
    for t, (ids, logprobs) in enumerate(sets):
        assert logprobs is not None
        ids, logprobs = (
            ids[logprobs > np.finfo(np.float32).min],
            logprobs[logprobs > np.finfo(np.float32).min],
        )
        if not len(ids) or (counts is not None and not counts[t]):
            out.append(logits.new_zeros(()))
            continue
        student = torch.log_softmax(logits[t], dim=0)
        teacher = torch.tensor(logprobs, dtype=torch.float64)
        inside = torch.tensor(ids, dtype=torch.int64)
        if outside == "renormalized":
            student, teacher = (torch.log_softmax(x, dim=0) for x in (student[inside], teacher))
        else:
            others = torch.ones(len(student), dtype=torch.bool).index_fill(0, inside, False)
            tail = (1 - teacher.exp().sum()).clamp(min=SMALLEST_TAIL if direction == "reverse" else 0)
            student = student[inside]
            if others.any():
                student = torch.cat(
                    [student, torch.logsumexp(torch.log_softmax(logits[t], 0)[others], 0)[None]]
                )
                teacher = torch.cat([teacher, tail.log()[None]])
            teacher = teacher - torch.logsumexp(teacher, dim=0)
        out.append(kl_of(teacher, student) if direction == "forward" else kl_of(student, teacher))
    return torch.stack(out) if out else logits.new_zeros(0)
