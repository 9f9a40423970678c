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
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.torch_tensors import CandidateTensors
from sglang_topp.candidates.validation import LOWEST
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import DENSE_SHARES, CandidateIndex, Shard, first_true, reduce_sum
from sglang_topp.replay.lm_head import (
    Deliver,
    HeadSource,
    LogitsSource,
    Products,
    WeightGrad,
    WeightGradSink,
    check_tensors,
)
from sglang_topp.replay.logits import LogitTransform, Other, Policy, Work, evaluate

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
            Backend "torch" and `full` always wait.
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
        weight_grad: where the gradient of `weight` goes. "dense" gives autograd a tensor [V, H]. Or a buffer
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
    transform = LogitTransform(temperature, softcap, logit_scale)
    shard = Shard.of(len(weight), vocab_start, vocab_size, tp_group)
    policy, tensors = head_policy(
        hidden, weight, bias, targets, transform, shard, chunk_rows, weight_grad, backend
    )
    return _score(policy, tensors, targets, sets, entropy, full, per_candidate, kl_to)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
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
    if logits.ndim != 2:
        raise InvalidInputError(
            f"logits: got shape {tuple(logits.shape)} for {len(targets)} targets, expected [T, V]"
        )
    dtype = check_tensors(targets, logits=logits)
    shard = Shard.of(logits.shape[1], vocab_start, vocab_size, tp_group)
    policy = Policy(
        functools.partial(LogitsSource, num_ids=shard.num_ids, dtype=dtype),
        shard,
        LogitTransform(temperature),
        dtype,
        _rows_of_chunk(chunk_rows, shard, dtype, _LOGITS_CHUNK_BYTES),
        "logits",
    )
    return _score(policy, (logits,), targets, sets, entropy, full, per_candidate, kl_to)


def head_policy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor | None,
    transform: LogitTransform,
    shard: Shard,
    chunk_rows: int | None,
    weight_grad: WeightGrad,
    backend: str,
) -> tuple[Policy, tuple[Tensor | None, ...]]:
    """Return the policy `softmax(head(hidden))`, and its source's tensors. `score` defines the arguments.

    Raises:
        InvalidInputError: an argument is not valid, or does not match another one.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise InvalidInputError(
            f"hidden and weight: got shapes {tuple(hidden.shape)} and {tuple(weight.shape)},"
            " expected [T, H] and [V, H]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInputError(f"bias: got shape {tuple(bias.shape)}, expected [{len(weight)}]")
    dtype = check_tensors(targets, hidden=hidden, weight=weight, bias=bias)
    ops = Products.of(backend, hidden, dtype)
    sink = WeightGradSink(weight_grad, weight, hidden, dtype, ops)
    # Each chunk adds to the whole gradient of the weight, so large batches have large chunks.
    num_bytes = max(_HEAD_CHUNK_BYTES, hidden.numel() * dtype.itemsize)
    chunk_rows = _rows_of_chunk(chunk_rows, shard, dtype, num_bytes)
    source = functools.partial(HeadSource, shard=shard, dtype=dtype, ops=ops, sink=sink)
    return Policy(source, shard, transform, dtype, chunk_rows, "head"), (
        hidden,
        Deliver.apply(weight, sink),
        bias,
    )


def _rows_of_chunk(chunk_rows: int | None, shard: Shard, dtype: torch.dtype, num_bytes: int) -> int:
    if chunk_rows is not None and chunk_rows < 1:
        raise InvalidInputError(f"chunk_rows: got {chunk_rows}, expected 1 or more")
    return chunk_rows or max(1, num_bytes // max(1, shard.num_ids * dtype.itemsize))


def _score(
    policy: Policy,
    tensors: tuple[Tensor | None, ...],
    targets: Tensor,
    sets: CandidateSets | CandidateTensors | None,
    entropy: bool,
    full: bool,
    per_candidate: bool,
    kl_to: Tensor | None,
) -> Scores:
    has_sets, each = sets is not None, per_candidate or kl_to is not None
    if sets is None:
        asked = {"full": full, "per_candidate": per_candidate, "kl_to": kl_to is not None}
        if name := next((name for name, is_asked in asked.items() if is_asked), None):
            raise InvalidInputError(
                f"{name}: it needs sets, and got none; without sets, scores are over the vocabulary"
            )
        sets, full = CandidateSets.empty(len(targets)), True
    if len(sets) != len(targets):
        raise InvalidInputError(
            f"sets: got {len(sets)} positions for {len(targets)} targets; select both with the same"
            " RowSelection"
        )
    # Existing logits, and a pass over all positions, have every candidate's logit.
    has_all = not has_sets or (each and (full or policy.dense == "logits"))
    index, may_wait = CandidateIndex.of(
        sets,
        targets.device,
        policy.shard,
        dense=None if has_all else DENSE_SHARES[policy.dense],
        lists_all=each,
        reads="all" if full else "dense",
    )
    is_target, is_absent = index.find_targets(targets, may_wait=may_wait)
    transform = policy.transform.on(targets.device, len(targets), may_wait=may_wait or full)
    columns = _columns(targets, policy.shard, checks=full) if index.num_read else None
    work = Work(
        replace(policy, transform=transform),
        index,
        is_target,
        columns if columns is None or index.read_rows is None else columns.index_select(0, index.read_rows),
        None if kl_to is None else Other(_renormalized(kl_to, index, policy.dtype)),
        entropy,
        per_candidate,
        full,
    )
    *over_sets, full_logprobs, full_entropy = evaluate(work, *tensors)
    _check_numbers(full_logprobs, "over the vocabulary ", "its logits")
    if not has_sets:
        return Scores(full_logprobs, full_entropy)
    logprobs, entropies, of_candidates, kl = over_sets
    if is_absent is None:
        _check_numbers(logprobs, "", "its candidates' logits")
        if kl is not None and (position := first_true(~kl.isfinite())) is not None:
            raise InvalidInputError(
                f"kl_to: the KL at position {position} is {float(kl.detach()[position])};"
                " the other policy gives a candidate no probability, or NaN"
            )
    else:  # the host has not waited for the device, so a position whose set lacks its target scores NaN
        factor = torch.where(is_absent, torch.nan, 1.0).to(policy.dtype)
        logprobs, entropies, kl = (None if x is None else x * factor for x in (logprobs, entropies, kl))
        if of_candidates is not None:
            of_candidates = of_candidates * index.per_candidate(factor)
    return Scores(logprobs, entropies, of_candidates, kl, full_logprobs, full_entropy)


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


def _renormalized(kl_to: Tensor, index: CandidateIndex, dtype: torch.dtype) -> Tensor:
    """Return [n]: the other policy's log-probs, renormalized over each set."""
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
    shifted = logprobs - index.per_candidate(
        torch.segment_reduce(logprobs, "max", offsets=index.span_offsets)
    )
    return shifted - index.per_candidate(index.sum_candidates(shifted.exp()).log())
