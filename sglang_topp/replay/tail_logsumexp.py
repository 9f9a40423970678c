"""Compute the candidates' logits, and the log-sum-exp of the tail (all ids outside the candidate set).

The code sums over the tail's ids directly, instead of subtracting the candidates' sum from the sum over all
ids. The log-sum-exp is therefore accurate for a tail with hardly any probability, and for a tail with nearly
all probability. The forward computes the logits of one chunk of positions at a time. The backward computes
the logits again, unless one chunk holds all positions.

Shape legend: H hidden size, V ids held by this rank, A positions with one or more candidates, C positions of
one chunk, m candidates that this rank holds, c candidates of one chunk.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.replay.full_vocab_products import CHUNK_BYTES, HeadGradients, VocabHead
from sglang_topp.replay.full_vocab_softmax import row_parts, rows_per_chunk, some_rows
from sglang_topp.replay.logit_scaling import LogitTransform
from sglang_topp.replay.scores_from_candidate_logits import accumulation_dtype
from sglang_topp.replay.vocab_shard_candidates import Shard, SupportIndex
from sglang_topp.replay.vocab_shard_reductions import reduce_max, reduce_sum

__all__ = ["support_and_tail"]


def support_and_tail(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    support: SupportIndex,
    *,
    transform: LogitTransform,
    shard: Shard,
    tp_group: dist.ProcessGroup | None,
    chunk_rows: int | None,
) -> tuple[Tensor, Tensor]:
    """Return the candidates' logits, float [m], and each position's tail log-sum-exp, float [A].

    Both tensors are differentiable once, in `hidden`, `weight`, and `bias`.

    ::

        tail[a] = log(sum of exp(z_i) over all i that are not candidates of position a)

    The sum in `tail[a]` includes the ids that the other ranks of `tp_group` hold. If every id is a candidate
    of position `a`, `tail[a]` is minus infinity. The incoming gradient of `tail` must be the same on every
    rank.

    Args:
        hidden: [A, H], the hidden states of the A positions, which `support.rows` lists.
        transform: the logit transform of the A positions.
        chunk_rows: as in `head_logprobs`.
    """
    logits, tail = _SupportAndTail.apply(
        hidden, weight, bias, support, transform, shard, tp_group, chunk_rows
    )
    return logits, tail


class _SupportAndTail(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        support: SupportIndex,
        transform: LogitTransform,
        shard: Shard,
        group: dist.ProcessGroup | None,
        chunk_rows: int | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(hidden=hidden_AH, weight=weight_VH)
        ctx.group = group
        ctx.options = {"num_ids": shard.num_ids, "transform": transform, "dtype": dtype}
        parts = row_parts(
            len(hidden_AH), rows_per_chunk(chunk_rows, shard.num_ids * dtype.itemsize, CHUNK_BYTES)
        )
        ctx.chunks = list(zip(parts, _entries(support, parts), strict=True))
        # `first_A[r]` is the index of the first logit of row `r` in the flattened logits of a chunk.
        ctx.first_A = torch.arange(len(hidden_AH), device=hidden_AH.device) * shard.num_ids
        ctx.support = support
        logits_m = torch.empty(len(support.ids), dtype=dtype, device=hidden_AH.device)
        tail_A = torch.empty(len(hidden_AH), dtype=dtype, device=hidden_AH.device)
        with torch.autocast(hidden_AH.device.type, enabled=False):
            head = VocabHead(hidden_AH, weight_VH, bias_V, **ctx.options)
            for part, entries in ctx.chunks:
                logits_CV = head.logits(part)
                places_c = _places(ctx, part, entries)
                flat = logits_CV.view(-1)
                logits_m[entries] = flat.index_select(0, places_c)
                flat.index_fill_(0, places_c, -torch.inf)
                _log_sums(logits_CV, out=tail_A[part])
        ctx.kept = logits_CV if len(parts) == 1 and any(ctx.needs_input_grad) else None
        if group is not None:
            peak_A = reduce_max(tail_A.clone(), group)
            peak_A = torch.where(peak_A.isneginf(), 0.0, peak_A)
            tail_A = peak_A + reduce_sum((tail_A - peak_A).exp(), group).log()
        ctx.save_for_backward(hidden_AH, weight_VH, bias_V, logits_m, tail_A)
        return logits_m, tail_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_m: Tensor, grad_tail_A: Tensor) -> tuple[Tensor | None, ...]:
        hidden_AH, weight_VH, bias_V, logits_m, tail_A = ctx.saved_tensors
        # The log-sum-exp of a tail is -inf if all logits of the tail are -inf. Replace this log-sum-exp by 0,
        # because exp(-inf - 0) is 0, but exp(-inf + inf) is NaN.
        tail_A = torch.where(tail_A.isneginf(), 0.0, tail_A)
        with torch.autocast(hidden_AH.device.type, enabled=False):
            head = VocabHead(hidden_AH, weight_VH, bias_V, **ctx.options)
            gradients = HeadGradients(head, hidden_AH, weight_VH, bias_V, ctx.needs_input_grad[:3])
            for part, entries in ctx.chunks:
                places_c = _places(ctx, part, entries)
                if ctx.kept is not None:
                    logits_CV = ctx.kept
                    logits_CV.view(-1).index_copy_(0, places_c, logits_m[entries])
                    # The gradient overwrites the kept logits, so a second backward must compute the logits
                    # again.
                    ctx.kept = None
                else:
                    logits_CV = head.logits(part)
                slope_CV = head.transform.softcap_slope(logits_CV, part)
                # Overwrite all logits with the gradient of the tail, d tail / dz_i = exp(z_i - tail).
                # `index_copy_` then writes the candidates' own gradients to the candidates' places.
                for rows in some_rows(logits_CV):
                    here = slice(part.start + rows.start, part.start + rows.stop)
                    logits_CV[rows].sub_(tail_A[here, None]).exp_().mul_(grad_tail_A[here, None])
                logits_CV.view(-1).index_copy_(0, places_c, grad_m[entries])
                gradients.add(part, logits_CV, slope_CV)
        return *gradients.rounded(ctx.group), None, None, None, None, None


def _entries(support: SupportIndex, parts: list[slice]) -> list[slice]:
    """Return, for each slice of positions in `parts`, the slice of the candidates of these positions."""
    bounds = torch.tensor([0, *(part.stop for part in parts)], device=support.offsets.device)
    stops = support.offsets.index_select(0, bounds).tolist()
    return [slice(start, stop) for start, stop in pairwise(stops)]


def _places(ctx: Any, part: slice, entries: slice) -> Tensor:
    """Return int64 [c]: the indices of a chunk's candidates in the flattened logits of the chunk."""
    rows_c = ctx.support.segment[entries] - part.start
    places_c: Tensor = ctx.first_A.index_select(0, rows_c) + ctx.support.ids[entries]
    return places_c


def _log_sums(logits_CV: Tensor, *, out: Tensor) -> None:
    """Compute `out[r] = log(sum over i of exp(logits[r, i]))`. The result for a row of only -inf is -inf."""
    if logits_CV.shape[1] == 0:
        out.fill_(-torch.inf)
        return
    for rows in some_rows(logits_CV):
        torch.logsumexp(logits_CV[rows], dim=1, out=out[rows])
