"""Distillation: the KL between a student and what a teacher's candidate sets say of the teacher.

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
from sglang_topp.replay.divergence import divergence
from sglang_topp.replay.head import check_head, support_logits
from sglang_topp.replay.layout import counted
from sglang_topp.replay.parallel import reduce_sum
from sglang_topp.replay.scores import accumulation_dtype, check_softcap, check_temperature
from sglang_topp.replay.support import Shard, Support
from sglang_topp.replay.tail import support_and_tail
from sglang_topp.replay.teacher import SMALLEST_TAIL, Teacher
from sglang_topp.replay.weight_grad import WeightGrad

__all__ = ["DistillationLoss", "distillation_loss"]


@dataclass(frozen=True)
class DistillationLoss:
    """The KL at each of T positions; float32, or float64 where the student is."""

    kl: Tensor
    """[T], in nats, at least 0; exactly 0 where a position does not count."""
    counted: Tensor
    """bool [T]: the positions that count, those with a candidate set whose loss mask is not 0."""

    def mean(self) -> Tensor:
        """The mean over the positions that count; 0 where none does.

        A mean of means is not the mean: over micro-batches or ranks add up `kl.sum()` and `counted.sum()`.
        """
        return self.kl.sum() / self.counted.sum().clamp(min=1)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes follow the sets: nothing to compile
def distillation_loss(
    hidden: Tensor,
    weight: Tensor,
    teacher_sets: CandidateSets,
    *,
    direction: Literal["forward", "reverse"],
    outside: Literal["tail", "renormalised"],
    loss_mask: ArrayLike | None = None,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
    weight_grad: WeightGrad = "dense",
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> DistillationLoss:
    """The KL between a student and a teacher of whom the candidate sets `C_t` are known.

    With `p = softmax(head(hidden[t]))` the student and `q` the teacher, both over the whole vocabulary::

        outside="tail"          outcomes: the candidates, and one more, which is any other id
                                p_tail = 1 - sum over C_t of p_i,   q_tail = 1 - sum over C_t of q_i
        outside="renormalised"  outcomes: the candidates
                                p_i / sum over C_t of p_j,   q_i / sum over C_t of q_j

        direction="forward"     kl[t] = KL(q || p) = sum over outcomes of q_o (log q_o - log p_o)
        direction="reverse"     kl[t] = KL(p || q) = sum over outcomes of p_o (log p_o - log q_o)

    "tail" sees how much probability the student has outside of the set. It merges what is there, in both
    distributions alike: it is never above the KL over the whole vocabulary, and equal to it where the
    sets are the vocabulary. (verl's issue 7856 asks for it in place of a sum over the teacher's top-k
    alone, which is no KL and falls below 0.) "renormalised" says nothing of what is outside: a student
    may have all its probability there at no cost, and no other id has a gradient; so it takes a
    fraction of the time and the memory. (verl's issue 6676 renormalises, over the student's top-k.)

    Differentiable, once, in `hidden`, `weight` and `bias`. The student's tail is summed over the ids
    outside, and is not `1 - mass`: one of 1e-30 is as exact as one of 0.5. The teacher's follows from
    float32 log-probs, so it is known to about 1e-6 (at worst 1e-3 with `logprob_bits=16`), and a set
    that keeps 1 or, rounded, more has none. In reverse, one below 1e-6 counts as 1e-6 unless no id is
    outside: no student has a finite KL to a teacher that rules out the rest.

    Memory beyond the gradients is that of `head_logprobs` for "tail", a buffer of `chunk_rows` x V, and
    that of `candidate_logprobs` for "renormalised". Positions that do not count are not even read.

    Args:
        hidden: [T, H], float16, bfloat16, float32 or float64; the student's states that predict the T
            tokens whose sets these are: the state at `s` predicts token `s + 1`.
        weight: [V, H], the rows of the LM head that this rank holds.
        teacher_sets: the teacher's sets of the T positions with log-probs over the whole vocabulary, at
            whatever temperature it scored with. A sampled token of zero probability counts as outside.
            A position with an empty set does not count.
        direction, outside: as above.
        loss_mask: [T]; positions where it is 0 do not count.
        bias, softcap, tp_group, vocab_start, vocab_size: those of `candidate_logprobs`. The tail is of
            the ids that the ranks hold and that exist.
        temperature: of the student; above 0, one number or [T]. Not differentiated.
        chunk_rows: that of `head_logprobs`, for "tail".
        weight_grad, backend: those of `candidate_logprobs`, for "renormalised". With a tail every id has
            a gradient, and "dense" is all there is.

    Returns:
        `DistillationLoss`, on the inputs' device.

    Raises:
        InvalidInputError: shapes, dtypes or lengths do not fit, the sets have no log-probs, or a KL is not
            finite; the message names the argument or the position.
        InvalidCandidateSetsError: an id lies outside the vocabulary, no shard (or more than one) holds
            it, or the probabilities of a set add up to more than 1.
    """
    check_head(hidden, weight, bias)
    check_softcap(softcap)
    _check_names(direction, outside)
    num_positions = len(hidden)
    if len(teacher_sets) != num_positions:
        raise InvalidInputError(
            f"teacher_sets: got {len(teacher_sets)} positions for {num_positions} hidden states; position t"
            " belongs to the state that predicts its token"
        )
    temperature = check_temperature(temperature, num_positions)
    counts = teacher_sets.sizes > 0
    if loss_mask is not None:
        counts &= counted(loss_mask, num_positions)
    has_tail, reverse = outside == "tail", direction == "reverse"
    if has_tail and not (isinstance(weight_grad, str) and weight_grad == "dense"):
        got = "a buffer" if isinstance(weight_grad, Tensor) else repr(weight_grad)
        raise InvalidInputError(
            f"weight_grad: got {got}, expected 'dense': with outside='tail' every id has a gradient"
        )

    dtype = accumulation_dtype(hidden=hidden, weight=weight)
    shard = Shard.of(len(weight), vocab_start, vocab_size, parallel=tp_group is not None)
    teacher = Teacher.of(
        teacher_sets,
        counts,
        num_ids=_num_ids(shard, hidden.device, tp_group) if has_tail else None,
        smallest_tail=SMALLEST_TAIL if reverse else 0.0,
    )
    targets = torch.tensor(teacher.sets.sampled_ids, device=hidden.device)
    support = Support.of(teacher.sets, targets, shard, smallest=1 if has_tail else 2)
    other = torch.tensor(teacher.logprobs, dtype=dtype, device=hidden.device)[support.entries]
    tail = other_tail = None
    if teacher.tail is not None:
        if len(support.rows) < num_positions:
            hidden = hidden.index_select(0, support.rows)
            if isinstance(temperature, Tensor):
                temperature = temperature.to(hidden.device).index_select(0, support.rows)
        logits, tail = support_and_tail(
            hidden,
            weight,
            bias,
            support,
            temperature=temperature,
            softcap=softcap,
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
            temperature=temperature,
            softcap=softcap,
            tp_group=tp_group,
            chunk_candidates=None,
            weight_grad=weight_grad,
            backend=backend,
        )
    kl = divergence(logits, tail, support, other, other_tail, reverse=reverse, tp_group=tp_group)
    return DistillationLoss(kl, torch.tensor(counts, device=kl.device))


def _num_ids(shard: Shard, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """The ids that exist, on all ranks."""
    if group is None:
        return shard.real
    return int(reduce_sum(torch.tensor([shard.real], device=device), group))


def _check_names(direction: str, outside: str) -> None:
    for name, got, known in (
        ("direction", direction, ("forward", "reverse")),
        ("outside", outside, ("tail", "renormalised")),
    ):
        if got not in known:
            raise InvalidInputError(f"{name}: got {got!r}, expected {known[0]!r} or {known[1]!r}")
