"""The LM head as a source of raw outputs, and the gradient of its weight: dense, sparse, or in a buffer.

A dense gradient has shape [V, H], even if few ids occur in the candidate sets. If only the candidates' logits
are computed, the LM head spends nearly all of its time on the dense gradient. A sparse gradient has one row
per distinct candidate id. If the caller passes a buffer [V, H], the backward adds the gradient to the
buffer's rows at the candidate ids, and does not touch the buffer's other rows.

Shape legend: T positions, R rows of a pass, H hidden size, V ids held by this rank, C rows of a chunk, m
candidates, U distinct ids.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import gathered_products
from sglang_topp.replay.candidate_index import CandidateIndex, Entries, Shard, reduce_sum

__all__ = [
    "HeadSource",
    "WeightGrad",
    "WeightGradSink",
    "accumulation_dtype",
    "check_head",
    "check_targets",
    "products_of",
    "refuse_dtensors",
]

WeightGrad: TypeAlias = Literal["dense", "sparse"] | Tensor

_WEIGHT_ROWS = 1 << 13


class HeadSource:
    """The raw outputs `hidden . weight + bias` of an LM head.

    The products have the dtype of the sums. On a GPU, if hidden states and weight have the same
    half-precision dtype, tensor cores multiply in that dtype and sum in float32. The gradient of the logits
    is first converted to that dtype. In all other cases, all matrices are first converted.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        rows: Tensor | None,
        shard: Shard,
        dtype: torch.dtype,
        ops: ModuleType,
        sink: WeightGradSink,
    ) -> None:
        """Read the head. A pass reads the positions `rows`."""
        self._hidden, self._weight, self._bias, self._rows = hidden, weight, bias, rows
        self._num_ids, self._group = shard.num_ids, shard.group
        self._dtype, self._ops, self._sink = dtype, ops, sink

    def saved(self, *, has_pass: bool) -> tuple[Tensor | None, ...]:
        return self._hidden, self._weight, self._bias

    def gather(self, entries: Entries) -> Tensor:
        raw_m: Tensor = self._ops.gathered_dot(self._hidden, self._weight, entries, out_dtype=self._dtype)
        return raw_m if self._bias is None else raw_m.add_(self._bias.index_select(0, entries.ids))

    def raw(self, part: slice) -> Tensor:
        logits_CV = self._product(self._read[part], self._head.t())
        if self._bias is not None:
            logits_CV += self._bias[: self._num_ids]
        return logits_CV

    def gradients(
        self,
        wanted: tuple[bool, ...],
        gathered: tuple[Entries, Tensor] | None,
        chunks: Iterable[tuple[slice, Tensor]] | None,
    ) -> tuple[Tensor | None, ...]:
        hidden_RH = weight_VH = bias_V = None
        if chunks is not None:
            hidden_RH, weight_VH, bias_V = (
                torch.zeros_like(tensor, dtype=self._dtype) if wants and tensor is not None else None
                for tensor, wants in zip((self._read, self._weight, self._bias), wanted, strict=True)
            )
        for part, grad_CV in chunks or ():
            if hidden_RH is not None:
                hidden_RH[part] = self._product(grad_CV, self._head)
            if weight_VH is not None:
                self._add_outer(weight_VH, grad_CV, self._read[part])
            if bias_V is not None:
                bias_V[: self._num_ids] += grad_CV.sum(dim=0)
        grad_hidden = self._grad_hidden(gathered, hidden_RH) if wanted[0] else None
        if gathered is not None and (wanted[1] or wanted[2]):
            gathered = gathered[0], gathered[1].index_select(0, gathered[0].order)
        if wanted[2] and gathered is not None:
            sums_V = torch.segment_reduce(gathered[1], "sum", offsets=gathered[0].by_id.offsets)
            bias_V = sums_V if bias_V is None else bias_V.add_(sums_V)
        grad_bias = None if bias_V is None or self._bias is None else bias_V.to(self._bias.dtype)
        grad_weight = self._sink.hand_over(self._hidden, gathered, weight_VH) if wanted[1] else None
        return grad_hidden, grad_weight, grad_bias

    def _grad_hidden(self, gathered: tuple[Entries, Tensor] | None, read_RH: Tensor | None) -> Tensor:
        dtype = self._hidden.dtype
        if read_RH is not None and self._rows is None:
            total_TH = read_RH  # the pass reads all positions
        elif gathered is None:
            total_TH = torch.zeros_like(self._hidden, dtype=self._dtype)
        else:
            entries, grad_m = gathered
            is_all = read_RH is None and self._group is None  # so that its sums are rounded at once
            total_TH = self._ops.segment_sum(
                self._weight, entries.by_position, grad_m, out_dtype=dtype if is_all else self._dtype
            )
        if read_RH is not None and self._rows is not None:
            total_TH.index_copy_(0, self._rows, read_RH)
        return reduce_sum(total_TH, self._group).to(dtype)

    @functools.cached_property
    def _read(self) -> Tensor:
        """[R, H]: the hidden states that a pass reads."""
        return self._hidden if self._rows is None else self._hidden.index_select(0, self._rows)

    @functools.cached_property
    def _mixed(self) -> bool:
        """Whether tensor cores multiply in half precision."""
        return self._hidden.is_cuda and self._hidden.dtype == self._weight.dtype != self._dtype

    @functools.cached_property
    def _head(self) -> Tensor:
        """[V, H]: the rows of the weight without padding, as `_product` reads them."""
        head = self._weight[: self._num_ids]
        return head if self._mixed else head.to(self._dtype)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        product: Tensor
        if self._mixed:
            product = torch.mm(left.to(right.dtype), right, out_dtype=self._dtype)
        else:
            product = torch.mm(left.to(self._dtype), right.to(self._dtype))
        return product

    def _add_outer(self, grad_VH: Tensor, grad_CV: Tensor, read_CH: Tensor) -> None:
        """Add the weight's gradient from one chunk to `grad_VH`, without a second [V, H] tensor."""
        if not self._mixed:
            grad_VH[: self._num_ids].addmm_(grad_CV.t(), read_CH.to(self._dtype))
            return
        for start in range(0, self._num_ids, _WEIGHT_ROWS):
            rows = slice(start, min(start + _WEIGHT_ROWS, self._num_ids))
            grad_VH[rows] += self._product(grad_CV[:, rows].t(), read_CH)


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
    ) -> None:
        """Check `weight_grad`. `dtype` is that of the sums, and `ops` sums rows over segments."""
        _check(weight_grad, weight, hidden, dtype)
        self._where, self._ops = weight_grad, ops
        self._shape, self._dtype = weight.shape, weight.dtype
        # The backward uses `weight.grad`, `weight.main_grad`, and `weight.grad_added_to_main_grad`, but only
        # if `weight` is a leaf tensor. Keep no reference to a `weight` that is not a leaf tensor.
        self._leaf = weight if weight.is_leaf else None
        self._is_grad = _is_its_grad(weight_grad, self._leaf)
        self._parts: tuple[Tensor, tuple[Entries, Tensor] | None, Tensor | None] | None = None
        self.index: CandidateIndex | None = None
        """The candidates that the scores are over, or None."""

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
        out = where if isinstance(where, Tensor) and total is None else total
        if gathered is not None and out is not None:
            ops.segment_add(out, hidden, gathered[0].by_distinct_id, gathered[1])
        if isinstance(where, Tensor):
            if total is not None:
                where.add_(total)
            return self._for_megatron()
        ids, rows = None, total
        if rows is None and gathered is not None:
            entries, grad_m = gathered
            segments = entries.by_id if where == "dense" else entries.by_distinct_id
            rows = ops.segment_sum(hidden, segments, grad_m, out_dtype=self._dtype)
            ids = segments.out_rows
        elif rows is not None and where == "sparse" and self.index is not None:
            ids = self.index.occurring_ids
            rows = rows.index_select(0, ids)
        if rows is None or ids is None:
            return None if rows is None else rows.to(self._dtype)
        ids = torch.unique_consecutive(ids)  # on a GPU, empty segments repeat the last id
        return _coo(ids, rows[: len(ids)].to(self._dtype), self._shape)

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


def check_targets(targets: Tensor) -> None:
    """Raise InvalidInputError unless targets are integers [T]."""
    if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
        raise InvalidInputError(
            f"targets: got shape {tuple(targets.shape)} and dtype {targets.dtype}, expected integers [T]"
        )


def refuse_dtensors(**tensors: Tensor | None) -> None:
    """Raise InvalidInputError if a tensor is a DTensor, which holds only a part of its rows on this rank."""
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):
            raise InvalidInputError(
                f"{name}: it is a DTensor, expected a plain tensor; pass {name}.full_tensor(), or with FSDP2"
                " call the module's unshard() before you read its parameter"
            )


def accumulation_dtype(**tensors: Tensor) -> torch.dtype:
    """Return the dtype of sums and results: float32, or float64 if any of `tensors` is float64.

    Raises:
        InvalidInputError: a tensor is not float16, bfloat16, float32, or float64.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise InvalidInputError(
                f"{name}: got dtype {tensor.dtype}, expected float16, bfloat16, float32 or float64"
            )
    wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    return torch.float64 if wide else torch.float32


def products_of(backend: str, hidden: Tensor, dtype: torch.dtype) -> ModuleType:
    """Return the module `gathered_products` or `gathered_products_triton`."""
    if backend not in ("auto", "torch", "triton"):
        raise InvalidInputError(f"backend: got {backend!r}, expected 'auto', 'torch' or 'triton'")
    # The Triton kernels compute sums in float32 only. With "auto", float64 inputs therefore use plain torch.
    # Only tests pass float64 inputs.
    suits = hidden.is_cuda and dtype == torch.float32 and importlib.util.find_spec("triton") is not None
    if backend == "triton" or (backend == "auto" and suits):
        if dtype != torch.float32:
            raise InvalidInputError(f"backend: 'triton' sums in float32, and the inputs ask for {dtype}")

        from sglang_topp.replay import gathered_products_triton

        return gathered_products_triton
    return gathered_products
