"""Compute targets' scores over the whole vocabulary from hidden states, without `[T, V]` logits.

This module is for trainers that score over the whole vocabulary, not over recorded candidate sets. The
forward computes the logits of one chunk of positions at a time, into one buffer. The backward computes the
logits of each chunk again, and overwrites the logits with their gradient. There is one exception: if all
positions fit in one chunk, the forward keeps the chunk's logits for the backward. Callers should pass only
the hidden states of positions that have a loss, selected with `RowSelection.select(hidden)`.

Shape legend: T positions, H hidden size, V ids held by this rank, C positions of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.replay.candidate_head import check_head
from sglang_topp.replay.full_vocab_products import CHUNK_BYTES, HeadGradients, VocabHead
from sglang_topp.replay.full_vocab_softmax import (
    RowSums,
    local_targets,
    row_parts,
    rows_per_chunk,
    to_gradient,
)
from sglang_topp.replay.logit_scaling import LogitTransform
from sglang_topp.replay.scores_from_candidate_logits import Scores, accumulation_dtype
from sglang_topp.replay.vocab_shard_candidates import Shard

__all__ = ["head_logprobs"]


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> Scores:
    """Score `targets` under the policy `softmax(head(hidden))` over the whole vocabulary, without replay.

    ::

        logprobs[t] = z[target_t] - log(sum over all i of exp(z_i))
        entropy[t]  = -sum over all i of p_i log p_i,   p = softmax(z),   z as in `candidate_logprobs`

    Every returned value is differentiable once, in `hidden`, `weight`, and `bias`. In addition to the
    gradients, the call needs one buffer of `chunk_rows` x V in float32 (float64 for float64 inputs). If the
    policy has a soft cap, the call needs two of these buffers. For half-precision inputs, the backward also
    holds the gradients in float32, and rounds each gradient once, at the end.

    Args:
        entropy: also return the differentiable entropy over the whole vocabulary.
        chunk_rows: the number of positions that pass through the LM head at a time. By default, the logits of
            these positions take at most 256 MiB. If `chunk_rows` is T or more, the forward keeps the logits,
            T x V x 4 bytes, for the backward. Keeping the logits saves a quarter of the work of forward and
            backward.

    The other arguments and the errors are those of `candidate_logprobs`. On a CPU, the weight of a
    half-precision head is converted to float32 during the call.
    """
    check_head(hidden, weight, bias, targets)
    logprobs, entropies = _FullHead.apply(
        hidden,
        weight,
        bias,
        targets,
        LogitTransform.of(temperature, len(targets), softcap=softcap, logit_scale=logit_scale),
        entropy,
        Shard.of(len(weight), vocab_start, vocab_size, parallel=tp_group is not None),
        tp_group,
        chunk_rows,
    )
    return Scores(logprobs, entropies)


class _FullHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        transform: LogitTransform,
        entropy: bool,
        shard: Shard,
        group: dist.ProcessGroup | None,
        chunk_rows: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = accumulation_dtype(hidden=hidden_TH, weight=weight_VH)
        ctx.group = group
        ctx.options = {"num_ids": shard.num_ids, "transform": transform, "dtype": dtype}
        ctx.parts = row_parts(
            len(hidden_TH), rows_per_chunk(chunk_rows, shard.num_ids * dtype.itemsize, CHUNK_BYTES)
        )
        column_T = local_targets(targets_T, shard, group)
        sums = RowSums(len(hidden_TH), dtype, hidden_TH.device, entropy=entropy)
        with torch.autocast(hidden_TH.device.type, enabled=False):
            head = VocabHead(hidden_TH, weight_VH, bias_V, **ctx.options)
            for part in ctx.parts:
                logits_CV = head.logits(part)
                sums.add(part, logits_CV, column_T[part])
        keeps = len(ctx.parts) == 1 and any(ctx.needs_input_grad)
        ctx.kept = (logits_CV, sums.subtracted_T) if keeps else None
        softmax = sums.finish(group)
        ctx.save_for_backward(hidden_TH, weight_VH, bias_V, column_T, softmax.log_total, softmax.entropy)
        ctx.set_materialize_grads(False)
        return softmax.logprobs, softmax.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias_V, column_T, log_total_T, entropy_T = ctx.saved_tensors
        with torch.autocast(hidden_TH.device.type, enabled=False):
            head = VocabHead(hidden_TH, weight_VH, bias_V, **ctx.options)
            gradients = HeadGradients(head, hidden_TH, weight_VH, bias_V, ctx.needs_input_grad[:3])
            for part in ctx.parts:
                if ctx.kept is not None:
                    logits_CV, subtracted_T = ctx.kept
                    logits_CV += subtracted_T[:, None]
                    # `to_gradient` overwrites the kept logits, so a second backward must compute the logits
                    # again.
                    ctx.kept = None
                else:
                    logits_CV = head.logits(part)
                slope_CV = head.transform.softcap_slope(logits_CV, part)
                grad_CV = to_gradient(
                    logits_CV, part, log_total_T, entropy_T, column_T[part], grad_logprobs_T, grad_entropy_T
                )
                gradients.add(part, grad_CV, slope_CV)
        return *gradients.rounded(ctx.group), None, None, None, None, None, None
