"""The LM head as a source of raw outputs, and the gradient of its weight: dense, or added to a buffer.

The logits of single candidates are dot products of rows, and their gradients are sums of rows over segments:
`weights[e] * source[source_rows[e]]` for the entries `e` of a segment. The functions here compute them in
plain torch, on any device, in float32 (float64 for float64 inputs), and in a fixed order, so results are
bitwise reproducible. `gathered_products_triton` has the same functions for NVIDIA GPUs.

On a CPU, torch's threads wait for each other after each operation, so fewer operations are faster. By
default, waiting threads spin, and so occupy cores that other processes could use. On a busy machine, set
`OMP_WAIT_POLICY=passive`, so that waiting threads sleep.

A dense gradient has shape [V, H], even if few ids occur in the candidate sets. If only the candidates' logits
are computed, the LM head spends nearly all of its time on the dense gradient. If the caller passes a buffer
[V, H], the backward adds the gradient to the buffer's rows at the candidate ids, and does not touch the
buffer's other rows.

Shape legend: T positions, R rows of a pass or of a matrix, H hidden size, V ids held by this rank, C rows of
a chunk, m candidates or entries, S segments, L rows of a matrix.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.candidates.torch_tensors import suppress_warnings
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import Entries, Segments, Shard, reduce_sum

WeightGrad: TypeAlias = Literal["dense"] | Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WEIGHT_ROWS = 1 << 13
_PRODUCT_BYTES = 1 << 23  # larger steps exceed a CPU's cache; smaller steps need more thread barriers


@dataclass(eq=False)
class HeadSource:
    """The raw outputs `hidden . weight + bias` of an LM head.

    The products have the dtype of the sums. On a GPU, if hidden states and weight have the same
    half-precision dtype, tensor cores multiply in that dtype and sum in float32. The gradient of the logits
    is first converted to that dtype. In all other cases, all matrices are first converted.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: Tensor | None
    """The positions that a pass reads, or None if it reads all."""
    shard: Shard
    dtype: torch.dtype
    ops: Products
    sink: WeightGradSink

    def saved(self, *, has_pass: bool) -> tuple[Tensor | None, ...]:
        return self.hidden, self.weight, self.bias

    def gather(self, entries: Entries) -> Tensor:
        raw_m: Tensor = self.ops.gathered_dot(self.hidden, self.weight, entries, out_dtype=self.dtype)
        return raw_m if self.bias is None else raw_m.add_(self.bias.index_select(0, entries.ids))

    def raw(self, part: slice) -> Tensor:
        logits_CV = self._product(self._read[part], self._head.t())
        if self.bias is not None:
            logits_CV += self.bias[: self.shard.num_ids]
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
                torch.zeros_like(tensor, dtype=self.dtype) if wants and tensor is not None else None
                for tensor, wants in zip((self._read, self.weight, self.bias), wanted, strict=True)
            )
        for part, grad_CV in chunks or ():
            if hidden_RH is not None:
                hidden_RH[part] = self._product(grad_CV, self._head)
            if weight_VH is not None:
                self._add_outer(weight_VH, grad_CV, self._read[part])
            if bias_V is not None:
                bias_V[: self.shard.num_ids] += grad_CV.sum(dim=0)
        grad_hidden = self._grad_hidden(gathered, hidden_RH) if wanted[0] else None
        if gathered is not None and (wanted[1] or wanted[2]):
            gathered = gathered[0], gathered[1].index_select(0, gathered[0].order)
        if wanted[2] and gathered is not None:
            sums_V = torch.segment_reduce(gathered[1], "sum", offsets=gathered[0].by_id.offsets)
            bias_V = sums_V if bias_V is None else bias_V.add_(sums_V)
        grad_bias = None if bias_V is None or self.bias is None else bias_V.to(self.bias.dtype)
        grad_weight = self.sink.hand_over(self.hidden, gathered, weight_VH) if wanted[1] else None
        return grad_hidden, grad_weight, grad_bias

    def _grad_hidden(self, gathered: tuple[Entries, Tensor] | None, read_RH: Tensor | None) -> Tensor:
        dtype = self.hidden.dtype
        if read_RH is not None and self.rows is None:
            total_TH = read_RH  # the pass reads all positions
        elif gathered is None:
            total_TH = torch.zeros_like(self.hidden, dtype=self.dtype)
        else:
            entries, grad_m = gathered
            is_all = read_RH is None and self.shard.group is None  # so that its sums are rounded at once
            total_TH = self.ops.segment_sum(
                self.weight, entries.by_position, grad_m, out_dtype=dtype if is_all else self.dtype
            )
        if read_RH is not None and self.rows is not None:
            total_TH.index_copy_(0, self.rows, read_RH)
        return reduce_sum(total_TH, self.shard.group).to(dtype)

    @functools.cached_property
    def _read(self) -> Tensor:
        """[R, H]: the hidden states that a pass reads."""
        return self.hidden if self.rows is None else self.hidden.index_select(0, self.rows)

    @functools.cached_property
    def _head(self) -> Tensor:
        """[V, H]: the rows of the weight without padding, in the dtype in which `_product` multiplies."""
        head = self.weight[: self.shard.num_ids]
        has_tensor_cores = self.hidden.is_cuda and self.hidden.dtype == self.weight.dtype
        return head if has_tensor_cores else head.to(self.dtype)

    def _product(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = left.to(self._head.dtype), right.to(self._head.dtype)
        if left.dtype == self.dtype:
            return torch.mm(left, right)
        product: Tensor = torch.mm(left, right, out_dtype=self.dtype)
        return product

    def _add_outer(self, grad_VH: Tensor, grad_CV: Tensor, read_CH: Tensor) -> None:
        """Add the weight's gradient from one chunk to `grad_VH`, without a second [V, H] tensor."""
        if self._head.dtype == self.dtype:
            grad_VH[: self.shard.num_ids].addmm_(grad_CV.t(), read_CH.to(self.dtype))
            return
        for start in range(0, self.shard.num_ids, _WEIGHT_ROWS):
            rows = slice(start, min(start + _WEIGHT_ROWS, self.shard.num_ids))
            grad_VH[rows] += self._product(grad_CV[:, rows].t(), read_CH)


@dataclass(eq=False)
class LogitsSource:
    """Existing logits [T, V], which are only read. They count as raw outputs."""

    logits: Tensor
    rows: Tensor | None
    num_ids: int
    dtype: torch.dtype

    def saved(self, *, has_pass: bool) -> tuple[Tensor]:
        # Without a pass, the backward does not need the logits, so the caller may free or overwrite them.
        return (self.logits if has_pass else self.logits.new_empty(()).expand(self.logits.shape),)

    def gather(self, entries: Entries) -> Tensor:
        return self.logits[entries.positions, entries.ids].to(self.dtype)

    def raw(self, part: slice) -> Tensor:
        if self.rows is None:
            return self.logits[part, : self.num_ids].to(self.dtype, copy=True)
        return self.logits[:, : self.num_ids].index_select(0, self.rows[part]).to(self.dtype)

    def gradients(
        self,
        wanted: tuple[bool, ...],
        gathered: tuple[Entries, Tensor] | None,
        chunks: Iterable[tuple[slice, Tensor]] | None,
    ) -> tuple[Tensor]:
        grad_TV = torch.zeros(self.logits.shape, dtype=self.logits.dtype, device=self.logits.device)
        rows_TV = grad_TV[:, : self.num_ids]
        for part, grad_CV in chunks or ():
            if self.rows is None:
                rows_TV[part] = grad_CV
            else:
                rows_TV.index_copy_(0, self.rows[part], grad_CV.to(grad_TV.dtype))
        if gathered is not None:
            entries, grad_m = gathered  # no candidate occurs twice
            grad_TV[entries.positions, entries.ids] = grad_m.to(grad_TV.dtype)
        return (grad_TV,)


Source: TypeAlias = HeadSource | LogitsSource


class WeightGradSink:
    """Takes the weight's gradient in parts, and delivers their sum.

    Autograd asks a node for all gradients or for none, but a buffer must stay as it is if a backward asks
    only for the gradient of the hidden states. So the node of the logits computes the parts, and a second
    node, which autograd runs only if it wants the gradient of the weight, delivers them.
    """

    def __init__(
        self, weight_grad: WeightGrad, weight: Tensor, hidden: Tensor, dtype: torch.dtype, ops: Products
    ) -> None:
        """Check `weight_grad`. `dtype` is that of the sums, and `ops` sums rows over segments."""
        self._buffer = _buffer_of(weight_grad, weight, hidden, dtype)
        self._ops, self._shape, self._dtype = ops, weight.shape, weight.dtype
        # The backward uses `weight.grad`, `weight.main_grad`, and `weight.grad_added_to_main_grad`, but only
        # if `weight` is a leaf tensor. Keep no reference to a `weight` that is not a leaf tensor.
        self._leaf = weight if weight.is_leaf else None
        self._is_grad = self._buffer is not None and _is_held_as("grad", self._buffer, self._leaf)
        self._parts: tuple[Tensor, tuple[Entries, Tensor] | None, Tensor | None] | None = None

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
        buffer = self._buffer
        if buffer is not None and self._is_grad and not _is_held_as("grad", buffer, self._leaf):
            raise InvalidInputError(
                "weight_grad: it was weight.grad when the scores were made, and is not any more; the gradient"
                " would be lost. Call zero_grad before, or with set_to_none=False"
            )
        if gathered is not None:
            entries, grad_m = gathered
            out = buffer if total is None else total
            if out is None:
                total = self._ops.segment_sum(hidden, entries.by_id, grad_m, out_dtype=self._dtype)
            else:
                self._ops.segment_add(out, hidden, entries.by_distinct_id, grad_m)
        if buffer is None:
            return None if total is None else total.to(self._dtype)
        if total is not None:
            buffer.add_(total)
        return self._for_megatron(buffer)

    def _for_megatron(self, buffer: Tensor) -> Tensor | None:
        """Return the weight's gradient for autograd: zeros for Megatron, else None.

        For Megatron, `weight.main_grad` already contains the actual gradient. Megatron's data parallelism
        requires that `weight.grad` exists. The flag `weight.grad_added_to_main_grad` tells Megatron not to
        add `weight.grad` to `weight.main_grad`. The zero gradient is a sparse tensor without rows, which
        takes no memory.
        """
        weight = self._leaf
        if weight is None or not hasattr(weight, "grad_added_to_main_grad"):
            return None
        if not _is_held_as("main_grad", buffer, weight):
            return None
        weight.grad_added_to_main_grad = True
        no_id = torch.empty((1, 0), dtype=torch.int64, device=weight.device)
        no_row = weight.new_empty((0, *self._shape[1:]))
        return torch.sparse_coo_tensor(no_id, no_row, self._shape, is_coalesced=True, check_invariants=False)


class Deliver(torch.autograd.Function):
    """Returns the weight, such that its gradient goes through a sink."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sink: WeightGradSink) -> Tensor:
        ctx.sink = sink
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return ctx.sink.deliver(), None


def _buffer_of(weight_grad: WeightGrad, weight: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the buffer for the gradient, whose sums have a dtype, or None for "dense".

    Raises:
        InvalidInputError: `weight_grad` is neither "dense" nor a valid buffer.
    """
    if not isinstance(weight_grad, Tensor):
        if isinstance(weight_grad, str) and weight_grad == "dense":
            return None
        hint = "; where weight.grad is None, set it to zeros first" if weight_grad is None else ""
        raise InvalidInputError(
            f"weight_grad: got {weight_grad!r}, expected 'dense' or a buffer [V, H]{hint}"
        )
    if weight_grad.layout != torch.strided or weight_grad.shape != weight.shape:
        raise InvalidInputError(
            f"weight_grad: got shape {tuple(weight_grad.shape)} and layout {weight_grad.layout},"
            f" expected a dense {tuple(weight.shape)}, as weight"
        )
    overwrites = getattr(weight, "overwrite_main_grad", False) and _is_held_as(
        "main_grad", weight_grad, weight
    )
    problems = {
        "got a buffer for a weight that is computed from parameters, which would get no gradient; use"
        " 'dense', or pass the parameter itself": weight.requires_grad and not weight.is_leaf,
        f"got dtype {weight_grad.dtype}, expected {dtype} or weight's {weight.dtype}": (
            weight_grad.dtype not in (dtype, weight.dtype)
        ),
        f"it is on {weight_grad.device}, and weight is on {weight.device}": (
            weight_grad.device != weight.device
        ),
        "it requires a gradient; give a buffer, not a parameter": weight_grad.requires_grad,
        "its elements share memory; give a buffer of its own": _overlaps_itself(weight_grad),
        "it shares weight's memory, which it would overwrite": _share_memory(weight_grad, weight),
        "it shares hidden's memory, which it would overwrite": _share_memory(weight_grad, hidden),
        "it was made in inference mode, so backward cannot write to it": weight_grad.is_inference(),
        "weight.overwrite_main_grad is set, so main_grad holds no sum to add to; use 'dense' with"
        " Megatron-FSDP": overwrites,
    }
    for problem, is_true in problems.items():
        if is_true:
            raise InvalidInputError(f"weight_grad: {problem}")
    return weight_grad


def _is_held_as(name: str, buffer: Tensor, weight: Tensor | None) -> bool:
    """Return whether `buffer` is the weight's `grad` or `main_grad`, or a view of all of it."""
    held = getattr(weight, name, None)
    return isinstance(held, Tensor) and held.layout == torch.strided and held.data_ptr() == buffer.data_ptr()


def _share_memory(left: Tensor, right: Tensor) -> bool:
    """Return whether the address ranges of two tensors overlap."""
    ranges = []
    for tensor in (left, right):
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        has_memory = tensor.numel() > 0 and tensor.data_ptr() != 0
        ranges.append(range(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize * has_memory))
    return max(ranges[0].start, ranges[1].start) < min(ranges[0].stop, ranges[1].stop)


def _overlaps_itself(matrix: Tensor) -> bool:
    """Return whether the strides allow two elements of the matrix to share memory."""
    least = 1
    for stride, size in sorted(zip(matrix.stride(), matrix.shape, strict=True)):
        if size > 1 and stride < least:
            return True
        least = max(least, stride * size)
    return False


def check_tensors(targets: Tensor | None, **tensors: Tensor | None) -> torch.dtype:
    """Check targets [T] and the inputs, of which the first is [T, ...], and return the dtype of sums.

    Raises:
        InvalidInputError: targets are not integers [T]; a tensor is a DTensor, which holds only a part of its
            rows on this rank, is not on the device of the others, or has no supported dtype.
    """
    (first, reference), *_ = tensors.items()
    assert reference is not None
    if targets is not None and (
        targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool
    ):
        raise InvalidInputError(
            f"targets: got shape {tuple(targets.shape)} and dtype {targets.dtype}, expected integers [T]"
        )
    if targets is not None and len(reference) != len(targets):
        raise InvalidInputError(f"targets: got {len(targets)} for {len(reference)} rows of {first}")
    given = {name: tensor for name, tensor in {**tensors, "targets": targets}.items() if tensor is not None}
    for name, tensor in given.items():
        if hasattr(tensor, "full_tensor"):
            problem = (
                f"it is a DTensor, expected a plain tensor; pass {name}.full_tensor(), or with FSDP2 call the"
                " module's unshard() before you read its parameter"
            )
        elif tensor.device != reference.device:
            problem = f"it is on {tensor.device}, and {first} is on {reference.device}"
        elif name != "targets" and tensor.dtype not in _DTYPES:
            problem = f"got dtype {tensor.dtype}, expected float16, bfloat16, float32 or float64"
        else:
            continue
        raise InvalidInputError(f"{name}: {problem}")
    return torch.float64 if any(x.dtype == torch.float64 for x in given.values()) else torch.float32


class Products(NamedTuple):
    """How a backend computes products of rows. The functions of this module define the arguments."""

    gathered_dot: Callable[..., Tensor]
    segment_sum: Callable[..., Tensor]
    segment_add: Callable[..., None]

    @classmethod
    def of(cls, backend: str, hidden: Tensor, dtype: torch.dtype) -> Products:
        """Check `backend`, and choose one for hidden states and sums of a dtype."""
        if backend not in ("auto", "torch", "triton"):
            raise InvalidInputError(f"backend: got {backend!r}, expected 'auto', 'torch' or 'triton'")
        # The Triton kernels sum in float32 only. With "auto", float64 inputs therefore use plain torch.
        suits = hidden.is_cuda and dtype == torch.float32 and importlib.util.find_spec("triton") is not None
        if backend == "torch" or (backend == "auto" and not suits):
            return cls(gathered_dot, segment_sum, segment_add)
        if dtype != torch.float32:
            raise InvalidInputError(f"backend: 'triton' sums in float32, and the inputs ask for {dtype}")

        from sglang_topp.replay import gathered_products_triton as kernels

        return cls(kernels.gathered_dot, kernels.segment_sum, kernels.segment_add)


def gathered_dot(left: Tensor, right: Tensor, entries: Entries, *, out_dtype: torch.dtype) -> Tensor:
    """Return [m] of `out_dtype`: `left[entries.positions[e]] . right[entries.ids[e]]` for each entry.

    Args:
        left, right: [L, H] and [R, H], of any floating dtypes.
    """
    if left.is_cpu:
        left, left_rows = _compact(left, entries.positions, out_dtype)
        right, right_rows = _compact(right, entries.ids, out_dtype)
        return _sampled_product(left, left_rows, right, right_rows)
    out_m = torch.empty(len(entries.ids), dtype=out_dtype, device=left.device)
    step = _step(left, out_dtype)
    for start in range(0, len(out_m), step):
        part = slice(start, start + step)
        rows = right.index_select(0, entries.ids[part]).to(out_dtype)
        torch.sum(rows.mul_(left.index_select(0, entries.positions[part])), dim=1, out=out_m[part])
    return out_m


def segment_sum(source: Tensor, segments: Segments, weights: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Return [S, H]: the sum of each segment, rounded once to `out_dtype`. An empty segment sums to zero.

    Args:
        source: [R, H], of any floating dtype.
        weights: [m], float32 or float64, the dtype of the sums.
    """
    source, rows = _compact(source, segments.source_rows, weights.dtype)
    return _bags(source, rows, weights, segments.offsets).to(out_dtype)


def segment_add(out: Tensor, source: Tensor, segments: Segments, weights: Tensor) -> None:
    """Add the sum of each segment `s` to row `segments.out_rows[s]` of `out`, in place, and round once.

    Rows of `out` without a segment are neither read nor written. The other arguments are those of
    `segment_sum`.
    """
    source, rows = _compact(source, segments.source_rows, weights.dtype)
    assert segments.out_rows is not None
    num_segments = len(segments.out_rows)
    if not weights.is_cpu:  # the empty segments at the end repeat a row
        num_segments = int((segments.offsets[:-1] < len(weights)).sum())
    # A step's sums take twice `_PRODUCT_BYTES`. All steps are about equally large.
    step = 2 * _step(source, weights.dtype)
    step = -(-num_segments // max(1, -(-num_segments // step)))
    for start in range(0, num_segments, max(1, step)):
        bounds = segments.offsets[start : min(start + step, num_segments) + 1]
        entries = slice(int(bounds[0]), int(bounds[-1]))
        sums = _bags(source, rows[entries], weights[entries], bounds - entries.start)
        _add_rows(out, segments.out_rows[start : start + len(sums)], sums)
        del sums  # free these sums before the next step allocates its own


def _step(matrix: Tensor, dtype: torch.dtype) -> int:
    return max(1, _PRODUCT_BYTES // max(1, matrix.shape[1] * dtype.itemsize))


def _compact(matrix: Tensor, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a contiguous matrix in `dtype`, and the rows of it that `rows` are: copies only what is read."""
    if matrix.dtype == dtype and matrix.is_contiguous():
        return matrix, rows
    present, places = torch.unique(rows, return_inverse=True)
    return matrix.index_select(0, present).to(dtype), places


def _add_rows(out: Tensor, rows: Tensor, values: Tensor) -> None:
    """Compute `out[rows] += values`, rounded once to the dtype of `out`. `rows` must ascend."""
    if out.dtype != values.dtype:
        out.index_copy_(0, rows, values.add_(out.index_select(0, rows)).to(out.dtype))
    elif out.is_cpu:  # this sparse addition is one parallel operation; `index_add_` runs five
        out.add_(
            torch.sparse_coo_tensor(rows[None], values, out.shape, is_coalesced=True, check_invariants=False)
        )
    else:
        out.index_add_(0, rows, values)


def _sampled_product(left: Tensor, left_rows: Tensor, right: Tensor, right_rows: Tensor) -> Tensor:
    """Compute only some elements of `left @ right.T`, in one torch operation. `left_rows` must ascend."""
    suppress_warnings()
    bounds = torch.searchsorted(left_rows, torch.arange(len(left) + 1))
    pattern = torch.sparse_csr_tensor(
        bounds, right_rows, left.new_zeros(len(right_rows)), (len(left), len(right)), check_invariants=False
    )
    product: Tensor = torch.sparse.sampled_addmm(pattern, left, right.t(), beta=0.0)
    return product.values()


def _bags(source: Tensor, source_rows: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    """Return [S, H]: row `s` is the weighted sum over entries `bounds[s]` to `bounds[s + 1] - 1`."""
    return F.embedding_bag(
        source_rows, source.detach(), bounds, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
