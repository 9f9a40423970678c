"""Score targets from existing logits, over the candidate sets or over the whole vocabulary.

This module is for trainers that have `[T, V]` logits anyway. `masked_logprobs` scores over candidate sets: it
gathers the candidates' logits. `full_logprobs` scores over the whole vocabulary, one chunk of positions at a
time. `masked_logprobs(full=True)` returns both kinds of scores. The two functions do not modify the caller's
logits, and build only one other tensor of the logits' shape, the gradient. Under tensor parallelism, each
rank holds the logits of a part of the vocabulary.

For callers that want dense tensors, `dense_mask` returns a mask of the candidates with the shape of the
logits, and `mask_logits` returns a masked copy of the logits.

Shape legend: T positions, V columns of the vocabulary on this rank, C positions of one chunk, n candidates in
all. m is the number of candidates that this rank holds at positions with two or more candidates. A position
with one candidate needs no logit, because its log-prob is always 0.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.torch_tensors import CandidateTensors
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.full_vocab_softmax import (
    RowSums,
    local_targets,
    row_parts,
    rows_per_chunk,
    to_gradient,
)
from sglang_topp.replay.logit_scaling import LogitTransform
from sglang_topp.replay.scores_from_candidate_logits import Scores, accumulation_dtype, score_support
from sglang_topp.replay.vocab_shard_candidates import (
    Shard,
    SupportIndex,
    TargetMatch,
    check_num_sets,
    check_targets,
    refuse_dtensors,
    sets_on,
)

__all__ = ["dense_mask", "full_logprobs", "mask_logits", "masked_logprobs"]

_CHUNK_BYTES = 1 << 23


def masked_logprobs(
    logits: Tensor,
    targets: Tensor,
    candidates: CandidateSets | CandidateTensors,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    per_candidate: bool = False,
    kl_to: Tensor | None = None,
    full: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> Scores:
    """Score `targets` under `softmax(logits / temperature)` restricted to the candidate sets `C_t`.

    ::

        logprobs[t] = z[t, target_t] - log(sum over i in C_t of exp(z[t, i])),   z = logits / temperature

    Every returned value has a first derivative in `logits`, but no second derivative. Apart from the
    gradient, the memory that the call needs depends on the number of candidates, not on the size of `logits`.
    Sums accumulate in float32 (float64 for float64 inputs). A position with one candidate or an empty set
    scores exactly 0 and has no gradient. An empty set belongs to a token that the policy did not draw.

    Args:
        logits: [T, V] in float16, bfloat16, float32, or float64: this rank's columns of the logits, after the
            soft cap if the model has one.
        full: also return every target's log-prob and every position's entropy over the whole vocabulary, both
            differentiable. Even with `full`, the backward builds only one gradient tensor with the shape of
            `logits`. With `full`, every target must be a valid token id, even if its set is empty. `full`
            makes the host wait for the device.
        chunk_rows: with `full`, the number of positions to process at a time. By default, the logits of these
            positions take at most 8 MiB.

    The other arguments, the result, and the errors are those of `candidate_logprobs`. With a `tp_group`, each
    rank gets the gradient of its own columns of the logits.

    Example:
        The sampler drew token 0 from the candidate set {0, 1}. Token 0 has probability 0.4 over the
        vocabulary, and 0.5 over the candidate set.

        >>> logits = torch.tensor([[0.4, 0.4, 0.2]]).log()
        >>> sets = CandidateSets([0, 1], None, [0, 2], [0])
        >>> scores = masked_logprobs(logits, torch.tensor([0]), sets, full=True)
        >>> scores.logprobs.exp(), scores.full_logprobs.exp()
        (tensor([0.5000]), tensor([0.4000]))
    """
    _check_logits(logits, targets)
    shard = Shard.of(logits.shape[1], vocab_start, vocab_size, parallel=tp_group is not None)
    check_num_sets(candidates, targets)
    support, may_wait = SupportIndex.of(candidates, logits.device, shard)
    match = TargetMatch.of(support, targets, may_wait=may_wait)
    transform = LogitTransform.of(temperature, len(targets), may_wait=may_wait)
    picked, full_logprobs, full_entropy = _FromLogits.apply(
        logits,
        support.positions,
        support.ids,
        targets if full else None,
        transform,
        True,
        shard,
        tp_group,
        chunk_rows,
    )
    scores = score_support(
        transform.of_entries(picked, support.positions),
        support,
        match,
        entropy=entropy,
        per_candidate=per_candidate,
        kl_to=kl_to,
        tp_group=tp_group,
    )
    return Scores(
        scores.logprobs, scores.entropy, scores.candidate_logprobs, scores.kl, full_logprobs, full_entropy
    )


def full_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
) -> Scores:
    """Score `targets` under `softmax(logits / temperature)` over the whole vocabulary, without replay.

    The result has `Scores.logprobs` and, with `entropy`, `Scores.entropy`, both differentiable in `logits`.
    The arguments are those of `masked_logprobs`. Padded columns, from `vocab_size` on, have probability 0.
    """
    _check_logits(logits, targets)
    shard = Shard.of(logits.shape[1], vocab_start, vocab_size, parallel=tp_group is not None)
    nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
    _, logprobs, entropies = _FromLogits.apply(
        logits,
        nothing,
        nothing,
        targets,
        LogitTransform.of(temperature, len(targets)),
        entropy,
        shard,
        tp_group,
        chunk_rows,
    )
    return Scores(logprobs, entropies)


def dense_mask(
    candidates: CandidateSets | CandidateTensors,
    vocab_start: int,
    vocab_local: int,
    device: torch.device | str,
) -> Tensor:
    """Return bool [T, vocab_local], which is True where `vocab_start + column` is a candidate.

    If a row's set is empty, every element of the row is True, because softmax over a row without a True would
    be NaN. The mask takes T * vocab_local bytes, and is built without a loop and without waiting for the
    device.
    """
    sets = sets_on(candidates, device)
    token_ids, sizes = sets.token_ids.long(), sets.offsets.diff()
    # `flat` has one more element than the mask. For candidates of other ranks, `index_fill_` writes True to
    # this additional element.
    flat = torch.empty(len(sets) * vocab_local + 1, dtype=torch.bool, device=token_ids.device)
    mask = flat[:-1].view(len(sets), vocab_local)
    mask.copy_((sizes == 0)[:, None])
    first = torch.repeat_interleave(
        torch.arange(len(sets), device=token_ids.device) * vocab_local, sizes, output_size=len(token_ids)
    )
    held = (token_ids >= vocab_start) & (token_ids < vocab_start + vocab_local)
    flat.index_fill_(0, torch.where(held, first + token_ids - vocab_start, len(flat) - 1), True)
    return mask


def mask_logits(
    logits: Tensor, candidates: CandidateSets | CandidateTensors, *, vocab_start: int = 0
) -> Tensor:
    """Return a copy of `logits` [T, V] with minus infinity outside the candidate sets.

    A row of `logits` whose candidate set is empty is unchanged. A row of only minus infinity would be NaN
    after softmax, and a loss mask of 0 does not remove a NaN. `masked_logprobs` scores a row with an empty
    set as 0, and so differs from a softmax over the unchanged row. The loss is the same in both cases,
    because a row with an empty set has a loss mask of 0.

    Raises:
        InvalidInputError: `logits` is not [T, V] for the T positions of the sets.
    """
    if logits.ndim != 2 or len(logits) != len(candidates):
        raise InvalidInputError(f"logits: got shape {tuple(logits.shape)}, expected [{len(candidates)}, V]")
    mask = dense_mask(candidates, vocab_start, logits.shape[1], logits.device)
    return logits.masked_fill(mask.logical_not_(), -torch.inf)


def _check_logits(logits: Tensor, targets: Tensor) -> None:
    check_targets(targets)
    refuse_dtensors(logits=logits)
    if logits.ndim != 2 or len(logits) != len(targets):
        raise InvalidInputError(
            f"logits: got shape {tuple(logits.shape)} for {len(targets)} targets, expected [T, V]"
        )
    if logits.device != targets.device:
        raise InvalidInputError(f"targets: it is on {targets.device}, and logits is on {logits.device}")


class _FromLogits(torch.autograd.Function):
    """The autograd node that gathers the candidates' logits [m] from the logits [T, V].

    If the caller passes targets, the node also computes two values per position over the whole vocabulary:
    the target's log-prob, and, if `entropy` is True, the entropy.

    The backward builds a single gradient tensor for the logits. It adds up the gradients of all three outputs
    before it rounds them to the dtype of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        positions_m: Tensor,
        columns_m: Tensor,
        targets_T: Tensor | None,
        transform: LogitTransform,
        entropy: bool,
        shard: Shard,
        group: dist.ProcessGroup | None,
        chunk_rows: int | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        dtype = accumulation_dtype(logits=logits_TV)
        picked_m = logits_TV[positions_m, columns_m].to(dtype)
        ctx.set_materialize_grads(False)
        ctx.dtype, ctx.transform, ctx.num_ids = dtype, transform, shard.num_ids
        ctx.shape, ctx.logits_dtype = logits_TV.shape, logits_TV.dtype
        ctx.chunk_rows = rows_per_chunk(chunk_rows, shard.num_ids * dtype.itemsize, _CHUNK_BYTES)
        if targets_T is None:
            # Without targets, the backward does not need the logits. Do not save the logits, so that the
            # caller can free their memory.
            ctx.save_for_backward(positions_m, columns_m)
            return picked_m, None, None
        column_T = local_targets(targets_T, shard, group)
        sums = RowSums(len(logits_TV), dtype, logits_TV.device, entropy=entropy)
        with torch.autocast(logits_TV.device.type, enabled=False):
            for part in row_parts(len(logits_TV), ctx.chunk_rows):
                logits_CV = transform.of_rows_(logits_TV[part, : shard.num_ids].to(dtype, copy=True), part)
                sums.add(part, logits_CV, column_T[part])
        softmax = sums.finish(group)
        ctx.save_for_backward(positions_m, columns_m, logits_TV, column_T, softmax.log_total, softmax.entropy)
        return picked_m, softmax.logprobs, softmax.entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_m: Tensor | None, grad_logprobs_T: Tensor | None, grad_entropy_T: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        positions_m, columns_m, *full = ctx.saved_tensors
        dtype = ctx.dtype
        grad_TV = torch.zeros(ctx.shape, dtype=ctx.logits_dtype, device=positions_m.device)
        if grad_logprobs_T is not None or grad_entropy_T is not None:
            logits_TV, column_T, log_total_T, entropy_T = full

            def bounds_of(part: slice) -> Tensor:
                return torch.tensor([part.start, part.stop], device=positions_m.device)

            for part in row_parts(len(logits_TV), ctx.chunk_rows):
                logits_CV = ctx.transform.of_rows_(logits_TV[part, : ctx.num_ids].to(dtype, copy=True), part)
                grad_CV = to_gradient(
                    logits_CV, part, log_total_T, entropy_T, column_T[part], grad_logprobs_T, grad_entropy_T
                )
                ctx.transform.backward_rows_(grad_CV, None, part)
                if grad_m is not None:  # before the chunk's gradient is rounded
                    inside = slice(*torch.searchsorted(positions_m, bounds_of(part)).tolist())
                    grad_CV[positions_m[inside] - part.start, columns_m[inside]] += grad_m[inside]
                grad_TV[part, : ctx.num_ids] = grad_CV
        elif grad_m is not None:
            grad_TV[positions_m, columns_m] = grad_m.to(grad_TV.dtype)
        return grad_TV, None, None, None, None, None, None, None, None
