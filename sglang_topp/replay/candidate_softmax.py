"""The policy's distribution over each position's candidates, with tensor parallelism.

The candidates of a position may be on several ranks. Two operations are dual to each other: `segment_sums`
sums over all ranks' candidates, and its gradient goes to each candidate; `to_candidates` gives each candidate
its position's value, and its gradient sums over all ranks' candidates. Autograd does the rest. The incoming
gradient must be the same on every rank, which is true if all ranks compute the same loss.

Shape legend: A listed positions, m listed candidates that this rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.replay.candidate_index import CandidateIndex
from sglang_topp.replay.vocab_shards import reduce_max, reduce_sum

__all__ = ["CandidateSoftmax", "kl_terms", "segment_sums", "sum_over_ranks", "to_candidates"]


@dataclass(frozen=True, eq=False)
class CandidateSoftmax:
    """The softmax of the candidates' logits, and optionally of one more outcome, the tail."""

    shifted: Tensor
    """[m]: each logit minus the highest one of its position."""
    total: Tensor
    """[A]: the sum of `exp(shifted)` over the outcomes of each position."""
    log_total: Tensor
    """[A]."""
    others: list[Tensor]
    """Each [A]: the sums of the other values that the caller passed."""
    log_tail: Tensor | None
    """[A]: the tail's log-prob, or None without a tail."""

    @classmethod
    def of(
        cls,
        logits: Tensor,
        index: CandidateIndex,
        group: dist.ProcessGroup | None,
        *,
        target: Tensor | None = None,
        entropy: bool = False,
        tail: Tensor | None = None,
    ) -> CandidateSoftmax:
        """Compute the softmax of `logits` [m].

        Args:
            target: bool [m]. If given, `others` begins with the sum of `shifted` where it is True.
            entropy: append the sum of `exp(shifted) * shifted` to `others`.
            tail: [A], the log-sum-exp of all other ids' logits, on all ranks.
        """
        with torch.no_grad():
            peak = reduce_max(torch.segment_reduce(logits, "max", offsets=index.offsets), group)
            if tail is not None:
                peak = torch.maximum(peak, tail)
        shifted = logits - peak.index_select(0, index.segment)
        weight = shifted.exp()
        values = [weight]
        if target is not None:
            values.append(torch.where(target, shifted, 0.0))
        if entropy:
            # `clamp` changes no product: where it raises a value, the weight is 0, and 0 * -inf would be NaN.
            values.append(weight * shifted.clamp(min=-1.0e4))
        total, *others = segment_sums(index, group, *values)
        if tail is None:
            return cls(shifted, total, total.log(), others, None)
        total = total + (tail - peak).exp()
        return cls(shifted, total, total.log(), others, tail - peak - total.log())

    def logprobs(self, index: CandidateIndex, group: dist.ProcessGroup | None) -> Tensor:
        """Return [m], each candidate's log-prob."""
        return self.shifted - to_candidates(self.log_total, index, group)


def segment_sums(
    index: CandidateIndex, group: dist.ProcessGroup | None, *values: Tensor
) -> tuple[Tensor, ...]:
    """Return [A] for each of `values` [m]: its sum over each position's candidates, on all ranks."""
    sums: tuple[Tensor, ...] = _SegmentSums.apply(index, group, *values)
    return sums


def to_candidates(values: Tensor, index: CandidateIndex, group: dist.ProcessGroup | None) -> Tensor:
    """Return [m]: for each candidate, the element of `values` [A] for its position."""
    spread: Tensor = _ToCandidates.apply(values, index, group)
    return spread


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of `values` over the ranks, whose gradient is the same on every rank."""
    total: Tensor = values if group is None else _SumOverRanks.apply(values, group)
    return total


def kl_terms(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return the KL terms `a log(a / b) + b - a` of the probabilities `a` and `b`. No term is negative.

    At each position, the probabilities `a` of all outcomes sum to 1, and so do the probabilities `b`. The sum
    of `b - a` is therefore 0, and the sum of the terms is the KL. If `a` and `b` are almost equal, a rounding
    error in a log-prob changes a term only by about the square of the error. A small KL is therefore accurate
    too.
    """
    terms: Tensor = _KlTerms.apply(log_a, log_b)
    return terms


class _SegmentSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, index: CandidateIndex, group: dist.ProcessGroup | None, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.index = index
        ctx.set_materialize_grads(False)
        sums = [torch.segment_reduce(each, "sum", offsets=index.offsets) for each in values]
        if group is None:
            return tuple(sums)
        return tuple(reduce_sum(torch.stack(sums), group).unbind())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        segment = ctx.index.segment
        return None, None, *(None if grad is None else grad.index_select(0, segment) for grad in grads)


class _ToCandidates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_A: Tensor, index: CandidateIndex, group: dist.ProcessGroup | None) -> Tensor:
        ctx.index, ctx.group = index, group
        return values_A.index_select(0, index.segment)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_m: Tensor) -> tuple[Tensor | None, ...]:
        sums_A = torch.segment_reduce(grad_m.contiguous(), "sum", offsets=ctx.index.offsets)
        return reduce_sum(sums_A, ctx.group), None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        return reduce_sum(values.clone(), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _KlTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_a: Tensor, log_b: Tensor) -> Tensor:
        a, b, ratio = log_a.exp(), log_b.exp(), log_b - log_a
        ctx.save_for_backward(a, b, ratio)
        near = a * (torch.expm1(ratio) - ratio)
        return torch.where(a > 0, torch.where(ratio.abs() < 1, near, b - a - a * ratio), b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b, ratio = ctx.saved_tensors
        grad_a = torch.where(a > 0, -a * ratio, 0.0) * grad if ctx.needs_input_grad[0] else None
        return grad_a, (b - a) * grad if ctx.needs_input_grad[1] else None
