"""The gradient of the LM head's weight: dense, sparse, or added to a buffer in place.

A dense gradient has shape [V, H], even if few ids occur in the candidate sets. If only the candidates' logits
are computed, the LM head spends nearly all of its time on the dense gradient. A sparse gradient has one row
per distinct candidate id. If the caller passes a buffer [V, H], the backward adds the gradient to the
buffer's rows at the candidate ids, and does not touch the buffer's other rows.

One autograd node computes the gradients of weight and bias, and another node computes the gradient of the
hidden states. Autograd runs only the nodes whose gradients are requested. A backward that requests only the
gradient of the hidden states therefore does not write to the caller's buffer.

Shape legend: V ids held by this rank, H hidden size, T positions, m candidates that this rank holds, U
distinct ids among the m candidates.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.vocab_shard_candidates import SupportIndex

__all__ = ["GradientById", "WeightGrad", "check_weight_grad"]

WeightGrad: TypeAlias = Literal["dense", "sparse"] | Tensor


def check_weight_grad(weight_grad: WeightGrad, weight: Tensor, hidden: Tensor, dtype: torch.dtype) -> None:
    """Raise InvalidInputError unless `weight_grad` is "dense", "sparse", or a valid buffer for the gradient.

    `dtype` is the dtype in which the backward sums the gradient.
    """
    if not isinstance(weight_grad, Tensor):
        if isinstance(weight_grad, str) and weight_grad in ("dense", "sparse"):
            return
        hint = "; where weight.grad is None, set it to zeros first" if weight_grad is None else ""
        raise InvalidInputError(
            f"weight_grad: got {weight_grad!r}, expected 'dense', 'sparse' or a buffer [V, H]{hint}"
        )
    if weight.requires_grad and not weight.is_leaf:
        raise InvalidInputError(
            "weight_grad: got a buffer for a weight that is computed from parameters, which would get no"
            " gradient; use 'dense', or pass the parameter itself"
        )
    if weight_grad.layout != torch.strided or weight_grad.shape != weight.shape:
        raise InvalidInputError(
            f"weight_grad: got shape {tuple(weight_grad.shape)} and layout {weight_grad.layout},"
            f" expected a dense {tuple(weight.shape)}, as weight"
        )
    if weight_grad.dtype not in (dtype, weight.dtype):
        raise InvalidInputError(
            f"weight_grad: got dtype {weight_grad.dtype}, expected {dtype} or weight's {weight.dtype}"
        )
    if weight_grad.device != weight.device:
        raise InvalidInputError(
            f"weight_grad: it is on {weight_grad.device}, and weight is on {weight.device}"
        )
    if weight_grad.requires_grad:
        raise InvalidInputError("weight_grad: it requires a gradient; give a buffer, not a parameter")
    if _overlaps_itself(weight_grad):
        raise InvalidInputError("weight_grad: its elements share memory; give a buffer of its own")
    for name, tensor in (("weight", weight), ("hidden", hidden)):
        if _share_memory(weight_grad, tensor):
            raise InvalidInputError(f"weight_grad: it shares {name}'s memory, which it would overwrite")
    if weight_grad.is_inference():
        raise InvalidInputError("weight_grad: it was made in inference mode, so backward cannot write to it")
    if _is_main_grad(weight_grad, weight) and getattr(weight, "overwrite_main_grad", False):
        raise InvalidInputError(
            "weight_grad: weight.overwrite_main_grad is set, so main_grad holds no sum to add to;"
            " use 'dense' with Megatron-FSDP"
        )


class GradientById(torch.autograd.Function):
    """The autograd node that computes the gradients of the LM head's weight and bias.

    The forward returns the bias of each candidate, [m], or zeros without a bias. `candidate_head` adds the
    result to the candidates' dot products. The sums are the LM head's raw output, before scale, soft cap, and
    temperature. The backward therefore receives the gradient of the raw output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        hidden_TH: Tensor,
        support: SupportIndex,
        dtype: torch.dtype,
        weight_grad: WeightGrad,
        ops: Any,
        options: dict[str, int],
    ) -> Tensor:
        ctx.support, ctx.ops, ctx.options = support, ops, options
        ctx.weight_grad, ctx.shape, ctx.dtype = weight_grad, weight_VH.shape, weight_VH.dtype
        # The backward uses `weight.grad`, `weight.main_grad`, and `weight.grad_added_to_main_grad`, but only
        # if `weight` is a leaf tensor. Keep no reference to a `weight` that is not a leaf tensor.
        ctx.leaf = weight_VH if weight_VH.is_leaf else None
        ctx.is_grad = _is_its_grad(weight_grad, ctx.leaf)
        ctx.bias_dtype = None if bias_V is None else bias_V.dtype
        ctx.save_for_backward(hidden_TH)
        if bias_V is None:
            return torch.zeros(len(support.ids), dtype=dtype, device=hidden_TH.device)
        return bias_V.index_select(0, support.ids).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_m: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_TH,) = ctx.saved_tensors
        grad_weight = grad_bias = None
        # Sort the candidates by token id. Each row of the weight's gradient is then summed in a fixed order,
        # and the row is written once.
        ids, order, positions = ctx.support.by_id
        by_id_m = grad_m.index_select(0, order)
        if ctx.needs_input_grad[0]:
            entries = hidden_TH, positions, by_id_m
            if isinstance(ctx.weight_grad, Tensor):
                _check_still_there(ctx)
                ctx.ops.gathered_add(ctx.weight_grad, *entries, ids, **ctx.options)
                grad_weight = _for_megatron(ctx)
            elif ctx.weight_grad == "sparse":
                present, places = torch.unique_consecutive(ids, return_inverse=True)
                rows_UH = ctx.ops.gathered_sum(
                    *entries, places, len(present), out_dtype=ctx.dtype, **ctx.options
                )
                grad_weight = _coo(present, rows_UH, ctx.shape)
            else:
                grad_weight = ctx.ops.gathered_sum(
                    *entries, ids, ctx.shape[0], out_dtype=ctx.dtype, **ctx.options
                )
        if ctx.needs_input_grad[1]:
            bounds = torch.searchsorted(ids, torch.arange(ctx.shape[0] + 1, device=ids.device))
            grad_bias = torch.segment_reduce(by_id_m, "sum", offsets=bounds).to(ctx.bias_dtype)
        return grad_weight, grad_bias, None, None, None, None, None, None


def _check_still_there(ctx: Any) -> None:
    if ctx.is_grad and not _is_its_grad(ctx.weight_grad, ctx.leaf):
        raise InvalidInputError(
            "weight_grad: it was weight.grad when the scores were made, and is not any more; the gradient"
            " would be lost. Call zero_grad before, or with set_to_none=False"
        )


def _is_its_grad(buffer: WeightGrad, leaf: Tensor | None) -> bool:
    """Return whether `buffer` is `leaf.grad`, or shares memory with `leaf.grad`."""
    grad = None if leaf is None else leaf.grad
    if grad is None or grad.layout != torch.strided or not isinstance(buffer, Tensor):
        return False
    return buffer is grad or _share_memory(buffer, grad)


def _share_memory(left: Tensor, right: Tensor) -> bool:
    """Return whether the address ranges of two tensors overlap."""
    (start, stop), (other_start, other_stop) = _stretch(left), _stretch(right)
    return max(start, other_start) < min(stop, other_stop)


def _stretch(tensor: Tensor) -> tuple[int, int]:
    if tensor.numel() == 0 or tensor.data_ptr() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _overlaps_itself(matrix: Tensor) -> bool:
    """Return whether the strides allow two elements of the matrix to share memory."""
    (rows, columns), (row_stride, column_stride) = matrix.shape, matrix.stride()
    if rows <= 1 or columns <= 1:
        return (rows > 1 and row_stride == 0) or (columns > 1 and column_stride == 0)
    by_rows = column_stride > 0 and row_stride >= column_stride * columns
    by_columns = row_stride > 0 and column_stride >= row_stride * rows
    return not (by_rows or by_columns)


def _for_megatron(ctx: Any) -> Tensor | None:
    """Return the weight's gradient for autograd: zeros for Megatron, else None.

    For Megatron, `weight.main_grad` already contains the actual gradient. Megatron's data parallelism
    requires that `weight.grad` exists. The flag `weight.grad_added_to_main_grad` tells Megatron not to add
    `weight.grad` to `weight.main_grad`. The zero gradient is a sparse tensor without rows, which takes no
    memory.
    """
    weight = ctx.leaf
    if not (hasattr(weight, "grad_added_to_main_grad") and _is_main_grad(ctx.weight_grad, weight)):
        return None
    weight.grad_added_to_main_grad = True
    no_id = torch.empty(0, dtype=torch.int64, device=weight.device)
    return _coo(no_id, weight.new_empty((0, *ctx.shape[1:])), ctx.shape)


def _coo(ids_U: Tensor, rows_UH: Tensor, shape: torch.Size) -> Tensor:
    """Return a coalesced sparse tensor with the rows `rows_UH` at the ids `ids_U`, which must ascend."""
    return torch.sparse_coo_tensor(ids_U[None], rows_UH, shape, is_coalesced=True, check_invariants=False)


def _is_main_grad(buffer: Tensor, weight: Tensor) -> bool:
    main_grad = getattr(weight, "main_grad", None)
    return isinstance(main_grad, Tensor) and main_grad.data_ptr() == buffer.data_ptr()
