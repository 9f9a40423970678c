"""Score a policy's tokens over recorded candidate sets, over the whole vocabulary, or both.

A score over a candidate set depends only on the candidates' logits. `score` computes only these from hidden
states and the LM head, which reduces the work from T * V * H to n * H and the memory from T * V to n. Where a
set is a large part of the vocabulary, and for scores over the vocabulary, it computes all logits, a chunk of
positions at a time.

Shape legend: T positions, H hidden size, V ids held by this rank, n candidates in all, A listed positions, m
listed candidates that this rank holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.torch_tensors import CandidateTensors
from sglang_topp.candidates.validation import LOWEST
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import (
    CandidateIndex,
    RowIds,
    Shard,
    first_true,
    reduce_max,
    reduce_sum,
)
from sglang_topp.replay.lm_head import (
    HeadSource,
    WeightGrad,
    WeightGradSink,
    accumulation_dtype,
    check_head,
    check_targets,
    products_of,
    refuse_dtensors,
)
from sglang_topp.replay.logits import (
    LOG_PROB_FLOOR,
    LogitsSource,
    LogitTransform,
    Softmax,
    Source,
    VocabPass,
    evaluate,
    gradient_of_softmax,
)

__all__ = ["Policy", "Scores", "kl_terms", "score", "score_logits", "score_sets"]

# How many bytes the logits of a chunk take.
_LOGITS_CHUNK_BYTES = 1 << 23
_HEAD_CHUNK_BYTES = 1 << 28


@dataclass(frozen=True)
class Scores:
    """A policy's scores of T target tokens, in float32, or float64 for float64 inputs.

    A field that the caller did not ask for is None.

    Let `C_t` be the candidate set of position `t`, and `z` the policy's logits after scale, soft cap, and
    temperature. Over the set, the policy gives each candidate `i` the probability
    `pi_t(i) = exp(z_i) / sum over j in C_t of exp(z_j)`.

    At a position whose set is empty or has one candidate, every score over the set is exactly 0 and has no
    gradient. A token from a tool's output has an empty set, because the policy did not draw it.
    """

    logprobs: Tensor
    """[T]: `log pi_t(target_t)` over the sets; or over the whole vocabulary, if there are no sets."""
    entropy: Tensor | None = None
    """[T]: `-sum pi_t log pi_t`, in nats, over the same ids as `logprobs`."""
    candidate_logprobs: Tensor | None = None
    """[n]: `log pi_t(i)` of every candidate, in the order of the candidate sets."""
    kl: Tensor | None = None
    """[T]: `sum pi_t (log pi_t - log other_t)` over the candidate set, in nats. `other_t` is the policy whose
    log-probs the caller passed as `kl_to`, renormalized over the candidate set."""
    full_logprobs: Tensor | None = None
    """[T]: with sets and `full`, the target's log-prob over the whole vocabulary."""
    full_entropy: Tensor | None = None
    """[T]: with sets, `full`, and `entropy`, the entropy over the whole vocabulary, in nats."""

    def __repr__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        shapes = (f"{name}={list(x.shape)} {x.dtype}" for name, x in given.items() if x is not None)
        return f"Scores({', '.join(shapes)})"


# Do not compile these functions, because shapes vary between calls. The decorator has no type annotations.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def score(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    sets: CandidateSets | CandidateTensors | None = None,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    entropy: bool = False,
    full: bool = False,
    per_candidate: bool = False,
    kl_to: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
    weight_grad: WeightGrad = "dense",
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Scores:
    """Score `targets` under the policy `softmax(head(hidden))`, over the candidate sets or the vocabulary.

    ::

        raw_i = logit_scale * (hidden[t] . weight[i] + bias[i])
        z_i = softcap * tanh(raw_i / softcap) / temperature[t]
        logprobs[t] = z_target - log(sum over i of exp(z_i))     i in C_t, or without sets in the vocabulary

    Every returned value is differentiable once, in `hidden`, `weight`, and `bias`. Sums run in float32
    (float64 for float64 inputs) in a fixed order, so values and gradients are bitwise reproducible. Without
    `full`, the call does not read the hidden states of positions with fewer than two candidates.

    Args:
        hidden: [T, H], float16, bfloat16, float32, or float64, the hidden states that predict the targets.
            `RowSelection.select` selects them.
        weight: [V, H], the rows of the LM head that this rank holds.
        targets: integers [T] on the device of `hidden`. Each must be in its candidate set. The target of a
            position with an empty set is ignored.
        sets: the candidate sets of the T positions, or None to score over the whole vocabulary. To score over
            the same sets again (policy, reference, PPO epochs), pass `sets.to_torch(device)` each time: the
            first call checks and indexes them. On a GPU, later calls and their backward passes do not wait
            for the device, and so return NaN at a position with an invalid value instead of raising an error.
            Backend "torch", `weight_grad="sparse"`, and `full` always wait.
        bias: [V], the LM head's bias, or None.
        temperature: above 0, one number or [T]. It has no gradient.
        softcap: the soft cap of the logits, above 0, or None.
        logit_scale: a positive factor for the logits: Cohere's `logit_scale`, Falcon-H1's
            `lm_head_multiplier`, or the inverse of Granite's `logits_scaling`.
        entropy: also return the entropy.
        full: with sets, also score over the whole vocabulary. Then every target must be a token id, even if
            its set is empty.
        per_candidate: also return the log-prob of every candidate.
        kl_to: [n], another policy's log-probs of all candidates. If given, also return
            KL(this policy || other policy) over each set. The other policy gets no gradient. Pass the
            `Scores.candidate_logprobs` of a reference model, or the sets' own `logprobs` on the device of
            `hidden`. The call renormalizes them over each set.
        tp_group: the ranks that share the vocabulary, or None. Every rank passes the same `hidden`,
            `targets`, and sets, and gets the same scores and the whole gradient of `hidden`. The incoming
            gradient must be the same on every rank.
        vocab_start: the token id of `weight[0]`.
        vocab_size: the number of token ids without padding, if the head has padding rows.
        chunk_rows: the number of positions whose logits over the whole vocabulary are computed at a time. By
            default, these logits take 256 MiB, or as much as `hidden` in the dtype of the sums. If one chunk
            holds all positions, the forward keeps the logits for the backward.
        weight_grad: where the gradient of `weight` goes. "dense" gives autograd a tensor [V, H]. "sparse"
            gives it a coalesced `torch.sparse_coo` tensor with one row per distinct candidate id. Or a buffer
            [V, H], such as `weight.grad` or Megatron's `weight.main_grad`, in the dtype of `weight` or of the
            sums, to which each backward pass adds the gradient in place; `weight` must then be a parameter.
            See [](../../how-to/train.md) for what each is for.
        backend: how single logits are computed. "triton" needs an NVIDIA GPU or Triton's interpreter. "auto"
            uses Triton if possible.

    Returns:
        The `Scores` of the T targets, on the inputs' device.

    Raises:
        InvalidInputError: shapes, dtypes, or lengths do not match, a target is not in its set, or a score is
            NaN. The message names the argument or the position.
        InvalidCandidateSetsError: a candidate id is outside the vocabulary, or is not on exactly one rank.
    """
    check_targets(targets)
    policy = Policy.of_head(
        hidden,
        weight,
        bias,
        targets=targets,
        scaling=(temperature, softcap, logit_scale),
        shard=Shard.of(len(weight), vocab_start, vocab_size, tp_group),
        chunk_rows=chunk_rows,
        weight_grad=weight_grad,
        backend=backend,
        needs_all=sets is None or full,
    )
    return _score(policy, targets, sets, _Asked(entropy, full, per_candidate, kl_to))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def score_logits(
    logits: Tensor,
    targets: Tensor,
    sets: CandidateSets | CandidateTensors | None = None,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    full: bool = False,
    per_candidate: bool = False,
    kl_to: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> Scores:
    """Score `targets` under `softmax(logits / temperature)`, over the candidate sets or the vocabulary.

    For trainers that have [T, V] logits anyway. The call only reads them, and builds only one other tensor of
    their shape, the gradient. Every value is differentiable once, in `logits`.

    Args:
        logits: [T, V] in float16, bfloat16, float32, or float64: this rank's columns of the logits, after the
            soft cap if the model has one. Unless `sets` is None, `full` is set, or a set is a large part of
            the vocabulary, they may be freed or overwritten before the backward.
        chunk_rows: the number of positions whose logits are processed over the whole vocabulary at a time. By
            default, these logits take at most 8 MiB.

    The other arguments, the result, and the errors are those of `score`. With a `tp_group`, each rank gets
    the gradient of its own columns of the logits.

    Example:
        The sampler drew token 0 from the candidate set {0, 1}. Token 0 has probability 0.4 over the
        vocabulary, and 0.5 over the candidate set.

        >>> logits = torch.tensor([[0.4, 0.4, 0.2]]).log()
        >>> sets = CandidateSets([0, 1], None, [0, 2], [0])
        >>> scores = score_logits(logits, torch.tensor([0]), sets, full=True)
        >>> scores.logprobs.exp(), scores.full_logprobs.exp()
        (tensor([0.5000]), tensor([0.4000]))
    """
    check_targets(targets)
    refuse_dtensors(logits=logits)
    if logits.ndim != 2 or len(logits) != len(targets):
        raise InvalidInputError(
            f"logits: got shape {tuple(logits.shape)} for {len(targets)} targets, expected [T, V]"
        )
    if logits.device != targets.device:
        raise InvalidInputError(f"targets: it is on {targets.device}, and logits is on {logits.device}")
    dtype = accumulation_dtype(logits=logits)
    shard = Shard.of(logits.shape[1], vocab_start, vocab_size, tp_group)
    source = functools.partial(LogitsSource, num_ids=shard.num_ids, dtype=dtype)
    policy = Policy(
        source,
        (logits,),
        shard,
        dtype,
        (temperature, None, 1.0),
        _chunk_rows(chunk_rows, shard, dtype, _LOGITS_CHUNK_BYTES),
        "logits",
    )
    return _score(policy, targets, sets, _Asked(entropy, full, per_candidate, kl_to))


@dataclass(frozen=True, eq=False)
class Policy:
    """Where a policy's logits come from."""

    source: Callable[..., Source]
    """Makes a source from `tensors` and the rows of a pass."""
    tensors: tuple[Tensor | None, ...]
    """The first is [T, ...]."""
    shard: Shard
    dtype: torch.dtype
    """The dtype of sums and results."""
    scaling: tuple[float | Tensor, float | None, float]
    """Temperature, soft cap, and logit scale."""
    chunk_rows: int
    dense: Literal["head", "logits"]
    """The key of `DENSE_SHARES` that tells which positions are dense."""
    sink: WeightGradSink | None = None

    @classmethod
    def of_head(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        targets: Tensor | None,
        scaling: tuple[float | Tensor, float | None, float],
        shard: Shard,
        chunk_rows: int | None,
        weight_grad: WeightGrad,
        backend: str,
        needs_all: bool,
    ) -> Policy:
        """Build the policy `softmax(head(hidden))`. `score` defines the arguments.

        `needs_all` tells whether a score needs all logits.

        Raises:
            InvalidInputError: an argument is not valid, or does not match another one.
        """
        check_head(hidden, weight, bias, targets)
        dtype = accumulation_dtype(hidden=hidden, weight=weight)
        ops = products_of(backend, hidden, dtype)
        sink = WeightGradSink(weight_grad, weight, hidden, dtype, ops)
        if needs_all and isinstance(weight_grad, str) and weight_grad == "sparse":
            raise InvalidInputError(
                "weight_grad: got 'sparse', expected 'dense' or a buffer: over the whole vocabulary every id"
                " has a gradient"
            )
        # Each chunk adds to the whole gradient of the weight, so large batches have large chunks.
        num_bytes = max(_HEAD_CHUNK_BYTES, hidden.numel() * dtype.itemsize)
        return cls(
            functools.partial(HeadSource, shard=shard, dtype=dtype, ops=ops, sink=sink),
            (hidden, sink.attach(weight), bias),
            shard,
            dtype,
            scaling,
            _chunk_rows(chunk_rows, shard, dtype, num_bytes),
            "head",
            sink,
        )

    def transform(self, device: torch.device, num_positions: int, *, may_wait: bool = True) -> LogitTransform:
        """Check `scaling`, and return the transform to logits."""
        return LogitTransform.of(*self.scaling, num_positions=num_positions, device=device, may_wait=may_wait)

    def over_vocabulary(
        self, rows: Tensor | None, columns: Tensor | None, transform: LogitTransform, **values: Any
    ) -> VocabPass:
        """Describe a pass over the logits of the positions `rows`, or of all T. `columns` is [T]."""
        num_rows = num_positions = len(next(each for each in self.tensors if each is not None))
        if rows is not None:
            num_rows = len(rows)
            rows = None if num_rows == num_positions else rows
        if rows is not None and columns is not None:
            columns = columns.index_select(0, rows)
        return VocabPass(
            self.shard,
            num_rows,
            rows,
            transform,
            columns=columns,
            dtype=self.dtype,
            chunk_rows=self.chunk_rows,
            **values,
        )


def _chunk_rows(chunk_rows: int | None, shard: Shard, dtype: torch.dtype, num_bytes: int) -> int:
    if chunk_rows is not None and chunk_rows < 1:
        raise InvalidInputError(f"chunk_rows: got {chunk_rows}, expected 1 or more")
    return chunk_rows or max(1, num_bytes // max(1, shard.num_ids * dtype.itemsize))


@dataclass(frozen=True, eq=False)
class _Asked:
    entropy: bool
    full: bool
    per_candidate: bool
    kl_to: Tensor | None

    @property
    def values_of_candidates(self) -> bool:
        """Whether a score needs a value for each candidate, so that all of them must be listed."""
        return self.per_candidate or self.kl_to is not None


def _score(
    policy: Policy, targets: Tensor, sets: CandidateSets | CandidateTensors | None, asked: _Asked
) -> Scores:
    if sets is None:
        _refuse_without_sets(asked)
        columns = _columns(targets, policy.shard, checks=True)
        transform = policy.transform(targets.device, len(targets))
        vocab = policy.over_vocabulary(
            None, columns, transform, dropped=[_drop_none], picks=None, entropy=asked.entropy
        )
        _, (full,) = evaluate(None, vocab, policy.source, *policy.tensors)
        _check_numbers(full.logprobs, "over the vocabulary ", "its logits")
        return Scores(full.logprobs, full.entropy)
    if len(sets) != len(targets):
        raise InvalidInputError(
            f"sets: got {len(sets)} positions for {len(targets)} targets; select both with the same"
            " RowSelection"
        )
    # If all candidates are listed, existing logits and a pass over all positions give each one's logit.
    has_logits = asked.values_of_candidates and (asked.full or policy.dense == "logits")
    index, may_wait = CandidateIndex.of(
        sets,
        targets.device,
        policy.shard,
        lists_all=asked.values_of_candidates,
        dense=None if has_logits else policy.dense,
    )
    is_target, is_absent = index.find_targets(targets, may_wait=may_wait)
    transform = policy.transform(targets.device, len(targets), may_wait=may_wait or asked.full)
    scores, _ = score_sets(
        policy,
        index,
        transform,
        is_target=is_target,
        columns=_columns(targets, policy.shard, checks=asked.full),
        entropy=asked.entropy,
        each=asked.values_of_candidates,
        full=asked.full,
    )
    _check_numbers(scores.full_logprobs, "over the vocabulary ", "its logits")
    if is_absent is None:
        _check_numbers(scores.logprobs, "", "its candidates' logits")
    else:
        # Where the host has not waited for the device, a position whose set lacks its target scores NaN.
        scores = _multiplied(scores, torch.where(is_absent, torch.nan, 1.0).to(policy.dtype), index)
    if asked.kl_to is not None and scores.candidate_logprobs is not None:
        other = _other_policy(asked.kl_to, index, policy.dtype)
        kl = index.sum_candidates(kl_terms(scores.candidate_logprobs, other))
        if is_absent is None and (position := first_true(~kl.isfinite())) is not None:
            raise InvalidInputError(
                f"kl_to: the KL at position {position} is {float(kl.detach()[position])};"
                " the other policy gives a candidate no probability, or NaN"
            )
        scores = replace(scores, kl=kl)
    return scores if asked.per_candidate else replace(scores, candidate_logprobs=None)


def _multiplied(scores: Scores, factor: Tensor, index: CandidateIndex) -> Scores:
    """Multiply all scores over the sets of each position by an element of `factor` [T]."""
    entropy, each = scores.entropy, scores.candidate_logprobs
    return replace(
        scores,
        logprobs=scores.logprobs * factor,
        entropy=None if entropy is None else entropy * factor,
        candidate_logprobs=None if each is None else each * index.per_candidate(factor),
    )


def score_sets(
    policy: Policy,
    index: CandidateIndex,
    transform: LogitTransform,
    *,
    is_target: Tensor | None = None,
    columns: Tensor | None = None,
    entropy: bool = False,
    each: bool = False,
    full: bool = False,
    tail: bool = False,
) -> tuple[Scores, Tensor | None]:
    """Score over the sets of an index, without checks, and return the tails' log-probs [T] too.

    Args:
        is_target: bool [m], whether each listed candidate is the target, or None without targets.
        columns: int64 [T], each target's column on this rank, or -1.
        each: return each candidate's log-prob. Then all candidates are listed.
        full: score over the vocabulary too.
        tail: all ids outside of a set are one more outcome. Then no position is dense.
    """
    if policy.sink is not None:
        policy.sink.index = index
    num_ids, gathered = policy.shard.num_ids, index.gathered
    has_dense = len(index.dense_rows) > 0 and not index.lists_dense
    at_dense, picks = index.dense_ids, index.dense_ids if index.lists_dense else None
    rows: Tensor | None = index.dense_rows
    dropped: list[Callable[[slice], Tensor | None]] = []
    if full:
        rows, picks, dropped = None, RowIds(gathered.ids, gathered.by_position.offsets), [_drop_none]
        at_dense = RowIds(policy.shard.columns(index.token_ids), index.span_offsets)
    elif tail:
        rows, picks = index.rows, RowIds(gathered.ids, index.offsets)
        dropped = [functools.partial(picks.mask, num_ids=num_ids)]
    if has_dense:
        dropped.append(lambda part: at_dense.mask(part, num_ids).logical_not_())
    vocab = None
    if rows is None or tail or len(rows):
        vocab = policy.over_vocabulary(
            rows, columns, transform, dropped=dropped, picks=picks, entropy=entropy
        )
    raw, softmaxes = evaluate(None if full or tail else gathered, vocab, policy.source, *policy.tensors)
    logits = transform(raw, index.positions)
    log_others = softmaxes[0].log_total if tail else None
    logprobs, of_entropy, candidate_logprobs, log_tail = _SoftmaxOverSets.apply(
        logits, log_others, index, is_target, entropy, each
    )
    if has_dense:
        over = softmaxes[-1]
        if full:
            over = Softmax._make(x if x is None else x.index_select(0, index.dense_rows) for x in over)
        logprobs = logprobs.index_copy(0, index.dense_rows, over.logprobs)
        if entropy:
            of_entropy = of_entropy.index_copy(0, index.dense_rows, over.entropy)
    scores = Scores(logprobs, of_entropy, candidate_logprobs)
    if full:
        scores = replace(scores, full_logprobs=softmaxes[0].logprobs, full_entropy=softmaxes[0].entropy)
    return scores, log_tail


def _drop_none(rows: slice) -> None:
    """Return the mask of a softmax over all ids."""


class _SoftmaxOverSets(torch.autograd.Function):
    """The softmax over each position's listed candidates, on all ranks, and optionally one more outcome.

    All results are the same on every rank, and 0 at positions that are not listed. The incoming gradient must
    be the same on every rank too, which is true if all ranks compute the same loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_m: Tensor,
        tail_A: Tensor | None,
        index: CandidateIndex,
        is_target_m: Tensor | None,
        entropy: bool,
        each: bool,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        group, segment = index.shard.group, index.segment

        def sum_of(values_m: Tensor) -> Tensor:
            return torch.segment_reduce(values_m, "sum", offsets=index.offsets)

        def spread(values: Tensor, places: Tensor, length: int) -> Tensor:
            return values.new_zeros(length).index_copy_(0, places, values)

        peak_A = reduce_max(torch.segment_reduce(logits_m, "max", offsets=index.offsets), group)
        if tail_A is not None:
            peak_A = torch.maximum(peak_A, tail_A)
        shifted_m = logits_m - peak_A.index_select(0, segment)
        weight_m = shifted_m.exp()
        sums = [sum_of(weight_m)]
        if is_target_m is not None:
            sums.append(sum_of(torch.where(is_target_m, shifted_m, 0.0)))
        if entropy:
            sums.append(sum_of(weight_m * shifted_m.clamp(min=LOG_PROB_FLOOR)))
        total_A, *others = reduce_sum(torch.stack(sums), group)
        if tail_A is not None:
            total_A = total_A + (tail_A - peak_A).exp()
        log_total_A = total_A.log()
        logprobs_m = shifted_m - log_total_A.index_select(0, segment)
        logprobs = entropy_T = logprobs_n = log_tail = None
        if is_target_m is not None:
            logprobs = spread(others[0] - log_total_A, index.rows, index.num_positions)
        if entropy:
            entropy_T = spread(log_total_A - others[-1] / total_A, index.rows, index.num_positions)
        if each:
            logprobs_n = reduce_sum(spread(logprobs_m, index.at, len(index.token_ids)), group)
        if tail_A is not None:
            log_tail = spread(tail_A - peak_A - log_total_A, index.rows, index.num_positions)
        ctx.index = index
        ctx.save_for_backward(logprobs_m, is_target_m, entropy_T, log_tail)
        return logprobs, entropy_T, logprobs_n, log_tail

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_n: Tensor | None,
        grad_tail: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        index: CandidateIndex = ctx.index
        logprobs_m, is_target_m, entropy_T, log_tail = ctx.saved_tensors
        given = [grad for grad in (grad_logprobs, grad_tail) if grad is not None]
        if grad_n is not None:
            given.append(index.sum_candidates(grad_n.contiguous()))
        of_entropy_m = None
        if grad_entropy is not None:
            given.append(grad_entropy * entropy_T)
            of_entropy_m = grad_entropy.index_select(0, index.positions)
        if not given:
            return None, None, None, None, None, None
        factor_T = -functools.reduce(torch.add, given)
        factor_m = factor_T.index_select(0, index.positions)
        grad_m = gradient_of_softmax(logprobs_m, factor_m, of_entropy_m)
        if grad_logprobs is not None:
            grad_m += grad_logprobs.index_select(0, index.positions) * is_target_m
        if grad_n is not None:
            grad_m += grad_n.index_select(0, index.at)
        grad_of_tail = None
        if grad_tail is not None:
            grad_of_tail = (log_tail.exp() * factor_T + grad_tail).index_select(0, index.rows)
        return grad_m, grad_of_tail, None, None, None, None


def kl_terms(log_a: Tensor, log_b: Tensor) -> Tensor:
    """Return the KL terms `a log(a / b) + b - a` of the probabilities `a` and `b`. No term is negative.

    At each position, the probabilities `a` of all outcomes sum to 1, and so do the probabilities `b`. The sum
    of `b - a` is therefore 0, and the sum of the terms is the KL. If `a` and `b` are almost equal, a rounding
    error in a log-prob changes a term only by about the square of the error. A small KL is therefore accurate
    too.
    """
    terms: Tensor = _KlTerms.apply(log_a, log_b)
    return terms


class _KlTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_a: Tensor, log_b: Tensor) -> Tensor:
        a, b, ratio = log_a.exp(), log_b.exp(), log_b - log_a
        slope_a = torch.where(a > 0, -a * ratio, 0.0) if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(slope_a, b - a if ctx.needs_input_grad[1] else None)
        near = a * (torch.expm1(ratio) - ratio)
        return torch.where(a == 0, b, torch.where(ratio.abs() < 1, near, b - a - a * ratio))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if slope is None else slope * grad for slope in ctx.saved_tensors)


def _refuse_without_sets(asked: _Asked) -> None:
    for name in ("full", "per_candidate", "kl_to"):
        got = getattr(asked, name)
        if got is not None and got is not False:
            raise InvalidInputError(
                f"{name}: it needs sets, and got none; without sets, scores are over the vocabulary"
            )


def _columns(targets: Tensor, shard: Shard, *, checks: bool) -> Tensor:
    """Return int64 [T]: each target's column on this rank, or -1 if another rank holds it.

    Raises:
        InvalidInputError: `checks` is True, and a target id is on no rank, or on several ranks.
    """
    columns = targets.to(torch.int64) - shard.start
    is_held = (columns >= 0) & (columns < shard.num_ids)
    if checks and (position := first_true(reduce_sum(is_held.int(), shard.group) != 1)) is not None:
        raise InvalidInputError(
            f"targets: {int(targets[position])} at position {position} is not in the vocabulary"
            " (or the ranks' shards overlap)"
        )
    return torch.where(is_held, columns, -1)


def _check_numbers(logprobs: Tensor | None, over: str, logits: str) -> None:
    if logprobs is not None and (position := first_true(logprobs.isnan())) is not None:
        raise InvalidInputError(
            f"the log-prob {over}at position {position} is NaN: among {logits} is a NaN or +inf, or none is"
            " above -inf"
        )


def _other_policy(kl_to: Tensor, index: CandidateIndex, dtype: torch.dtype) -> Tensor:
    """Return [n]: the other policy's log-probs, renormalized over each set, and 0 in sets of one."""
    num_candidates = len(index.token_ids)
    if kl_to.shape != (num_candidates,):
        raise InvalidInputError(
            f"kl_to: got shape {tuple(kl_to.shape)}, expected [{num_candidates}], one log-prob per entry of"
            " the candidate sets"
        )
    if kl_to.requires_grad:
        raise InvalidInputError("kl_to: it requires a gradient, and none is computed; detach it")
    # For a token of probability 0, SGLang reports float32's lowest value as the log-prob.
    kl_to = kl_to.to(dtype)
    logprobs = kl_to.masked_fill(kl_to <= float(LOWEST), -torch.inf)
    logprobs = logprobs.masked_fill(index.per_candidate(index.span_offsets.diff() < 2), 0.0)
    shifted = logprobs - index.per_candidate(
        torch.segment_reduce(logprobs, "max", offsets=index.span_offsets)
    )
    return shifted - index.per_candidate(index.sum_candidates(shifted.exp()).log())
