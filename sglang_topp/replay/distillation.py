"""Distillation loss: the KL between a student and a teacher, computed over the teacher's candidate sets.

Shape legend: T positions, H hidden size, V ids held by this rank, n candidates in all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.csr_operations import first_true as first_true_on_host
from sglang_topp.candidates.csr_operations import log_sum_exp, offsets_of, rows_of
from sglang_topp.candidates.validation import LOWEST, MASS_ERROR
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError
from sglang_topp.replay.candidate_index import DENSE_SHARES, CandidateIndex, Shard, first_true
from sglang_topp.replay.lm_head import WeightGrad
from sglang_topp.replay.logits import LogitTransform, Other, Work, evaluate
from sglang_topp.replay.row_selection import as_bool_mask
from sglang_topp.replay.scores import head_policy

# With float32 log-probs, a tail below this probability cannot be distinguished from rounding errors.
_SMALLEST_TAIL = 1e-6


@dataclass(frozen=True)
class DistillationLoss:
    """The KL divergence at each of T positions, in float32 (float64 for a float64 student)."""

    kl: Tensor
    """[T], in nats, at least 0. The KL is exactly 0 where `counted` is False."""
    counted: Tensor
    """bool [T]: True at positions with a candidate set and a loss mask other than 0."""

    def mean(self) -> Tensor:
        """Return the mean KL over the positions where `counted` is True, or 0 if no position is counted.

        For the mean over micro-batches or ranks, add up all `kl.sum()` and all `counted.sum()`, and divide
        the first total by the second. The mean of several means would give the positions unequal weights.
        """
        return self.kl.sum() / self.counted.sum().clamp(min=1)


# Do not compile this function, because shapes vary between calls. The decorator has no type annotations.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_sets: CandidateSets,
    *,
    direction: Literal["forward", "reverse"],
    outside: Literal["tail", "renormalized"],
    loss_mask: ArrayLike | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
    weight_grad: WeightGrad = "dense",
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> DistillationLoss:
    """Compute the KL between a student and a teacher over the teacher's candidate sets `C_t`.

    Let `p = softmax(head(hidden[t]))` be the student's distribution and `q` the teacher's, both over the
    whole vocabulary::

        outside="tail"          outcomes: the candidates, and one tail outcome for all other ids
                                p_tail = 1 - sum over C_t of p_i,   q_tail = 1 - sum over C_t of q_i
        outside="renormalized"  outcomes: the candidates
                                p_i / sum over C_t of p_j,   q_i / sum over C_t of q_j

        direction="forward"     kl[t] = KL(q || p) = sum over outcomes of q_o (log q_o - log p_o)
        direction="reverse"     kl[t] = KL(p || q) = sum over outcomes of p_o (log p_o - log q_o)

    Mode "tail" merges all ids outside the set into one outcome, in both distributions. The loss therefore
    depends on how much probability the student has outside the set. The KL with a tail is never above the KL
    over the whole vocabulary. The KL with a tail equals the KL over the whole vocabulary if every set is the
    whole vocabulary. verl's issue 7856 asks for the loss with a tail. A sum of KL terms over only the
    teacher's top-k tokens, with neither a tail nor renormalization, is not a KL and can fall below 0.

    Mode "renormalized" ignores the ids outside the set. The student's probability outside the set does not
    change the loss, and the logits of the ids outside the set have no gradient. Mode "renormalized" needs
    only a fraction of the time and memory of mode "tail". verl's issue 6676 asks for a similar loss, which
    is renormalized over the student's top-k tokens instead of the teacher's sets.

    The loss is differentiable once, in `hidden`, `weight`, and `bias`. The probability of the student's tail
    is summed over the ids outside the set, so a tail of 1e-30 is as accurate as a tail of 0.5. The
    probability of the teacher's tail is computed from float32 log-probs, so it is accurate to about 1e-6. If
    the probabilities of a teacher's set sum to 1, or rounding lifts their sum above 1, the teacher has no
    tail at that position. With direction "reverse", the KL to a teacher without a tail would be infinite.
    Direction "reverse" therefore raises a teacher's tail to at least 1e-6, unless the set is the whole
    vocabulary.

    Mode "tail" needs memory for the gradients and for the logits of `chunk_rows` positions. Mode
    "renormalized" needs as much as `score` with sets. The call does not read the hidden states of positions
    with an empty set or a loss mask of 0.

    Args:
        hidden: [T, H], float16, bfloat16, float32, or float64, the student's hidden states that predict the
            tokens of the T positions. The state at position `s` of a sequence predicts the token at `s + 1`.
        weight: [V, H], the rows of the LM head that this rank holds.
        teacher_sets: the teacher's candidate sets at the T positions. Their log-probs are normalized over the
            whole vocabulary, not over the set. The teacher may have any temperature. The loss treats a
            sampled token of zero probability as outside the set, and ignores positions with an empty set.
        direction, outside: the direction of the KL, and the mode for ids outside the set, as defined above.
        loss_mask: [T]. The loss ignores positions with a mask of 0.
        bias, softcap, logit_scale: as in `score`.
        tp_group, vocab_start, vocab_size: as in `score`. The tail covers all ids outside the
            set, on all ranks, except the ids of the head's padding rows.
        temperature: the student's temperature, above 0, one number or [T]. The temperature has no gradient.
        chunk_rows: as in `score`.
        weight_grad, backend: as in `score`.

    Returns:
        The `DistillationLoss` of the T positions, on the inputs' device.

    Raises:
        InvalidInputError: shapes, dtypes, or lengths do not match; the sets have no log-probs; or a KL is not
            finite. The message names the argument or the position.
        InvalidCandidateSetsError: a candidate id is outside the vocabulary; a candidate id is held by no rank
            or by several ranks; or the probabilities of a set sum to more than 1.002. A sum from 1 to 1.002
            may come from rounding, and raises no error.
    """
    if direction not in ("forward", "reverse"):
        raise InvalidInputError(f"direction: got {direction!r}, expected 'forward' or 'reverse'")
    if outside not in ("tail", "renormalized"):
        raise InvalidInputError(f"outside: got {outside!r}, expected 'tail' or 'renormalized'")
    has_tail, device, num_positions = outside == "tail", hidden.device, len(hidden)
    transform = LogitTransform(temperature, softcap, logit_scale)
    shard = Shard.of(len(weight), vocab_start, vocab_size, tp_group)
    policy, tensors = head_policy(
        hidden, weight, bias, None, transform, shard, chunk_rows, weight_grad, backend
    )
    if len(teacher_sets) != num_positions:
        raise InvalidInputError(
            f"teacher_sets: got {len(teacher_sets)} positions for {num_positions} hidden states; position t"
            " belongs to the state that predicts its token"
        )
    policy = replace(policy, transform=transform.on(device, num_positions, may_wait=True))
    counts = teacher_sets.sizes > 0
    if loss_mask is not None:
        counts &= as_bool_mask(loss_mask, num_positions)
    sets, log_teacher, log_tail = _teacher(
        teacher_sets,
        counts,
        shard.count_ids(device) if has_tail else None,
        _SMALLEST_TAIL if direction == "reverse" else 0.0,
    )
    index, _ = CandidateIndex.of(
        sets,
        device,
        shard,
        dense=None if has_tail else DENSE_SHARES["head"],
        lists_all=True,
        reads="sets" if has_tail else "dense",
    )
    as_tensor = functools.partial(torch.tensor, dtype=policy.dtype, device=device)
    log_outside = None if log_tail is None else as_tensor(log_tail)
    other = Other(as_tensor(log_teacher), log_outside, is_first=direction == "forward")
    kl = evaluate(Work(policy, index, other=other), *tensors)[3]
    if (position := first_true(~kl.isfinite())) is not None:
        raise InvalidInputError(
            f"the KL at position {position} is {float(kl.detach()[position])}: this policy gives a candidate,"
            " or all that is outside of the set, no probability, or among its logits is a NaN or +inf"
        )
    return DistillationLoss(kl, torch.tensor(counts, device=device))


def _teacher(
    sets: CandidateSets, counts: NDArray[np.bool_], num_ids: int | None, smallest_tail: float
) -> tuple[CandidateSets, NDArray[np.float64], NDArray[np.float64] | None]:
    """Return the teacher's distribution at the positions where `counts` is True; other sets become empty.

    Args:
        sets: the teacher's sets, with log-probs over the whole vocabulary.
        counts: bool [T], True at the positions that enter the loss.
        num_ids: the size of the vocabulary, or None for a distribution without a tail.
        smallest_tail: the tail's probability is at least this, except at a set that is the whole vocabulary.

    Returns:
        The sets without tokens of zero probability, for an index; the log-probs [n] of their candidates; and
        the log-prob [T] of all other ids, 0 where a set is empty. The probabilities at a position sum to 1.

    Raises:
        InvalidInputError: the sets have no log-probs.
        InvalidCandidateSetsError: the probabilities of a set sum to more than 1.002 (1 + `MASS_ERROR`).
    """
    kept = np.repeat(counts, sets.sizes) & (sets.logprobs > LOWEST)
    sizes = np.bincount(rows_of(sets.offsets)[kept], minlength=len(sets))
    # The index does not read the sampled tokens, which may be among the candidates that are left out.
    sets = CandidateSets.unchecked(
        sets.token_ids[kept], sets.logprobs[kept], offsets_of(sizes), sets.sampled_ids
    )
    logprobs = sets.logprobs.astype(np.float64)
    log_mass = log_sum_exp(logprobs, sets.offsets)
    if (t := first_true_on_host(log_mass > np.log1p(MASS_ERROR))) is not None:
        raise InvalidCandidateSetsError(
            "teacher_sets",
            f"the probabilities at position {t} add up to {np.exp(log_mass[t]):.6g}, expected at most 1:"
            " log-probs over the whole vocabulary",
        )
    log_total, log_tail = log_mass, None
    if num_ids is not None:
        tail = np.where(sets.sizes == num_ids, 0.0, np.maximum(-np.expm1(log_mass), smallest_tail))
        with np.errstate(divide="ignore"):
            log_tail = np.log(tail)
        log_total = np.logaddexp(log_mass, log_tail)
        log_tail = np.where(sets.sizes == 0, 0.0, log_tail - log_total)
    return sets, logprobs - np.repeat(log_total, sets.sizes), log_tail
