"""Score a policy's tokens over recorded candidate sets, over the whole vocabulary, or both.

A score over a candidate set depends only on the candidates' logits. `score` computes only these from hidden
states and the LM head, which reduces the work from T * V * H to n * H and the memory from T * V to n. Where a
set is a large part of the vocabulary, and for scores over the vocabulary, it computes all logits, a chunk of
positions at a time.

Shape legend: T positions, H hidden size, V ids held by this rank, n candidates in all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.torch_tensors import CandidateTensors
from sglang_topp.candidates.validation import LOWEST
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import CandidateIndex, RowIds, find_targets
from sglang_topp.replay.candidate_softmax import CandidateSoftmax, kl_terms, segment_sums, sum_over_ranks
from sglang_topp.replay.lm_head_weight_grad import WeightGrad
from sglang_topp.replay.logit_scaling import LogitTransform
from sglang_topp.replay.logit_sources import (
    LogitsSource,
    Work,
    accumulation_dtype,
    check_head,
    check_targets,
    evaluate,
    evaluate_head,
    head_chunk_bytes,
    refuse_dtensors,
)
from sglang_topp.replay.vocab_pass import Softmax, SoftmaxOver, VocabPass, check_chunk_rows
from sglang_topp.replay.vocab_shards import Shard, first_true, reduce_sum

__all__ = ["Scores", "score", "score_logits"]

_LOGITS_CHUNK_BYTES = 1 << 23


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
    check_head(hidden, weight, bias, targets)
    dtype = accumulation_dtype(hidden=hidden, weight=weight)
    shard = Shard.of(len(weight), vocab_start, vocab_size, parallel=tp_group is not None)

    def run(work: Work) -> tuple[Tensor, list[Softmax]]:
        return evaluate_head(
            work, hidden, weight, bias, shard=shard, group=tp_group, weight_grad=weight_grad, backend=backend
        )

    return _score(
        run,
        targets,
        sets,
        _Asked(entropy, full, per_candidate, kl_to),
        shard=shard,
        group=tp_group,
        dtype=dtype,
        dense="head",
        chunk_rows=chunk_rows,
        chunk_bytes=head_chunk_bytes(hidden, dtype),
        scaling={"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale},
    )


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
    shard = Shard.of(logits.shape[1], vocab_start, vocab_size, parallel=tp_group is not None)

    def run(work: Work) -> tuple[Tensor, list[Softmax]]:
        source = functools.partial(
            LogitsSource,
            shape=logits.shape,
            grad_dtype=logits.dtype,
            rows=work.rows,
            num_ids=shard.num_ids,
            dtype=dtype,
        )
        return evaluate(work, source, logits)

    return _score(
        run,
        targets,
        sets,
        _Asked(entropy, full, per_candidate, kl_to),
        shard=shard,
        group=tp_group,
        dtype=dtype,
        dense="logits",
        chunk_rows=chunk_rows,
        chunk_bytes=_LOGITS_CHUNK_BYTES,
        scaling={"temperature": temperature},
    )


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
    run: Callable[[Work], tuple[Tensor, list[Softmax]]],
    targets: Tensor,
    sets: CandidateSets | CandidateTensors | None,
    asked: _Asked,
    *,
    shard: Shard,
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    dense: Literal["head", "logits"],
    scaling: dict[str, Any],
    chunk_rows: int | None,
    chunk_bytes: int,
) -> Scores:
    """Score from the source that `run` evaluates, whose name is `dense`."""
    check_chunk_rows(chunk_rows)
    vocab_pass = functools.partial(
        VocabPass,
        num_ids=shard.num_ids,
        entropy=asked.entropy,
        dtype=dtype,
        group=group,
        chunk_rows=chunk_rows,
        chunk_bytes=chunk_bytes,
    )
    index, may_wait = None, True
    if sets is None:
        _refuse_without_sets(asked)
    elif len(sets) != len(targets):
        raise InvalidInputError(
            f"sets: got {len(sets)} positions for {len(targets)} targets; select both with the same"
            " RowSelection"
        )
    else:
        # If all candidates are listed, existing logits and a pass over all positions give each one's logit.
        has_logits = asked.values_of_candidates and (asked.full or dense == "logits")
        index, may_wait = CandidateIndex.of(
            sets,
            targets.device,
            shard,
            group,
            lists_all=asked.values_of_candidates,
            dense=None if has_logits else dense,
        )
        is_target, is_absent = find_targets(index, targets, may_wait=may_wait)
    transform = LogitTransform.of(num_positions=len(targets), may_wait=may_wait or asked.full, **scaling)

    full = None
    if index is None or asked.full:
        over, picks = [SoftmaxOver("all")], None
        if index is not None:
            picks = RowIds(index.listed.ids, index.listed.by_position.offsets)
            if len(index.dense_rows):
                over.append(SoftmaxOver("candidates", RowIds(index.token_ids, index.span_offsets, shard)))
        columns = _columns(targets, shard, group, checks=True)
        vocab = vocab_pass(len(targets), softmaxes=over, columns=columns, picks=picks, transform=transform)
        raw, (full, *at_all) = run(Work(index, None, vocab))
        _check_numbers(full.logprobs, "over the vocabulary ", "its logits")
        if index is None:
            return Scores(full.logprobs, full.entropy)
        at_dense = [softmax.take(index.dense_rows) for softmax in at_all]
    elif len(rows := index.dense_rows):
        vocab = vocab_pass(
            len(rows),
            softmaxes=[] if asked.values_of_candidates else [SoftmaxOver("candidates", index.dense_ids)],
            columns=_columns(targets.index_select(0, rows), shard),
            picks=index.picked,
            transform=transform.take(rows),
        )
        raw, at_dense = run(Work.over_candidates(index, vocab))
    else:
        raw, at_dense = run(Work.over_candidates(index, None))

    logits = transform.of_entries(raw, index.listed.positions)
    softmax = CandidateSoftmax.of(logits, index, group, target=is_target, entropy=asked.entropy)
    # Where the host has not waited for the device, a position whose set lacks its target scores NaN.
    broken = None if is_absent is None else torch.where(is_absent, torch.nan, 1.0).to(dtype)
    scores = _over_sets(softmax, at_dense, index, asked, group, broken=broken)
    return scores if full is None else replace(scores, full_logprobs=full.logprobs, full_entropy=full.entropy)


def _over_sets(
    softmax: CandidateSoftmax,
    at_dense: list[Softmax],
    index: CandidateIndex,
    asked: _Asked,
    group: dist.ProcessGroup | None,
    *,
    broken: Tensor | None,
) -> Scores:
    """Return the scores over the sets, from the listed candidates and the softmax at dense positions, if any.

    `broken` [T] is NaN or 1 at each position, or None if the host may wait, and check all values.
    """

    def spread(listed: Tensor, dense: Tensor | None = None) -> Tensor:
        values = listed.new_zeros(index.num_positions).index_copy(0, index.rows, listed)
        if dense is not None:
            values = values.index_copy(0, index.dense_rows, dense)
        return values if broken is None else values * broken

    dense = at_dense[0] if at_dense else None
    target, *moments = softmax.others
    logprobs = spread(target - softmax.log_total, None if dense is None else dense.logprobs)
    if broken is None:
        _check_numbers(logprobs, "", "its candidates' logits")
    entropy = candidate_logprobs = kl = None
    if moments:
        listed = softmax.log_total - moments[0] / softmax.total
        entropy = spread(listed, None if dense is None else dense.entropy)
    if asked.values_of_candidates:
        listed = softmax.logprobs(index, group)
    if asked.per_candidate:
        candidate_logprobs = listed.new_zeros(len(index.token_ids)).index_copy(0, index.at, listed)
        candidate_logprobs = sum_over_ranks(candidate_logprobs, group)
        if broken is not None:
            candidate_logprobs = candidate_logprobs * index.per_candidate(broken)
    if asked.kl_to is not None:
        (terms,) = segment_sums(
            index, group, kl_terms(listed, _other_policy(asked.kl_to, index, listed.dtype))
        )
        if broken is None and (row := first_true(~terms.isfinite())) is not None:
            raise InvalidInputError(
                f"kl_to: the KL at position {int(index.rows[row])} is {float(terms.detach()[row])};"
                " the other policy gives a candidate no probability, or NaN"
            )
        kl = spread(terms)
    return Scores(logprobs, entropy, candidate_logprobs, kl)


def _refuse_without_sets(asked: _Asked) -> None:
    for name in ("full", "per_candidate", "kl_to"):
        got = getattr(asked, name)
        if got is not None and got is not False:
            raise InvalidInputError(
                f"{name}: it needs sets, and got none; without sets, scores are over the vocabulary"
            )


def _columns(
    targets: Tensor, shard: Shard, group: dist.ProcessGroup | None = None, *, checks: bool = False
) -> Tensor:
    """Return int64 [T]: each target's column on this rank, or -1 if another rank holds it.

    Raises:
        InvalidInputError: `checks` is True, and a target id is on no rank, or on several ranks.
    """
    columns = targets.to(torch.int64) - shard.start
    is_held = (columns >= 0) & (columns < shard.num_ids)
    if checks and (position := first_true(reduce_sum(is_held.int(), group) != 1)) is not None:
        raise InvalidInputError(
            f"targets: {int(targets[position])} at position {position} is not in the vocabulary"
            " (or the ranks' shards overlap)"
        )
    return torch.where(is_held, columns, -1)


def _check_numbers(logprobs: Tensor, over: str, logits: str) -> None:
    if (position := first_true(logprobs.isnan())) is not None:
        raise InvalidInputError(
            f"the log-prob {over}at position {position} is NaN: among {logits} is a NaN or +inf, or none is"
            " above -inf"
        )


def _other_policy(kl_to: Tensor, index: CandidateIndex, dtype: torch.dtype) -> Tensor:
    """Return [m]: the other policy's log-probs of the listed candidates, renormalized over each set."""
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
    offsets = index.span_offsets
    shifted = logprobs - index.per_candidate(torch.segment_reduce(logprobs, "max", offsets=offsets))
    total = torch.segment_reduce(shifted.exp(), "sum", offsets=offsets)
    return (shifted - index.per_candidate(total.log())).index_select(0, index.at)
