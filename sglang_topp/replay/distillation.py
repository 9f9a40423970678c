"""Distillation loss: the KL between a student and a teacher, computed over the teacher's candidate sets.

Shape legend: T positions, H hidden size, V ids held by this rank, n candidates in all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_head import check_head, support_logits
from sglang_topp.replay.kl_divergence import divergence
from sglang_topp.replay.lm_head_weight_grad import WeightGrad
from sglang_topp.replay.logit_scaling import LogitTransform
from sglang_topp.replay.row_selection import as_bool_mask
from sglang_topp.replay.scores_from_candidate_logits import accumulation_dtype
from sglang_topp.replay.tail_logsumexp import support_and_tail
from sglang_topp.replay.teacher_distribution import SMALLEST_TAIL, TeacherDistribution
from sglang_topp.replay.vocab_shard_candidates import Shard, SupportIndex
from sglang_topp.replay.vocab_shard_reductions import reduce_sum

__all__ = ["DistillationLoss", "distillation_loss"]


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

    Mode "tail" needs memory for the gradients and for a buffer of `chunk_rows` x V, as `head_logprobs` does.
    Mode "renormalized" needs as much memory as `candidate_logprobs`. The call does not read the hidden states
    of positions with an empty set or a loss mask of 0.

    Args:
        hidden: [T, H], float16, bfloat16, float32, or float64, the student's hidden states that predict the
            tokens of the T positions. The state at position `s` of a sequence predicts the token at `s + 1`.
        weight: [V, H], the rows of the LM head that this rank holds.
        teacher_sets: the teacher's candidate sets at the T positions. Their log-probs are normalized over the
            whole vocabulary, not over the set. The teacher may have any temperature. The loss treats a
            sampled token of zero probability as outside the set, and ignores positions with an empty set.
        direction, outside: the direction of the KL, and the mode for ids outside the set, as defined above.
        loss_mask: [T]. The loss ignores positions with a mask of 0.
        bias, softcap, logit_scale: as in `candidate_logprobs`.
        tp_group, vocab_start, vocab_size: as in `candidate_logprobs`. The tail covers all ids outside the
            set, on all ranks, except the ids of the head's padding rows.
        temperature: the student's temperature, above 0, one number or [T]. The temperature has no gradient.
        chunk_rows: as in `head_logprobs`. Mode "renormalized" ignores `chunk_rows`.
        weight_grad, backend: as in `candidate_logprobs`. Mode "tail" ignores `backend`. Mode "tail"
            requires `weight_grad="dense"`, because every id has a gradient.

    Returns:
        The `DistillationLoss` of the T positions, on the inputs' device.

    Raises:
        InvalidInputError: shapes, dtypes, or lengths do not match; the sets have no log-probs; or a KL is not
            finite. The message names the argument or the position.
        InvalidCandidateSetsError: a candidate id is outside the vocabulary; a candidate id is held by no rank
            or by several ranks; or the probabilities of a set sum to more than 1.002. A sum from 1 to 1.002
            may come from rounding, and raises no error.
    """
    check_head(hidden, weight, bias)
    _check_names(direction, outside)
    num_positions = len(hidden)
    if len(teacher_sets) != num_positions:
        raise InvalidInputError(
            f"teacher_sets: got {len(teacher_sets)} positions for {num_positions} hidden states; position t"
            " belongs to the state that predicts its token"
        )
    transform = LogitTransform.of(temperature, num_positions, softcap=softcap, logit_scale=logit_scale)
    counts = teacher_sets.sizes > 0
    if loss_mask is not None:
        counts &= as_bool_mask(loss_mask, num_positions)
    has_tail, reverse = outside == "tail", direction == "reverse"
    if has_tail and not (isinstance(weight_grad, str) and weight_grad == "dense"):
        got = "a buffer" if isinstance(weight_grad, Tensor) else repr(weight_grad)
        raise InvalidInputError(
            f"weight_grad: got {got}, expected 'dense': with outside='tail' every id has a gradient"
        )

    dtype = accumulation_dtype(hidden=hidden, weight=weight)
    shard = Shard.of(len(weight), vocab_start, vocab_size, parallel=tp_group is not None)
    teacher = TeacherDistribution.of(
        teacher_sets,
        counts,
        num_ids=_num_ids(shard, hidden.device, tp_group) if has_tail else None,
        smallest_tail=SMALLEST_TAIL if reverse else 0.0,
    )
    support, _ = SupportIndex.of(teacher.sets, hidden.device, shard, smallest=1 if has_tail else 2)
    other = torch.tensor(teacher.logprobs, dtype=dtype, device=hidden.device)[support.entries]
    tail = other_tail = None
    if teacher.tail is not None:
        if len(support.rows) < num_positions:
            hidden = hidden.index_select(0, support.rows)
            transform = transform.take(support.rows)
        logits, tail = support_and_tail(
            hidden,
            weight,
            bias,
            support,
            transform=transform,
            shard=shard,
            tp_group=tp_group,
            chunk_rows=chunk_rows,
        )
        other_tail = torch.tensor(teacher.tail, dtype=dtype, device=hidden.device)[support.rows]
    else:
        logits = support_logits(
            hidden,
            weight,
            bias,
            support,
            transform=transform,
            tp_group=tp_group,
            chunk_candidates=None,
            weight_grad=weight_grad,
            backend=backend,
        )
    kl = divergence(logits, tail, support, other, other_tail, reverse=reverse, tp_group=tp_group)
    return DistillationLoss(kl, torch.tensor(counts, device=kl.device))


def _num_ids(shard: Shard, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Return the vocabulary size without padding, by adding up the number of ids that each rank holds."""
    if group is None:
        return shard.num_ids
    return int(reduce_sum(torch.tensor([shard.num_ids], device=device), group))


def _check_names(direction: str, outside: str) -> None:
    for name, got, known in (
        ("direction", direction, ("forward", "reverse")),
        ("outside", outside, ("tail", "renormalized")),
    ):
        if got not in known:
            raise InvalidInputError(f"{name}: got {got!r}, expected {known[0]!r} or {known[1]!r}")
