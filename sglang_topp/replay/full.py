"""The whole vocabulary, from hidden states: log-probs and entropy without `[T, V]` logits.

For trainers without replay. A chunk of positions goes through the LM head at a time, into one buffer
that the backward fills again and turns into the gradient in place; where one chunk holds all positions,
the buffer is kept in between. Positions that no loss looks at are best left out before the head:
`layout.Rows.select(hidden)`.

Shape legend: T positions, H hidden size, V ids held by this rank, C positions of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.replay.head import check_head
from sglang_topp.replay.scores import Scores, accumulation_dtype, check_softcap, check_temperature
from sglang_topp.replay.support import Shard
from sglang_topp.replay.vocab_head import CHUNK_BYTES, HeadGradients, VocabHead
from sglang_topp.replay.vocab_softmax import RowSums, local_targets, row_parts, rows_per_chunk, to_gradient

__all__ = ["head_logprobs"]


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> Scores:
    """Score `targets` under the policy `softmax(head(hidden))` over the whole vocabulary: no replay.

    ::

        logprobs[t] = z[target_t] - log(sum over all i of exp(z_i))
        entropy[t]  = -sum over all i of p_i log p_i,   z as in `candidate_logprobs`

    Differentiable, once, in `hidden`, `weight` and `bias`, through both values. Memory beyond the
    gradients is one buffer of `chunk_rows` x V in float32 (float64 for float64), two with a soft cap,
    and, in half precision, the gradients in float32 until they are rounded, once.

    Args:
        chunk_rows: positions that go through the head at a time; by default as many as take 256 MiB.
            Where it is T or more, one buffer lives until the backward, which then need not compute the
            logits again: a quarter of the work for T x V x 4 bytes.

    The other arguments and the errors are those of `candidate_logprobs`. Half precision on a CPU
    widens the head to float32 for the pass.
    """
    check_head(hidden, weight, bias, targets)
    check_softcap(softcap)
    logprobs, entropy = _FullHead.apply(
        hidden,
        weight,
        bias,
        targets,
        check_temperature(temperature, len(targets)),
        softcap,
        Shard.of(len(weight), vocab_start, vocab_size, parallel=tp_group is not None),
        tp_group,
        chunk_rows,
    )
    return Scores(logprobs, entropy)


class _FullHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_T: Tensor,
        temperature: float | Tensor,
        softcap: float | None,
        shard: Shard,
        group: dist.ProcessGroup | None,
        chunk_rows: int | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(hidden=hidden_TH, weight=weight_VH)
        ctx.group = group
        ctx.options = {"num_ids": shard.real, "temperature": temperature, "softcap": softcap, "dtype": dtype}
        ctx.parts = row_parts(
            len(hidden_TH), rows_per_chunk(chunk_rows, shard.real * dtype.itemsize, CHUNK_BYTES)
        )
        column_T = local_targets(targets_T, shard, group)
        sums = RowSums(len(hidden_TH), dtype, hidden_TH.device)
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
                    ctx.kept = None  # it becomes the gradient; another backward computes it again
                else:
                    logits_CV = head.logits(part)
                slope_CV = head.softcap_slope(logits_CV, part)
                grad_CV = to_gradient(
                    logits_CV, part, log_total_T, entropy_T, column_T[part], grad_logprobs_T, grad_entropy_T
                )
                gradients.add(part, grad_CV, slope_CV)
        return *gradients.rounded(ctx.group), None, None, None, None, None, None
