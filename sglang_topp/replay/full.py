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
from sglang_topp.replay.parallel import reduce_sum
from sglang_topp.replay.scores import Scores, accumulation_dtype, check_softcap, check_temperature
from sglang_topp.replay.support import Shard
from sglang_topp.replay.vocab_softmax import RowSums, local_targets, row_parts, rows_per_chunk, to_gradient

__all__ = ["head_logprobs"]

_CHUNK_BYTES = 1 << 28
_WEIGHT_ROWS = 1 << 13


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
        ctx.dtype, ctx.temperature, ctx.softcap, ctx.group = dtype, temperature, softcap, group
        ctx.real = shard.real
        ctx.parts = row_parts(
            len(hidden_TH), rows_per_chunk(chunk_rows, shard.real * dtype.itemsize, _CHUNK_BYTES)
        )
        column_T = local_targets(targets_T, shard, group)
        sums = RowSums(len(hidden_TH), dtype, hidden_TH.device)
        with torch.autocast(hidden_TH.device.type, enabled=False):
            head = _Head(hidden_TH, weight_VH, bias_V, ctx)
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
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden_TH, dtype=ctx.dtype) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VH, dtype=ctx.dtype) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=ctx.dtype) if wants_bias else None
        with torch.autocast(hidden_TH.device.type, enabled=False):
            head = _Head(hidden_TH, weight_VH, bias_V, ctx)
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
                head.divide_by_temperature(grad_CV, part)
                if slope_CV is not None:
                    grad_CV *= slope_CV
                if grad_hidden is not None:
                    grad_hidden[part] = head.times_weight(grad_CV)
                if grad_weight is not None:
                    head.add_outer(grad_weight, grad_CV, part)
                if grad_bias is not None:
                    grad_bias[: ctx.real] += grad_CV.sum(dim=0)
        if grad_hidden is not None:
            grad_hidden = reduce_sum(grad_hidden, ctx.group).to(hidden_TH.dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VH.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias_V.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


class _Head:
    """The products of one pass: logits of a chunk, and a chunk's gradient back through the head.

    Sums run in `ctx.dtype`. On a GPU half-precision factors go to the tensor cores as they are and
    come out in float32; elsewhere they are widened first.
    """

    def __init__(self, hidden_TH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, ctx: Any) -> None:
        self.dtype: torch.dtype = ctx.dtype
        self.temperature: float | Tensor = ctx.temperature
        self.softcap: float | None = ctx.softcap
        self.hidden_TH: Tensor = hidden_TH
        self.weight_VH: Tensor = weight_VH[: ctx.real]
        self.bias_V: Tensor | None = bias_V
        self.mixed = (
            hidden_TH.is_cuda and hidden_TH.dtype == weight_VH.dtype and hidden_TH.dtype != self.dtype
        )
        if not self.mixed:
            self.weight_VH = self.weight_VH.to(self.dtype)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        product: Tensor
        if self.mixed:
            product = torch.mm(left.to(right.dtype), right, out_dtype=self.dtype)
        else:
            product = torch.mm(left.to(self.dtype), right.to(self.dtype))
        return product

    def logits(self, part: slice) -> Tensor:
        """[C, V] of `ctx.dtype`: after bias, soft cap and temperature."""
        logits_CV = self._product(self.hidden_TH[part], self.weight_VH.t())
        if self.bias_V is not None:
            logits_CV += self.bias_V[: logits_CV.shape[1]]
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return self.divide_by_temperature(logits_CV, part)

    def divide_by_temperature(self, values_CV: Tensor, part: slice) -> Tensor:
        """In place."""
        if isinstance(self.temperature, Tensor):
            return values_CV.div_(self.temperature[part, None].to(values_CV))
        return values_CV if self.temperature == 1.0 else values_CV.div_(self.temperature)

    def softcap_slope(self, logits_CV: Tensor, part: slice) -> Tensor | None:
        """`1 - tanh^2` of the raw logits, from what `logits` returned; None without a soft cap."""
        if self.softcap is None:
            return None
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature[part, None].to(logits_CV)
        return (logits_CV * (temperature / self.softcap)).square_().neg_().add_(1.0)

    def times_weight(self, grad_CV: Tensor) -> Tensor:
        """[C, H]: the gradient of the chunk's hidden states."""
        return self._product(grad_CV, self.weight_VH)

    def add_outer(self, grad_VH: Tensor, grad_CV: Tensor, part: slice) -> None:
        """Add the chunk's gradient of the head, some rows at a time: a whole one would double it."""
        right = self.hidden_TH[part]
        if not self.mixed:
            grad_VH[: grad_CV.shape[1]].addmm_(grad_CV.t(), right.to(self.dtype))
            return
        for rows in row_parts(grad_CV.shape[1], _WEIGHT_ROWS):
            grad_VH[rows] += self._product(grad_CV[:, rows].t(), right)
