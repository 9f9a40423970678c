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

__all__ = ["candidate_logprobs", "check_head"]

_CHUNK_BYTES = 1 << 22  # two such copies stay in a core's share of the cache


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
        chunk_candidates: rows of the head gathered at a time, without Triton; by default as many as
            take 4 MiB.
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
    logits = _CandidateLogits.apply(hidden, weight, bias, support, tp_group, chunk_candidates, backend)
    return score_support(
        adjust_logits(logits, support.positions, temperature, softcap),
        support,
        entropy=entropy,
        per_candidate=per_candidate,
        kl_to=kl_to,
        tp_group=tp_group,
    )


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
    """Raise InvalidInputError unless shapes and devices fit each other, and targets are integers."""
    check_targets(targets)
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise InvalidInputError(
            f"hidden and weight: got shapes {tuple(hidden.shape)} and {tuple(weight.shape)},"
            " expected [T, H] and [V, H]"
        )
    if len(hidden) != len(targets):
        raise InvalidInputError(f"targets: got {len(targets)} for {len(hidden)} hidden states")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidInputError(f"bias: got shape {tuple(bias.shape)}, expected [{len(weight)}]")
    for name, tensor in (("weight", weight), ("targets", targets), ("bias", bias)):
        if tensor is not None and tensor.device != hidden.device:
            raise InvalidInputError(f"{name}: it is on {tensor.device}, and hidden is on {hidden.device}")


class _CandidateLogits(torch.autograd.Function):
    """[m] raw logits of the support's entries: `hidden[position] . weight[id] + bias[id]`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        support: Support,
        group: dist.ProcessGroup | None,
        chunk: int | None,
        backend: str,
    ) -> Tensor:
        dtype = accumulation_dtype(hidden=hidden_TH, weight=weight_VH)
        ops, options = _implementation(backend, hidden_TH, weight_VH, dtype, chunk)
        logits_m: Tensor = ops.gathered_dot(
            hidden_TH, support.positions, weight_VH, support.ids, out_dtype=dtype, **options
        )
        if bias_V is not None:
            logits_m += bias_V[support.ids]
        ctx.support, ctx.group, ctx.ops, ctx.options = support, group, ops, options
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        ctx.save_for_backward(hidden_TH, weight_VH)
        return logits_m

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_m: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH = ctx.saved_tensors
        support: Support = ctx.support
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0] and ctx.group is None:
            grad_hidden = ctx.ops.gathered_sum(
                weight_VH,
                support.ids,
                grad_m,
                support.positions,
                len(hidden_TH),
                out_dtype=hidden_TH.dtype,
                **ctx.options,
            )
        elif ctx.needs_input_grad[0]:
            # Only positions with a choice are sent, and the ranks' parts are summed before they are rounded.
            grad_AH = ctx.ops.gathered_sum(
                weight_VH,
                support.ids,
                grad_m,
                support.segment,
                len(support.rows),
                out_dtype=grad_m.dtype,
                **ctx.options,
            )
            reduce_sum(grad_AH, ctx.group)
            grad_hidden = torch.zeros_like(hidden_TH).index_copy_(
                0, support.rows, grad_AH.to(hidden_TH.dtype)
            )
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            # By id, so that each row of the gradient is one sum, written once and always in one order.
            ids, order = support.ids.sort(stable=True)
            by_id_m = grad_m[order]
            if ctx.needs_input_grad[1]:
                grad_weight = ctx.ops.gathered_sum(
                    hidden_TH,
                    support.positions[order],
                    by_id_m,
                    ids,
                    len(weight_VH),
                    out_dtype=weight_VH.dtype,
                    **ctx.options,
                )
            if ctx.needs_input_grad[2]:
                bounds = torch.searchsorted(ids, torch.arange(len(weight_VH) + 1, device=ids.device))
                grad_bias = torch.segment_reduce(by_id_m, "sum", offsets=bounds).to(ctx.bias_dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _implementation(
    backend: str, hidden: Tensor, weight: Tensor, dtype: torch.dtype, chunk: int | None
) -> tuple[ModuleType, dict[str, int]]:
    """The module that holds `gathered_dot` and `gathered_sum`, and what to pass on to them."""
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
    return gathered, {"chunk": chunk or max(1, _CHUNK_BYTES // (weight.shape[1] * dtype.itemsize))}
