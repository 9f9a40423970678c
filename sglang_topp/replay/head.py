"""The candidate-only head: a policy's scores over the support, straight from hidden states.

Under a sampling mask only the candidates' logits matter, a handful per position. So only those are
computed: the work falls from T * V * H to n * H, the memory from T * V to n. No tensor has a [T, V]
shape, in either direction, and positions without a choice are not touched at all.

Shape legend: T positions, H hidden size, V ids held by this rank, n candidates in all, A positions
with a choice, m entries (candidates of those positions that this rank holds).
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import gathered
from sglang_topp.replay.parallel import reduce_sum
from sglang_topp.replay.scores import (
    Scores,
    accumulation_dtype,
    adjust_logits,
    check_softcap,
    check_temperature,
    score_support,
)
from sglang_topp.replay.support import Shard, Support, check_targets
from sglang_topp.replay.weight_grad import GradientById, WeightGrad, check_weight_grad

__all__ = ["candidate_logprobs", "check_head", "support_logits"]

_CHUNK_BYTES = 1 << 23  # larger ones leave the cache; more of them are more barriers


@torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes follow the sets: nothing to compile
def candidate_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    candidates: CandidateSets,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    per_candidate: bool = False,
    kl_to: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    chunk_candidates: int | None = None,
    weight_grad: WeightGrad = "dense",
    backend: Literal["auto", "torch", "triton"] = "auto",
) -> Scores:
    """Score `targets` under the policy `softmax(head(hidden))` restricted to the candidate sets.

    ::

        raw_i = hidden[t] . weight[i] + bias[i]
        z_i = softcap * tanh(raw_i / softcap) / temperature[t]
        logprobs[t] = z_target - log(sum over i in C_t of exp(z_i))

    Differentiable, once, in `hidden`, `weight` and `bias`, through every value that is asked for.
    All sums run in float32 (float64 for float64 inputs) and in a fixed order: values and gradients
    repeat to the last bit. A position with one candidate scores exactly 0, its hidden state is not
    even read; an empty span scores 0. Neither has a gradient.

    Args:
        hidden: [T, H], float16, bfloat16, float32 or float64; the states that predict the targets
            (`layout.Rows.select` picks them).
        weight: [V, H], the rows of the LM head that this rank holds.
        targets: integers [T] on the same device; each is in its candidate set, and ignored where
            the set is empty.
        candidates: the sets of the T positions.
        bias: [V], or None.
        temperature: above 0, one number or [T]. Not differentiated.
        softcap: above 0, or None.
        entropy: also return the entropy over the support, differentiable.
        per_candidate: also return the log-prob of every candidate, differentiable.
        kl_to: [n], another policy's log-prob of every entry of the sets: `Scores.candidate_logprobs` of
            a reference model, or `candidates.logprobs` for the rollout itself. It is renormalised over
            each set, so log-probs over the vocabulary do as well. Also return KL(this policy || other),
            differentiable in this policy.
        tp_group: the ranks that share the vocabulary, or None. Every rank passes the same
            `hidden`, `targets` and sets, gets the same scores, and the whole gradient of `hidden`;
            it expects the same incoming gradient on every rank.
        vocab_start: the token id of `weight[0]`.
        vocab_size: the number of ids that exist, where the head is padded beyond them; larger ids in
            the sets are errors.
        chunk_candidates: rows gathered, or sums held, at a time, without Triton; by default as many as
            take 8 MiB.
        weight_grad: where the gradient of `weight` goes.

            - "dense": to autograd, [V, H].
            - "sparse": to autograd, a coalesced `torch.sparse_coo` tensor with the rows of the ids that
              occur, for `SGD` and `SparseAdam`; `weight` is a leaf. Where a dense `weight.grad` is
              there, autograd adds those rows to it, in place. Waits for the device once.
            - a buffer [V, H], float32 (float64 for float64) or of `weight`'s dtype: each backward adds
              the rows of the ids that occur, in place, each sum rounded once. Time and memory follow the
              candidates, whatever V is. Give `weight.grad` (make it zeros where it is None) or Megatron's
              `weight.main_grad`, anew in each call. Autograd sees no gradient of `weight` then, nor do
              hooks: they get None, or are not called. So it is right only where what reduces gradients
              reads this very buffer. torch's DistributedDataParallel reads `weight.grad`, which its own
              forward may exchange: take it inside the wrapped module's forward, or after it. Megatron's
              reads `weight.main_grad`, and finds `weight.grad_added_to_main_grad` set and, in
              `weight.grad`, zeros that take no memory. FSDP does neither: use "dense" there.
        backend: "torch" runs anywhere; "triton" gathers nothing and needs an NVIDIA GPU (or Triton's
            interpreter); "auto" takes Triton where it can.

    Returns:
        `Scores`, on the inputs' device.

    Raises:
        InvalidInputError: shapes, dtypes or lengths do not fit, a target is not in its set, or a score
            is NaN; the message names the argument or the position.
        InvalidCandidateSetsError: an id lies outside the vocabulary, or no shard (or more than one) holds it.
    """
    check_head(hidden, weight, bias, targets)
    check_softcap(softcap)
    temperature = check_temperature(temperature, len(targets))
    shard = Shard.of(len(weight), vocab_start, vocab_size, parallel=tp_group is not None)
    support = Support.of(candidates, targets, shard)
    logits = support_logits(
        hidden,
        weight,
        bias,
        support,
        temperature=temperature,
        softcap=softcap,
        tp_group=tp_group,
        chunk_candidates=chunk_candidates,
        weight_grad=weight_grad,
        backend=backend,
    )
    return score_support(
        logits,
        support,
        entropy=entropy,
        per_candidate=per_candidate,
        kl_to=kl_to,
        tp_group=tp_group,
    )


def support_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    support: Support,
    *,
    temperature: float | Tensor,
    softcap: float | None,
    tp_group: dist.ProcessGroup | None,
    chunk_candidates: int | None,
    weight_grad: WeightGrad,
    backend: str,
) -> Tensor:
    """[m]: the logits of the support's entries and of no other id, differentiable; `z` above.

    `temperature` and `softcap` are checked; the other arguments are those of `candidate_logprobs`.
    """
    dtype = accumulation_dtype(hidden=hidden, weight=weight)
    check_weight_grad(weight_grad, weight, hidden, dtype)
    ops, options = _implementation(backend, hidden, weight, dtype, chunk_candidates)
    logits = _ByPosition.apply(hidden, weight.detach(), support, tp_group, dtype, ops, options)
    logits = logits + GradientById.apply(
        weight, bias, hidden.detach(), support, dtype, weight_grad, ops, options
    )
    return adjust_logits(logits, support.positions, temperature, softcap)


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor | None = None) -> None:
    """Raise InvalidInputError unless shapes and devices fit each other, and targets are integers."""
    if targets is not None:
        check_targets(targets)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise InvalidInputError(
            f"hidden and weight: got shapes {tuple(hidden.shape)} and {tuple(weight.shape)},"
            " expected [T, H] and [V, H]"
        )
    if targets is not None and len(hidden) != len(targets):
        raise InvalidInputError(f"targets: got {len(targets)} for {len(hidden)} hidden states")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInputError(f"bias: got shape {tuple(bias.shape)}, expected [{len(weight)}]")
    for name, tensor in (("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise InvalidInputError(f"{name}: it is on {tensor.device}, and hidden is on {hidden.device}")


class _ByPosition(torch.autograd.Function):
    """[m] `hidden[position] . weight[id]` for the support's entries; the gradient of hidden starts here."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        support: Support,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        ops: ModuleType,
        options: dict[str, int],
    ) -> Tensor:
        ctx.support, ctx.group, ctx.ops, ctx.options = support, group, ops, options
        ctx.shape, ctx.dtype = hidden_TH.shape, hidden_TH.dtype
        ctx.save_for_backward(weight_VH)
        logits_m: Tensor = ops.gathered_dot(
            hidden_TH, support.positions, weight_VH, support.ids, out_dtype=dtype, **options
        )
        return logits_m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_m: Tensor) -> tuple[Tensor | None, ...]:
        (weight_VH,) = ctx.saved_tensors
        support: Support = ctx.support
        entries = weight_VH, support.ids, grad_m
        if ctx.group is None:
            grad_hidden = ctx.ops.gathered_sum(
                *entries, support.positions, ctx.shape[0], out_dtype=ctx.dtype, **ctx.options
            )
        else:
            # Only positions with a choice are sent, and the ranks' parts are summed before they are rounded.
            grad_AH = ctx.ops.gathered_sum(
                *entries, support.segment, len(support.rows), out_dtype=grad_m.dtype, **ctx.options
            )
            reduce_sum(grad_AH, ctx.group)
            grad_hidden = grad_m.new_zeros(ctx.shape, dtype=ctx.dtype)
            grad_hidden.index_copy_(0, support.rows, grad_AH.to(ctx.dtype))
        return grad_hidden, None, None, None, None, None, None


def _implementation(
    backend: str, hidden: Tensor, weight: Tensor, dtype: torch.dtype, chunk: int | None
) -> tuple[ModuleType, dict[str, int]]:
    """The module that holds the products, and what to pass on to them."""
    if chunk is not None and chunk < 1:
        raise InvalidInputError(f"chunk_candidates: got {chunk}, expected 1 or more")
    if backend not in ("auto", "torch", "triton"):
        raise InvalidInputError(f"backend: got {backend!r}, expected 'auto', 'torch' or 'triton'")
    # The kernels sum in float32; float64 is for checking.
    suits = hidden.is_cuda and dtype == torch.float32 and importlib.util.find_spec("triton") is not None
    if backend == "triton" or (backend == "auto" and suits):
        if dtype != torch.float32:
            raise InvalidInputError(f"backend: 'triton' sums in float32, and the inputs ask for {dtype}")
        from sglang_topp.replay import head_triton

        return head_triton, {}
    return gathered, {"chunk": chunk or max(1, _CHUNK_BYTES // max(1, weight.shape[1] * dtype.itemsize))}
