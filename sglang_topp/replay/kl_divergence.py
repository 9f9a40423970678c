"""The KL divergence between two policies over candidate sets.

The outcomes at a position are its candidates and, optionally, a tail. The tail is one outcome that stands for
all ids outside of the candidate set.

Shape legend: T positions, A positions with two or more outcomes, m candidates that this rank holds at the A
positions. Without tensor parallelism, this rank holds all candidates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.scores_from_candidate_logits import check_held, kl_terms
from sglang_topp.replay.vocab_shard_candidates import SupportIndex
from sglang_topp.replay.vocab_shard_reductions import first_true, reduce_max, reduce_sum

__all__ = ["divergence"]


def divergence(
    logits: Tensor,
    tail: Tensor | None,
    support: SupportIndex,
    other: Tensor,
    other_tail: Tensor | None,
    *,
    reverse: bool,
    tp_group: dist.ProcessGroup | None,
) -> Tensor:
    """Return the KL divergence [T] in nats, differentiable once in `logits` and `tail`.

    `support` lists the candidates, and `support.rows` lists the A positions. The KL is 0 at all other
    positions. Under tensor parallelism, each rank passes the logits that it holds, and all ranks get the same
    values. The backward needs no communication, and expects the same incoming gradient on every rank.

    Args:
        logits: [m], the policy's logits of the candidates that this rank holds.
        tail: [A], the log-sum-exp of the policy's logits for the ids outside the candidate set. The
            log-sum-exp covers the ids of all ranks. If `tail` is None, the policy is the softmax over the
            candidates.
        other: [m], the other policy's log-probs of the same candidates. At each position, the other policy's
            probabilities of the candidates (on all ranks) and of the tail must sum to 1.
        other_tail: [A], the other policy's log-prob of the tail, or None without a tail. An element of
            `other_tail` may be minus infinity. With `reverse`, an element of `other_tail` may be minus
            infinity only where `tail` is minus infinity too.
        reverse: compute KL(policy || other) instead of KL(other || policy).

    Raises:
        InvalidInputError: the KL at a position is not finite.
        InvalidCandidateSetsError: a candidate id is held by no rank, or by several ranks.
    """
    kl: Tensor = _Divergence.apply(logits, tail, support, other, other_tail, reverse, tp_group)
    return kl


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_m: Tensor,
        tail_A: Tensor | None,
        support: SupportIndex,
        other_m: Tensor,
        other_tail_A: Tensor | None,
        reverse: bool,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        per_entry, offsets = support.per_entry, support.offsets

        def segment_sum(values_m: Tensor) -> Tensor:
            return torch.segment_reduce(values_m, "sum", offsets=offsets)

        peak_A = reduce_max(torch.segment_reduce(logits_m, "max", offsets=offsets), group)
        if tail_A is not None:
            peak_A = torch.maximum(peak_A, tail_A)
        shifted_m = logits_m - per_entry(peak_A)
        sums = torch.stack([segment_sum(shifted_m.exp()), offsets.diff().to(logits_m)])
        total_A, held_A = reduce_sum(sums, group).unbind()
        check_held(held_A, support)

        policy_tail_A = None
        if tail_A is not None:
            shifted_A = tail_A - peak_A
            log_total_A = (total_A + shifted_A.exp()).log()
            policy_tail_A = shifted_A - log_total_A
        else:
            log_total_A = total_A.log()
        policy_m = shifted_m - per_entry(log_total_A)

        def terms(policy: Tensor, other: Tensor) -> Tensor:
            return kl_terms(policy, other) if reverse else kl_terms(other, policy)

        kl_A = reduce_sum(segment_sum(terms(policy_m, other_m)), group)
        if policy_tail_A is not None and other_tail_A is not None:
            kl_A += terms(policy_tail_A, other_tail_A)
        if (index := first_true(~kl_A.isfinite())) is not None:
            raise InvalidInputError(
                f"the KL at position {int(support.rows[index])} is {float(kl_A[index])}: this policy gives a"
                " candidate, or all that is outside of the set, no probability, or among its logits is a"
                " NaN or +inf"
            )
        ctx.support, ctx.reverse = support, reverse
        ctx.save_for_backward(policy_m, policy_tail_A, other_m, other_tail_A, kl_A)
        return kl_A.new_zeros(support.num_positions).index_copy_(0, support.rows, kl_A)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        policy_m, policy_tail_A, other_m, other_tail_A, kl_A = ctx.saved_tensors
        support: SupportIndex = ctx.support
        grad_A = grad_T.index_select(0, support.rows)

        def slope(policy: Tensor, other: Tensor, kl: Tensor) -> Tensor:
            probability = policy.exp()
            if not ctx.reverse:
                return probability - other.exp()
            return torch.where(probability > 0, probability * (policy - other - kl), 0.0)

        grad_m = slope(policy_m, other_m, support.per_entry(kl_A)) * support.per_entry(grad_A)
        grad_tail_A = None if policy_tail_A is None else slope(policy_tail_A, other_tail_A, kl_A) * grad_A
        return grad_m, grad_tail_A, None, None, None, None, None
