"""Score over candidate sets from hidden states and the LM head, without computing all logits.

A score over a candidate set depends only on the logits of the candidates. Computing only these logits reduces
the work from T * V * H to n * H, and the memory from T * V to n. Neither the forward nor the backward pass
builds a [T, V] tensor. A position with fewer than two candidates always scores 0, so the functions do not
read the hidden state of that position.

Shape legend: T positions, H hidden size, V ids held by this rank, n candidates at all positions together.
The letter A stands for the number of positions with two or more candidates, and m for the number of
candidates that this rank holds at these positions.
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
from sglang_topp.candidates.torch_tensors import CandidateTensors
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import gathered_products
from sglang_topp.replay.lm_head_weight_grad import GradientById, WeightGrad, check_weight_grad
from sglang_topp.replay.logit_scaling import LogitTransform
from sglang_topp.replay.scores_from_candidate_logits import Scores, accumulation_dtype, score_support
from sglang_topp.replay.vocab_shard_candidates import (
    Shard,
    SupportIndex,
    TargetMatch,
    check_num_sets,
    check_targets,
    refuse_dtensors,
)
from sglang_topp.replay.vocab_shard_reductions import reduce_sum

__all__ = ["candidate_logprobs", "check_head", "support_logits"]

_CHUNK_BYTES = 1 << 23  # larger chunks exceed a CPU's cache; smaller chunks need more thread barriers


# Do not compile this function, because shapes vary between calls. The decorator has no type annotations.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def candidate_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    candidates: CandidateSets | CandidateTensors,
    *,
    bias: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
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
    """Score `targets` under the policy `softmax(head(hidden))` restricted to the candidate sets `C_t`.

    ::

        raw_i = logit_scale * (hidden[t] . weight[i] + bias[i])
        z_i = softcap * tanh(raw_i / softcap) / temperature[t]
        logprobs[t] = z_target - log(sum over i in C_t of exp(z_i))

    Every returned value is differentiable once, in `hidden`, `weight`, and `bias`. Sums run in float32
    (float64 for float64 inputs) in a fixed order, so values and gradients are bitwise reproducible. A
    position with one candidate or an empty set scores exactly 0 and has no gradient. The call does not read
    the hidden states of positions with fewer than two candidates.

    Args:
        hidden: [T, H], float16, bfloat16, float32, or float64, the hidden states that predict the targets.
            `RowSelection.select` selects these hidden states.
        weight: [V, H], the rows of the LM head that this rank holds.
        targets: integers [T] on the device of `hidden`. Each target must be in its candidate set. The target
            of a position with an empty set is ignored.
        candidates: the sets of the T positions. To score over the same sets again (policy, reference, PPO
            epochs), call `tensors = sets.to_torch(device)` once, and pass `tensors` in each call. The first
            call with `tensors` checks the sets, and stores an index of the candidates in `tensors`. On a GPU,
            later calls with the same `tensors`, and their backward passes, do not wait for the device. A call
            that does not wait for the device raises no error for an invalid value, but returns NaN scores at
            the position of that value. To get an error message instead of NaN scores, pass `sets` instead of
            `tensors`. Backend "torch" and `weight_grad="sparse"` always wait for the device.
        bias: [V], the LM head's bias, or None.
        temperature: above 0, one number or [T]. The temperature has no gradient.
        softcap: the soft cap of the logits, above 0, or None.
        logit_scale: a positive factor for the logits. Pass Cohere's `logit_scale`, Falcon-H1's
            `lm_head_multiplier`, or the inverse of Granite's `logits_scaling`.
        entropy: also return the entropy over each candidate set.
        per_candidate: also return the log-prob of every candidate.
        kl_to: [n], another policy's log-probs of all candidates. If given, also return
            KL(this policy || other policy). The other policy gets no gradient. For the KL to a reference
            model, pass the model's `Scores.candidate_logprobs`. For the KL to the policy that generated the
            rollouts, pass the sets' `logprobs` as a tensor on the device of `hidden`. The call renormalizes
            the log-probs over each set, so log-probs over the whole vocabulary are valid too.
        tp_group: the ranks that share the vocabulary, or None. Every rank passes the same `hidden`,
            `targets`, and sets. Every rank gets the same scores and the whole gradient of `hidden`. The
            incoming gradient must be the same on every rank.
        vocab_start: the token id of `weight[0]`.
        vocab_size: the number of token ids without padding, if the head has padding rows. A candidate id of
            `vocab_size` or more is an error.
        chunk_candidates: the number of rows of `hidden` or `weight` that backend "torch" copies or sums at a
            time. By default, these rows take at most 8 MiB. Backend "triton" ignores `chunk_candidates`.
        weight_grad: the destination of the gradient of `weight`.

            - "dense": autograd receives a dense gradient [V, H].
            - "sparse": autograd receives a coalesced `torch.sparse_coo` tensor with one row per distinct
              candidate id. The optimizers `SGD` and `SparseAdam` accept this tensor. `weight` must be a leaf
              tensor. If `weight.grad` is dense, autograd adds the sparse rows to `weight.grad` in place. The
              backward pass waits for the device once.
            - a buffer [V, H]: each backward pass adds one gradient row per distinct candidate id to the
              buffer, in place. The buffer has the dtype of `weight`, or float32 (float64 for float64 inputs).
              The backward pass rounds each updated row of the buffer once. With a buffer, the time and the
              additional memory for the gradient of `weight` depend on the number of candidates, not on V. In
              each call, pass the current `weight.grad` or Megatron's `weight.main_grad`. If `weight.grad` is
              None, set `weight.grad` to zeros first. If the buffer is `weight.grad`, autograd gets None as
              the gradient of `weight`. Each gradient hook on `weight` then either gets None, or is not
              called. Pass a buffer only if the code that reduces gradients over ranks reads the same buffer.
              torch's DistributedDataParallel reads `weight.grad`. The forward pass of DistributedDataParallel
              may replace the tensor `weight.grad` with another tensor. Do not pass a tensor that you got from
              `weight.grad` before that forward pass. Megatron's DistributedDataParallel reads
              `weight.main_grad`. For Megatron, the backward pass sets `weight.grad_added_to_main_grad`, and
              gives autograd a zero gradient that takes no memory. FSDP reads neither `weight.grad` nor
              `weight.main_grad`, so use "dense" with FSDP.

        backend: "torch" runs anywhere. "triton" reads the candidates' LM-head rows without copying the rows,
            and needs an NVIDIA GPU or Triton's interpreter. "auto" uses Triton if possible.

    Returns:
        The `Scores` of the T targets, on the inputs' device.

    Raises:
        InvalidInputError: shapes, dtypes, or lengths do not match, a target is not in its set, or a score is
            NaN. The message names the argument or the position.
        InvalidCandidateSetsError: a candidate id is outside the vocabulary, or is not on exactly one rank.
    """
    check_head(hidden, weight, bias, targets)
    check_num_sets(candidates, targets)
    shard = Shard.of(len(weight), vocab_start, vocab_size, parallel=tp_group is not None)
    support, may_wait = SupportIndex.of(candidates, hidden.device, shard)
    match = TargetMatch.of(support, targets, may_wait=may_wait)
    transform = LogitTransform.of(
        temperature, len(targets), softcap=softcap, logit_scale=logit_scale, may_wait=may_wait
    )
    logits = support_logits(
        hidden,
        weight,
        bias,
        support,
        transform=transform,
        tp_group=tp_group,
        chunk_candidates=chunk_candidates,
        weight_grad=weight_grad,
        backend=backend,
    )
    return score_support(
        logits,
        support,
        match,
        entropy=entropy,
        per_candidate=per_candidate,
        kl_to=kl_to,
        tp_group=tp_group,
    )


def support_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    support: SupportIndex,
    *,
    transform: LogitTransform,
    tp_group: dist.ProcessGroup | None,
    chunk_candidates: int | None,
    weight_grad: WeightGrad,
    backend: str,
) -> Tensor:
    """Return the differentiable logits [m] of the candidates that this rank holds.

    `support` lists these candidates, and `transform` converts the LM head's raw output to logits. The
    docstring of `candidate_logprobs` defines the logits `z` and the other arguments.
    """
    dtype = accumulation_dtype(hidden=hidden, weight=weight)
    check_weight_grad(weight_grad, weight, hidden, dtype)
    ops, options = _implementation(backend, hidden, weight, dtype, chunk_candidates)
    logits = _ByPosition.apply(hidden, weight.detach(), support, tp_group, dtype, ops, options)
    logits = logits + GradientById.apply(
        weight, bias, hidden.detach(), support, dtype, weight_grad, ops, options
    )
    return transform.of_entries(logits, support.positions)


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor | None = None) -> None:
    """Raise InvalidInputError unless all shapes and devices match, and the targets are integers."""
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
    refuse_dtensors(hidden=hidden, weight=weight, bias=bias)
    for name, tensor in (("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise InvalidInputError(f"{name}: it is on {tensor.device}, and hidden is on {hidden.device}")


class _ByPosition(torch.autograd.Function):
    """Dot products of `hidden[position]` and `weight[id]` for this rank's candidates, [m].

    The backward pass computes the gradient of `hidden` only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        support: SupportIndex,
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
        support: SupportIndex = ctx.support
        entries = weight_VH, support.ids, grad_m
        if ctx.group is None:
            grad_hidden = ctx.ops.gathered_sum(
                *entries, support.positions, ctx.shape[0], out_dtype=ctx.dtype, **ctx.options
            )
        else:
            # Only the A positions with two or more candidates have gradients, so sum the gradients of only
            # these positions over the ranks. Round the gradients after this sum, not before.
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
    """Return the module `gathered_products` or `gathered_products_triton`, and options for its functions."""
    if chunk is not None and chunk < 1:
        raise InvalidInputError(f"chunk_candidates: got {chunk}, expected 1 or more")
    if backend not in ("auto", "torch", "triton"):
        raise InvalidInputError(f"backend: got {backend!r}, expected 'auto', 'torch' or 'triton'")
    # The Triton kernels compute sums in float32 only. With "auto", float64 inputs therefore use plain torch.
    # Only tests pass float64 inputs.
    suits = hidden.is_cuda and dtype == torch.float32 and importlib.util.find_spec("triton") is not None
    if backend == "triton" or (backend == "auto" and suits):
        if dtype != torch.float32:
            raise InvalidInputError(f"backend: 'triton' sums in float32, and the inputs ask for {dtype}")

        from sglang_topp.replay import gathered_products_triton

        return gathered_products_triton, {}
    return gathered_products, {
        "chunk": chunk or max(1, _CHUNK_BYTES // max(1, weight.shape[1] * dtype.itemsize))
    }
