"""The gradient of the LM head's weight: dense, sparse, or added to a buffer in place.

A dense gradient has shape [V, H], even if few ids occur in the candidate sets. If only the candidates' logits
are computed, the LM head spends nearly all of its time on the dense gradient. A sparse gradient has one row
per distinct candidate id. If the caller passes a buffer [V, H], the backward adds the gradient to the
buffer's rows at the candidate ids, and does not touch the buffer's other rows.

Shape legend: V ids held by this rank, H hidden size, T positions, m candidates, U distinct ids.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import CandidateIndex, Entries

__all__ = ["WeightGrad", "WeightGradSink"]

WeightGrad: TypeAlias = Literal["dense", "sparse"] | Tensor


class WeightGradSink:
    """Takes the weight's gradient in parts, and delivers their sum.

    Autograd asks a node for all gradients or for none, but a buffer must stay as it is if a backward asks
    only for the gradient of the hidden states. So the node of the logits computes the parts, and a second
    node, which autograd runs only if it wants the gradient of the weight, delivers them.
    """

    def __init__(
        self,
        weight_grad: WeightGrad,
        weight: Tensor,
        hidden: Tensor,
        dtype: torch.dtype,
        ops: ModuleType,
        index: CandidateIndex | None,
    ) -> None:
        """Check `weight_grad`. `dtype` is that of the sums, and `ops` sums rows over segments."""
        _check(weight_grad, weight, hidden, dtype)
        self._where, self._ops, self._index = weight_grad, ops, index
        self._shape, self._dtype = weight.shape, weight.dtype
        # The backward uses `weight.grad`, `weight.main_grad`, and `weight.grad_added_to_main_grad`, but only
        # if `weight` is a leaf tensor. Keep no reference to a `weight` that is not a leaf tensor.
        self._leaf = weight if weight.is_leaf else None
        self._is_grad = _is_its_grad(weight_grad, self._leaf)
        self._parts: tuple[Tensor, tuple[Entries, Tensor] | None, Tensor | None] | None = None

    def attach(self, weight: Tensor) -> Tensor:
        """Return the weight, such that its gradient goes through this object."""
        attached: Tensor = _Deliver.apply(weight, self)
        return attached

    def hand_over(
        self, hidden: Tensor, gathered: tuple[Entries, Tensor] | None, total: Tensor | None
    ) -> Tensor:
        """Take a backward's parts, and return a gradient without memory that runs the delivery.

        Args:
            hidden: [T, H].
            gathered: candidates, and the gradient [m] of their raw outputs in `Entries.order`, or None.
            total: [V, H], the rest of the gradient, or None. It may be overwritten.
        """
        self._parts = hidden, gathered, total
        return torch.zeros((), dtype=self._dtype, device=hidden.device).expand(self._shape)

    def deliver(self) -> Tensor | None:
        """Return the gradient for autograd, in the dtype of the weight, or None if it is in the buffer."""
        assert self._parts is not None
        (hidden, gathered, total), self._parts = self._parts, None
        where, ops = self._where, self._ops
        if isinstance(where, Tensor):
            self._check_still_there()
        if gathered is not None and (total is not None or isinstance(where, Tensor)):
            entries, grad_m = gathered
            ops.segment_add(where if total is None else total, hidden, entries.by_distinct_id, grad_m)
        if isinstance(where, Tensor):
            if total is not None:
                where.add_(total)
            return self._for_megatron()
        if total is not None:
            if where == "dense":
                return total.to(self._dtype)
            assert self._index is not None
            ids = self._index.occurring_ids
            return _coo(ids, total.index_select(0, ids).to(self._dtype), self._shape)
        if gathered is None:
            return None
        entries, grad_m = gathered
        segments = entries.by_id if where == "dense" else entries.by_distinct_id
        rows: Tensor = ops.segment_sum(hidden, segments, grad_m, out_dtype=self._dtype)
        if where == "dense":
            return rows
        num_ids = len(torch.unique_consecutive(segments.out_rows))
        return _coo(segments.out_rows[:num_ids], rows[:num_ids], self._shape)

    def _check_still_there(self) -> None:
        if self._is_grad and not _is_its_grad(self._where, self._leaf):
            raise InvalidInputError(
                "weight_grad: it was weight.grad when the scores were made, and is not any more; the gradient"
                " would be lost. Call zero_grad before, or with set_to_none=False"
            )

    def _for_megatron(self) -> Tensor | None:
        """Return the weight's gradient for autograd: zeros for Megatron, else None.

        For Megatron, `weight.main_grad` already contains the actual gradient. Megatron's data parallelism
        requires that `weight.grad` exists. The flag `weight.grad_added_to_main_grad` tells Megatron not to
        add `weight.grad` to `weight.main_grad`. The zero gradient is a sparse tensor without rows, which
        takes no memory.
        """
        weight = self._leaf
        if weight is None or not hasattr(weight, "grad_added_to_main_grad"):
            return None
        if not _is_main_grad(self._where, weight):
            return None
        weight.grad_added_to_main_grad = True
        no_id = torch.empty(0, dtype=torch.int64, device=weight.device)
        return _coo(no_id, weight.new_empty((0, *self._shape[1:])), self._shape)


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, sink: WeightGradSink) -> Tensor:
        ctx.sink = sink
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return ctx.sink.deliver(), None


def _check(weight_grad: WeightGrad, weight: Tensor, hidden: Tensor, dtype: torch.dtype) -> None:
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


def _coo(ids_U: Tensor, rows_UH: Tensor, shape: torch.Size) -> Tensor:
    """Return a coalesced sparse tensor with the rows `rows_UH` at the ids `ids_U`, which must ascend."""
    return torch.sparse_coo_tensor(ids_U[None], rows_UH, shape, is_coalesced=True, check_invariants=False)


def _is_main_grad(buffer: WeightGrad, weight: Tensor) -> bool:
    main_grad = getattr(weight, "main_grad", None)
    return (
        isinstance(main_grad, Tensor)
        and isinstance(buffer, Tensor)
        and main_grad.data_ptr() == buffer.data_ptr()
    )
