"""Logits as an autograd node: candidates' logits and softmaxes, from hidden states or from logits.

One node computes everything that a score needs from one source, so each gradient is summed before it is
rounded. `HeadSource` reads hidden states and the LM head's weight, and never builds a [T, V] tensor.
`LogitsSource` reads existing logits.

Shape legend: T positions, R rows of a pass, H hidden size, V ids held by this rank, C rows of a chunk, m
listed candidates.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import gathered_products
from sglang_topp.replay.candidate_index import CandidateIndex, Entries
from sglang_topp.replay.lm_head_weight_grad import WeightGrad, WeightGradSink
from sglang_topp.replay.vocab_pass import Softmax, VocabPass, VocabSource
from sglang_topp.replay.vocab_shards import Shard, reduce_sum

__all__ = [
    "LogitsSource",
    "Work",
    "accumulation_dtype",
    "check_head",
    "check_targets",
    "evaluate",
    "evaluate_head",
    "head_chunk_bytes",
    "refuse_dtensors",
]


_CHUNK_BYTES = 1 << 28
_WEIGHT_ROWS = 1 << 13


@dataclass(frozen=True, eq=False)
class Work:
    """The values to compute from a source."""

    index: CandidateIndex | None
    """The candidates whose raw outputs are computed: `index.listed`."""
    gathered: Entries | None
    """The candidates whose raw outputs are computed one by one. `vocab` picks the others."""
    vocab: VocabPass | None
    """The pass over the whole vocabulary."""
    rows: Tensor | None = None
    """int64 [R]: the positions that the pass reads, or None for all."""

    @classmethod
    def over_candidates(cls, index: CandidateIndex, vocab: VocabPass | None) -> Work:
        """Compute dense positions with `vocab`, and the candidates of all others one by one."""
        return cls(index, index.gathered, vocab, index.dense_rows)

    def merge(self, gathered: Tensor | None, picked: Tensor | None) -> Tensor | None:
        """Return the raw outputs of all listed candidates."""
        if gathered is None or picked is None or self.index is None or self.index.places is None:
            return picked if gathered is None else gathered
        gathered_at, picked_at = self.index.places
        merged = gathered.new_empty(len(gathered) + len(picked))
        return merged.index_copy_(0, gathered_at, gathered).index_copy_(0, picked_at, picked)

    def split(self, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the gathered and the picked candidates' part of a gradient."""
        if grad is None or self.gathered is None:
            return None, grad
        if self.index is None or self.index.places is None:
            return grad, None
        gathered_at, picked_at = self.index.places
        return grad.index_select(0, gathered_at), grad.index_select(0, picked_at)


class Source(VocabSource, Protocol):
    """Where raw outputs are read, and where their gradients go, in one forward or one backward."""

    def saved(self, *, has_pass: bool) -> tuple[Tensor | None, ...]:
        """Return what the backward needs of the tensors, for a work with or without a pass."""

    def gather(self, entries: Entries) -> Tensor:
        """Return the raw outputs of some candidates."""

    def start_gradients(self, wanted: tuple[bool, ...], device: torch.device, *, has_pass: bool) -> None:
        """Allocate the gradients. `wanted` tells which tensors need one."""

    def gradients(self, gathered: tuple[Entries, Tensor] | None) -> tuple[Tensor | None, ...]:
        """Return all tensors' gradients, with that of the gathered candidates' raw outputs."""


def evaluate(
    work: Work, source: Callable[..., Source], *tensors: Tensor | None
) -> tuple[Tensor, list[Softmax]]:
    """Return the raw outputs [m] of the listed candidates, and the softmaxes of the pass over the vocabulary.

    Everything is differentiable once in `tensors`, from which `source` makes a source.
    """
    raw, *values = _Evaluate.apply(work, source, *tensors)
    return raw, [Softmax(*each) for each in _triples(values)]


class _Evaluate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Work, make: Callable[..., Source], *tensors: Tensor | None) -> Any:
        ctx.set_materialize_grads(False)
        ctx.work, ctx.make, ctx.num_tensors, ctx.kept = work, make, len(tensors), None
        ctx.device = device = next(tensor.device for tensor in tensors if tensor is not None)
        picked: Tensor | None = None
        softmaxes: list[Softmax] = []
        with torch.autocast(device.type, enabled=False):
            source = make(*tensors)
            gathered = None if work.gathered is None else source.gather(work.gathered)
            if work.vocab is not None:
                picked, softmaxes, last = work.vocab.forward(source, device)
                if len(work.vocab.parts) == 1 and softmaxes and any(ctx.needs_input_grad):
                    ctx.kept = last
        results = [each for one in softmaxes for each in (one.logprobs, one.entropy, one.log_total)]
        ctx.save_for_backward(*(source.saved(has_pass=work.vocab is not None)), *results)
        return work.merge(gathered, picked), *results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_m: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        work: Work = ctx.work
        saved = ctx.saved_tensors
        tensors, results = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
        grad_gathered, grad_picked = work.split(grad_m)
        with torch.autocast(ctx.device.type, enabled=False):
            source = ctx.make(*tensors)
            source.start_gradients(ctx.needs_input_grad[2:], ctx.device, has_pass=work.vocab is not None)
            if work.vocab is not None:
                # The gradient overwrites the kept logits, so a second backward computes them again.
                kept, ctx.kept = ctx.kept, None
                softmaxes = [Softmax(*each) for each in _triples(results)]
                work.vocab.backward(source, kept, softmaxes, grad_picked, _triples(grads))
            gathered = None
            if work.gathered is not None and grad_gathered is not None:
                gathered = work.gathered, grad_gathered
            return None, None, *source.gradients(gathered)


def _triples(values: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    return [(values[at], values[at + 1], values[at + 2]) for at in range(0, len(values), 3)]


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
        touched: Tensor | None,
        num_ids: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
        ops: ModuleType,
        sink: WeightGradSink,
    ) -> None:
        """Read the head. A pass reads the positions `rows`. Only the positions `touched` get gradients."""
        self._hidden, self._weight, self._bias = hidden, weight, bias
        self._rows, self._touched, self._num_ids, self._group = rows, touched, num_ids, group
        self._dtype, self._ops, self._sink = dtype, ops, sink
        self._wanted: tuple[bool, ...] = ()
        self._sums: list[Tensor | None] = [None, None, None]

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

    def start_gradients(self, wanted: tuple[bool, ...], device: torch.device, *, has_pass: bool) -> None:
        self._wanted = wanted
        if has_pass:
            self._sums = [
                torch.zeros_like(tensor, dtype=self._dtype) if wants and tensor is not None else None
                for tensor, wants in zip((self._read, self._weight, self._bias), wanted, strict=True)
            ]

    def add(self, part: slice, grad_CV: Tensor) -> None:
        hidden_RH, weight_VH, bias_V = self._sums
        if hidden_RH is not None:
            hidden_RH[part] = self._product(grad_CV, self._head)
        if weight_VH is not None:
            self._add_outer(weight_VH, grad_CV, self._read[part])
        if bias_V is not None:
            bias_V[: self._num_ids] += grad_CV.sum(dim=0)

    def gradients(self, gathered: tuple[Entries, Tensor] | None) -> tuple[Tensor | None, ...]:
        grad_hidden = grad_weight = grad_bias = None
        if self._wanted[0]:
            grad_hidden = self._grad_hidden(gathered)
        if gathered is not None and (self._wanted[1] or self._wanted[2]):
            entries, grad_m = gathered
            gathered = entries, grad_m.index_select(0, entries.order)
        if self._wanted[1]:
            grad_weight = self._sink.hand_over(self._hidden, gathered, self._sums[1])
        if self._wanted[2]:
            grad_bias = self._sums[2]
            if gathered is not None:
                sums_V = torch.segment_reduce(gathered[1], "sum", offsets=gathered[0].by_id.offsets)
                grad_bias = sums_V if grad_bias is None else grad_bias + sums_V
            if grad_bias is not None and self._bias is not None:
                grad_bias = grad_bias.to(self._bias.dtype)
        return grad_hidden, grad_weight, grad_bias

    def _grad_hidden(self, gathered: tuple[Entries, Tensor] | None) -> Tensor:
        read_RH, dtype = self._sums[0], self._hidden.dtype
        total_TH: Tensor
        if gathered is not None:
            entries, grad_m = gathered
            rounds = read_RH is None and self._group is None  # nothing else is added
            total_TH = self._ops.segment_sum(
                self._weight, entries.by_position, grad_m, out_dtype=dtype if rounds else self._dtype
            )
        elif read_RH is None or self._rows is not None:
            total_TH = torch.zeros_like(self._hidden, dtype=self._dtype)
        if read_RH is not None:
            total_TH = read_RH if self._rows is None else total_TH.index_copy_(0, self._rows, read_RH)
        # Round after the sum over the ranks, not before.
        if self._group is not None and self._touched is not None:
            touched = reduce_sum(total_TH.index_select(0, self._touched), self._group)
            return total_TH.index_copy_(0, self._touched, touched).to(dtype)
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


class LogitsSource:
    """Existing logits [T, V], which are only read. They count as raw outputs."""

    def __init__(
        self,
        logits: Tensor,
        *,
        shape: torch.Size,
        grad_dtype: torch.dtype,
        rows: Tensor | None,
        num_ids: int,
        dtype: torch.dtype,
    ) -> None:
        """Read `logits`, of the given shape and dtype. They may be None if they are not read."""
        self._logits, self._shape, self._grad_dtype = logits, shape, grad_dtype
        self._rows, self._num_ids, self._dtype = rows, num_ids, dtype

    def saved(self, *, has_pass: bool) -> tuple[Tensor | None]:
        # Without a pass, the backward does not need the logits, so the caller may free or overwrite them.
        return (self._logits if has_pass else None,)

    def gather(self, entries: Entries) -> Tensor:
        return self._logits[entries.positions, entries.ids].to(self._dtype)

    def raw(self, part: slice) -> Tensor:
        if self._rows is None:
            return self._logits[part, : self._num_ids].to(self._dtype, copy=True)
        return self._logits[:, : self._num_ids].index_select(0, self._rows[part]).to(self._dtype)

    def start_gradients(self, wanted: tuple[bool, ...], device: torch.device, *, has_pass: bool) -> None:
        self._grad_TV = torch.zeros(self._shape, dtype=self._grad_dtype, device=device)

    def add(self, part: slice, grad_CV: Tensor) -> None:
        rows = self._grad_TV[:, : self._num_ids]
        if self._rows is None:
            rows[part] = grad_CV
        else:
            rows.index_copy_(0, self._rows[part], grad_CV.to(rows.dtype))

    def gradients(self, gathered: tuple[Entries, Tensor] | None) -> tuple[Tensor | None, ...]:
        if gathered is not None:
            entries, grad_m = gathered  # no candidate occurs twice
            self._grad_TV[entries.positions, entries.ids] = grad_m.to(self._grad_TV.dtype)
        return (self._grad_TV,)


def evaluate_head(
    work: Work,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    shard: Shard,
    group: dist.ProcessGroup | None,
    weight_grad: WeightGrad,
    backend: str,
) -> tuple[Tensor, list[Softmax]]:
    """Return what `evaluate` returns, from an LM head. `score` defines the arguments.

    Raises:
        InvalidInputError: `weight_grad` or `backend` is not valid.
    """
    dtype = accumulation_dtype(hidden=hidden, weight=weight)
    ops = _products(backend, hidden, dtype)
    if work.gathered is None and isinstance(weight_grad, str) and weight_grad == "sparse":
        raise InvalidInputError(
            "weight_grad: got 'sparse', expected 'dense' or a buffer: over the whole vocabulary every id has"
            " a gradient"
        )
    sink = WeightGradSink(weight_grad, weight, hidden, dtype, ops, work.index)
    touched = work.index.rows if work.vocab is None and work.index is not None else None
    source = functools.partial(
        HeadSource,
        rows=work.rows,
        touched=touched,
        num_ids=shard.num_ids,
        group=group,
        dtype=dtype,
        ops=ops,
        sink=sink,
    )
    return evaluate(work, source, hidden, sink.attach(weight), bias)


def head_chunk_bytes(hidden: Tensor, dtype: torch.dtype) -> int:
    """Return how many bytes the logits of a chunk take: fixed, or as many as the hidden states.

    Each chunk adds to the whole gradient of the weight, so large batches have large chunks.
    """
    return max(_CHUNK_BYTES, hidden.numel() * dtype.itemsize)


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


def _products(backend: str, hidden: Tensor, dtype: torch.dtype) -> ModuleType:
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
