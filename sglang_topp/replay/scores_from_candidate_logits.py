"""Compute `Scores` (log-probs, entropy, and KL over each candidate set) from the candidates' logits.

The modules `candidate_head` and `logprobs_from_logits` call this module. Each tensor has either one value per
candidate or one value per position. No tensor has a vocabulary axis.

A position with one candidate always has the log-prob 0. Some tensors therefore have values only for the A
positions with two or more candidates. Under tensor parallelism, each rank holds a part of the candidates.

Shape legend: T positions; A positions with two or more candidates; n candidates at all T positions together.
m is the number of candidates that this rank holds at the A positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.candidates.validation import LOWEST
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError
from sglang_topp.replay.vocab_shard_candidates import SupportIndex, TargetMatch
from sglang_topp.replay.vocab_shard_reductions import first_true, reduce_max, reduce_sum

__all__ = ["Scores", "accumulation_dtype", "check_held", "kl_terms", "score_support"]


@dataclass(frozen=True)
class Scores:
    """A policy's scores of T target tokens, in float32, or float64 for float64 inputs.

    A field that the caller did not request is None.

    Let `C_t` be the candidate set of position `t`, and `z` the policy's logits after scale, soft cap, and
    temperature. Over the candidate set, the policy gives each candidate `i` the probability
    `pi_t(i) = exp(z_i) / sum over j in C_t of exp(z_j)`.

    A token from a tool's output has an empty set, because the policy did not draw it. At a position whose set
    is empty or has one candidate, every score over the candidate set is exactly 0 and has no gradient.

    The functions `head_logprobs` and `full_logprobs` take no candidate sets. In their results, `logprobs` and
    `entropy` are over the whole vocabulary.
    """

    logprobs: Tensor
    """[T]: `log pi_t(target_t)`."""
    entropy: Tensor | None = None
    """[T]: `-sum pi_t log pi_t` over the candidate set, in nats."""
    candidate_logprobs: Tensor | None = None
    """[n]: `log pi_t(i)` of every candidate, in the order of the candidate sets."""
    kl: Tensor | None = None
    """[T]: `sum pi_t (log pi_t - log other_t)` over the candidate set, in nats. `other_t` is the policy whose
    log-probs the caller passed as `kl_to`, renormalized over the candidate set."""
    full_logprobs: Tensor | None = None
    """[T]: the target's log-prob over the whole vocabulary."""
    full_entropy: Tensor | None = None
    """[T]: the entropy over the whole vocabulary, in nats."""


def accumulation_dtype(**tensors: Tensor) -> torch.dtype:
    """Return the dtype of sums and results: float32, or float64 if any of `tensors` is float64.

    Raises:
        InvalidInputError: a tensor is not float16, bfloat16, float32, or float64.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise InvalidInputError(
                f"{name}: got dtype {tensor.dtype}, expected float16, bfloat16, float32 or float64"
            )
    wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    return torch.float64 if wide else torch.float32


def score_support(
    logits: Tensor,
    support: SupportIndex,
    match: TargetMatch,
    *,
    entropy: bool,
    per_candidate: bool,
    kl_to: Tensor | None,
    tp_group: dist.ProcessGroup | None,
) -> Scores:
    """Compute the scores from the `logits` (float32 or float64 [m]) of this rank's candidates.

    Under tensor parallelism, each rank passes the logits that it holds, and all ranks get the same scores.
    The forward runs two reductions over the ranks, one of maxima and one of sums. `per_candidate` and `kl_to`
    each add another reduction. The backward needs no communication. The incoming gradient must therefore
    be the same on every rank, which is true if all ranks compute the same loss.

    `support` lists the candidates, and `match` marks each position's target among them. If `match.is_absent`
    is None, the host has already checked that each target is in its set. Otherwise, the host does not wait
    for the device. A position with an invalid value then gets NaN scores, and the call raises no error.

    Raises:
        InvalidInputError: a score is NaN, or `kl_to` has the wrong shape, requires a gradient, or makes the
            KL infinite. A score is NaN if a position's logits hold NaN or +inf, or only -inf.
        InvalidCandidateSetsError: a candidate id is not held by exactly one rank.
    """
    if kl_to is not None:
        if kl_to.shape != (support.num_candidates,):
            raise InvalidInputError(
                f"kl_to: got shape {tuple(kl_to.shape)}, expected [{support.num_candidates}],"
                " one log-prob per entry of the candidate sets"
            )
        if kl_to.requires_grad:
            raise InvalidInputError("kl_to: it requires a gradient, and none is computed; detach it")
    logprobs, entropies, by_candidate, kl = _SupportSoftmax.apply(
        logits, support, match, kl_to, entropy, per_candidate, tp_group
    )
    return Scores(logprobs, entropies, by_candidate, kl)


class _SupportSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_m: Tensor,
        support: SupportIndex,
        match: TargetMatch,
        kl_to: Tensor | None,
        entropy: bool,
        per_candidate: bool,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        per_entry, offsets = support.per_entry, support.offsets
        other_m = None if kl_to is None else _normalized(kl_to.to(logits_m), support)[support.entries]

        def segment_sum(values_m: Tensor) -> Tensor:
            return torch.segment_reduce(values_m, "sum", offsets=offsets)

        peak_A = reduce_max(torch.segment_reduce(logits_m, "max", offsets=offsets), group)
        shifted_m = logits_m - per_entry(peak_A)
        weight_m = shifted_m.exp()
        possible_m = weight_m > 0  # exclude tokens of probability 0, because 0 * -inf is NaN

        sums = [
            segment_sum(weight_m),
            segment_sum(torch.where(match.is_target, shifted_m, 0.0)),
            offsets.diff().to(logits_m),
        ]
        if entropy:
            sums.append(segment_sum(torch.where(possible_m, weight_m * shifted_m, 0.0)))
        total_A, target_A, held_A, *moments = reduce_sum(torch.stack(sums), group).unbind()
        log_total_A = total_A.log()
        if match.is_absent is None:
            check_held(held_A, support)
        else:
            is_scored_A = (held_A == support.sizes) & ~match.is_absent.index_select(0, support.rows)
            log_total_A = torch.where(is_scored_A, log_total_A, torch.nan)
        logprob_m = shifted_m - per_entry(log_total_A)

        def spread(values_A: Tensor) -> Tensor:
            out_T = values_A.new_zeros(support.num_positions)
            return out_T.index_copy_(0, support.rows, values_A)

        logprobs_T = spread(target_A - log_total_A)
        if match.is_absent is None:
            _check_finite(logprobs_T)
        else:
            # A position must score NaN if its set lacks the target. If the set has two or more candidates,
            # the code above has set the position's element of `log_total_A`, and so the score, to NaN. A
            # position with one candidate has no element in `log_total_A`. Its score is 0 so far, and the next
            # line replaces the 0 with NaN.
            logprobs_T.masked_fill_(match.is_absent, torch.nan)
        entropy_A = log_total_A - moments.pop(0) / total_A if entropy else None
        kl_A = None
        if other_m is not None:
            kl_A = reduce_sum(segment_sum(kl_terms(logprob_m, other_m)), group)
        by_candidate_n = None
        if per_candidate:
            by_candidate_n = logprob_m.new_zeros(support.num_candidates)
            reduce_sum(by_candidate_n.index_copy_(0, support.entries, logprob_m), group)
        is_checked = match.is_absent is None
        if is_checked and kl_A is not None and (index := first_true(~kl_A.isfinite())) is not None:
            raise InvalidInputError(
                f"kl_to: the KL at position {int(support.rows[index])} is {float(kl_A[index])};"
                " the other policy gives a candidate no probability, or NaN"
            )

        ctx.support, ctx.is_target = support, match.is_target
        ctx.save_for_backward(logprob_m, entropy_A, kl_A, other_m)
        ctx.set_materialize_grads(False)
        return (
            logprobs_T,
            None if entropy_A is None else spread(entropy_A),
            by_candidate_n,
            None if kl_A is None else spread(kl_A),
        )

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs_T: Tensor | None,
        grad_entropy_T: Tensor | None,
        grad_by_candidate_n: Tensor | None,
        grad_kl_T: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        support: SupportIndex = ctx.support
        logprob_m, entropy_A, kl_A, other_m = ctx.saved_tensors
        rows, per_entry = support.rows, support.per_entry
        probability_m = logprob_m.exp()
        possible_m = probability_m > 0
        grad_m = torch.zeros_like(logprob_m)

        # Gradient of the target's log-prob: d log pi(target) / dz_i = [i is target] - pi_i
        if grad_logprobs_T is not None:
            grad_m += (ctx.is_target.to(grad_m) - probability_m) * per_entry(grad_logprobs_T[rows])
        # Gradient of each candidate's log-prob: d log pi(j) / dz_i = [i = j] - pi_i. The code sums this
        # gradient over all candidates j of the position. Other ranks may hold some of these candidates.
        if grad_by_candidate_n is not None:
            span_sum_T = torch.segment_reduce(grad_by_candidate_n, "sum", offsets=support.span_offsets)
            grad_m += grad_by_candidate_n[support.entries] - probability_m * per_entry(span_sum_T[rows])
        # Gradient of the entropy: dH / dz_i = -pi_i (log pi_i + H)
        if grad_entropy_T is not None:
            slope_m = probability_m * (logprob_m + per_entry(entropy_A))
            grad_m -= torch.where(possible_m, slope_m, 0.0) * per_entry(grad_entropy_T[rows])
        # Gradient of the KL: dKL / dz_i = pi_i (log pi_i - log other_i - KL)
        if grad_kl_T is not None:
            slope_m = probability_m * (logprob_m - other_m - per_entry(kl_A))
            grad_m += torch.where(possible_m, slope_m, 0.0) * per_entry(grad_kl_T[rows])
        return grad_m, None, None, None, None, None, None


def _normalized(logprobs_n: Tensor, support: SupportIndex) -> Tensor:
    """Renormalize `logprobs_n` over each candidate set."""
    # For a token of probability 0, SGLang reports float32's lowest value as the log-prob.
    logprobs_n = logprobs_n.masked_fill(logprobs_n <= float(LOWEST), -torch.inf)
    offsets = support.span_offsets
    sizes = offsets.diff()

    def per_entry(values_T: Tensor) -> Tensor:
        return values_T.repeat_interleave(sizes, output_size=len(logprobs_n))

    shifted_n = logprobs_n - per_entry(torch.segment_reduce(logprobs_n, "max", offsets=offsets))
    return shifted_n - per_entry(torch.segment_reduce(shifted_n.exp(), "sum", offsets=offsets).log())


def kl_terms(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return the KL terms `a log(a / b) + b - a` of the probabilities `a` and `b`. No term is negative.

    At each position, the probabilities `a` of all outcomes sum to 1, and so do the probabilities `b`. The sum
    of `b - a` is therefore 0, and the sum of the terms is the KL. If `a` and `b` are almost equal, a rounding
    error in a log-prob changes a term only by about the square of the error. A small KL is therefore accurate
    too.
    """
    a, b, ratio = log_a.exp(), log_b.exp(), log_b - log_a
    near = a * (torch.expm1(ratio) - ratio)
    return torch.where(a > 0, torch.where(ratio.abs() < 1, near, b - a - a * ratio), b)


def check_held(held_A: Tensor, support: SupportIndex) -> None:
    """Raise InvalidCandidateSetsError unless exactly one rank holds each candidate.

    `held_A[a]` is the total number of candidates of position `a` that the ranks hold. A candidate that k
    ranks hold counts k times.
    """
    index = first_true(held_A != support.sizes)
    if index is not None:
        raise InvalidCandidateSetsError(
            "token_ids",
            f"the vocabulary shards hold {int(held_A[index])} of the {int(support.sizes[index])} candidates"
            f" at position {int(support.rows[index])}; check vocab_start, and that the shards meet",
        )


def _check_finite(logprobs_T: Tensor) -> None:
    position = first_true(logprobs_T.isnan())
    if position is not None:
        raise InvalidInputError(
            f"the log-prob at position {position} is NaN: among its candidates' logits is a NaN or +inf,"
            " or none is above -inf"
        )
