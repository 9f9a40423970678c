"""From logits: scores over the support, and beside them, when asked, over the whole vocabulary.

For a trainer that has `[T, V]` logits anyway. The support's logits are picked, never masked: no
dense mask is built, and the caller's logits are only read. The one tensor with a vocabulary axis is
the gradient.

Shape legend: T positions, V columns held by this rank, C positions of one chunk, n candidates in
all, m entries (candidates of positions with a choice that this rank holds).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.scores import (
    Scores,
    accumulation_dtype,
    adjust_logits,
    check_temperature,
    score_support,
)
from sglang_topp.replay.support import Shard, Support, check_targets
from sglang_topp.replay.vocab_softmax import RowSums, local_targets, row_parts, rows_per_chunk, to_gradient

__all__ = ["dense_mask", "full_logprobs", "mask_logits", "masked_logprobs"]

_CHUNK_BYTES = 1 << 23


def masked_logprobs(
    logits: Tensor,
    targets: Tensor,
    candidates: CandidateSets,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    per_candidate: bool = False,
    kl_to: Tensor | None = None,
    full: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> Scores:
    """Score `targets` under `softmax(logits / temperature)` restricted to the candidate sets.

    ::

        logprobs[t] = z[t, target_t] - log(sum over i in C_t of exp(z[t, i])),   z = logits / temperature

    Differentiable, once, in `logits`, through every value that is asked for. Apart from the gradient,
    memory is that of the candidates, not of the logits. Sums run in float32 (float64 for float64).
    A position with one candidate scores exactly 0, an empty span 0; neither has a gradient.

    Args:
        logits: [T, V], float16, bfloat16, float32 or float64, after the model's soft cap if it has
            one; the columns that this rank holds.
        full: also return the log-prob and the entropy over the whole vocabulary, of every position,
            differentiable; the backward still makes one gradient. Every target must then be an id,
            also where the set is empty.
        chunk_rows: positions worked on at a time for `full`; by default as many as take 8 MiB.

    The other arguments, the result and the errors are those of `candidate_logprobs`; with a
    `tp_group` the gradient is that of this rank's columns.
    """
    _check_logits(logits, targets)
    shard = Shard.of(logits.shape[1], vocab_start, vocab_size, parallel=tp_group is not None)
    support = Support.of(candidates, targets, shard)
    temperature = check_temperature(temperature, len(targets))
    picked, full_logprobs, full_entropy = _FromLogits.apply(
        logits,
        support.positions,
        support.ids,
        targets if full else None,
        temperature,
        shard,
        tp_group,
        chunk_rows,
    )
    scores = score_support(
        adjust_logits(picked, support.positions, temperature, None),
        support,
        entropy=entropy,
        per_candidate=per_candidate,
        kl_to=kl_to,
        tp_group=tp_group,
    )
    return Scores(
        scores.logprobs, scores.entropy, scores.candidate_logprobs, scores.kl, full_logprobs, full_entropy
    )


def full_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> Scores:
    """Score `targets` under `softmax(logits / temperature)` over the whole vocabulary: no replay.

    `Scores.logprobs` and `Scores.entropy`, both differentiable in `logits`. The arguments are those of
    `masked_logprobs`; padded columns, from `vocab_size` on, have probability 0.
    """
    _check_logits(logits, targets)
    shard = Shard.of(logits.shape[1], vocab_start, vocab_size, parallel=tp_group is not None)
    nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
    _, logprobs, entropy = _FromLogits.apply(
        logits,
        nothing,
        nothing,
        targets,
        check_temperature(temperature, len(targets)),
        shard,
        tp_group,
        chunk_rows,
    )
    return Scores(logprobs, entropy)


def dense_mask(
    candidates: CandidateSets, vocab_start: int, vocab_local: int, device: torch.device | str
) -> Tensor:
    """bool [T, vocab_local]: True where `vocab_start + column` is a candidate; all True on an empty span.

    For people who want the plain thing: T * vocab_local bytes, built without a loop.
    """
    token_ids = torch.tensor(candidates.token_ids, dtype=torch.int64, device=device)
    sizes = torch.tensor(candidates.sizes, device=device)
    mask = (sizes == 0)[:, None].repeat(1, vocab_local)
    position = torch.repeat_interleave(sizes, output_size=len(token_ids))
    held = (token_ids >= vocab_start) & (token_ids < vocab_start + vocab_local)
    mask[position[held], token_ids[held] - vocab_start] = True
    return mask


def mask_logits(logits: Tensor, candidates: CandidateSets, *, vocab_start: int = 0) -> Tensor:
    """A copy of `logits` [T, V] with minus infinity outside the candidate sets; empty spans unchanged.

    Raises:
        InvalidInputError: logits are not [T, V] for the T positions of the sets.
    """
    if logits.ndim != 2 or len(logits) != len(candidates):
        raise InvalidInputError(f"logits: got shape {tuple(logits.shape)}, expected [{len(candidates)}, V]")
    mask = dense_mask(candidates, vocab_start, logits.shape[1], logits.device)
    return logits.masked_fill(mask.logical_not_(), -torch.inf)


def _check_logits(logits: Tensor, targets: Tensor) -> None:
    check_targets(targets)
    if logits.ndim != 2 or len(logits) != len(targets):
        raise InvalidInputError(
            f"logits: got shape {tuple(logits.shape)} for {len(targets)} targets, expected [T, V]"
        )
    if logits.device != targets.device:
        raise InvalidInputError(f"targets: it is on {targets.device}, and logits is on {logits.device}")


class _FromLogits(torch.autograd.Function):
    """Picked entries [m], and with `targets` the full log-probs and entropies [T]; one gradient for all."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        positions_m: Tensor,
        columns_m: Tensor,
        targets_T: Tensor | None,
        temperature: float | Tensor,
        shard: Shard,
        group: dist.ProcessGroup | None,
        chunk_rows: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dtype = accumulation_dtype(logits=logits_TV)
        picked_m = logits_TV[positions_m, columns_m].to(dtype)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.temperature, ctx.real = dtype, temperature, shard.real
        ctx.shape, ctx.logits_dtype = logits_TV.shape, logits_TV.dtype
        ctx.chunk_rows = rows_per_chunk(chunk_rows, shard.real * dtype.itemsize, _CHUNK_BYTES)
        if targets_T is None:
            # Without the logits, whose memory can go as soon as the caller lets go of them.
            ctx.save_for_backward(positions_m, columns_m)
            return picked_m, None, None
        column_T = local_targets(targets_T, shard, group)
        sums = RowSums(len(logits_TV), dtype, logits_TV.device)
        with torch.autocast(logits_TV.device.type, enabled=False):
            for part in row_parts(len(logits_TV), ctx.chunk_rows):
                logits_CV = _divided(logits_TV[part, : shard.real], temperature, part, dtype)
                sums.add(part, logits_CV, column_T[part])
        softmax = sums.finish(group)
        ctx.save_for_backward(positions_m, columns_m, logits_TV, column_T, softmax.log_total, softmax.entropy)
        return picked_m, softmax.logprobs, softmax.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_m: Tensor | None, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        positions_m, columns_m, *full = ctx.saved_tensors
        dtype = ctx.dtype
        grad_TV = torch.zeros(ctx.shape, dtype=ctx.logits_dtype, device=positions_m.device)
        if grad_logprobs_T is not None or grad_entropy_T is not None:
            logits_TV, column_T, log_total_T, entropy_T = full
            for part in row_parts(len(logits_TV), ctx.chunk_rows):
                logits_CV = _divided(logits_TV[part, : ctx.real], ctx.temperature, part, dtype)
                grad_CV = to_gradient(
                    logits_CV, part, log_total_T, entropy_T, column_T[part], grad_logprobs_T, grad_entropy_T
                )
                grad_TV[part, : ctx.real] = _divided(grad_CV, ctx.temperature, part, dtype)
        if grad_m is not None:
            # No entry stands twice: read, add, write is exact and deterministic.
            grad_TV[positions_m, columns_m] = (grad_TV[positions_m, columns_m].to(dtype) + grad_m).to(
                grad_TV.dtype
            )
        return grad_TV, None, None, None, None, None, None, None


def _divided(values_CV: Tensor, temperature: float | Tensor, part: slice, dtype: torch.dtype) -> Tensor:
    """A fresh copy in `dtype`, divided by the temperature of the rows `part`."""
    copy = values_CV.to(dtype, copy=True)
    if isinstance(temperature, Tensor):
        return copy.div_(temperature[part, None].to(copy))
    return copy.div_(temperature)
