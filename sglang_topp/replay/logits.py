"""Logits as an autograd node: candidates' logits, and softmaxes over the vocabulary, from one source.

A source computes raw outputs from hidden states and an LM head (`HeadSource`), or reads existing logits
(`LogitsSource`). One node computes everything that a score needs from it, so each gradient is summed before
it is rounded. A pass over the whole vocabulary takes a chunk of rows at a time: its forward keeps a few sums
per row, and its backward computes the logits again, unless one chunk holds all rows.

Shape legend: T positions, R rows of a pass, V ids held by this rank without padding, C rows of a chunk or of
a slice of it, m listed candidates, k picked ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import Entries, RowIds, Shard, first_true, reduce_max, reduce_sum

__all__ = [
    "LOG_PROB_FLOOR",
    "LogitTransform",
    "LogitsSource",
    "Softmax",
    "Source",
    "VocabPass",
    "evaluate",
    "gradient_of_softmax",
]

# A log-prob is raised to this value before it is multiplied by its probability, because 0 * -inf is NaN. That
# changes no result: the probability is 0 in float32 and float64.
LOG_PROB_FLOOR = -1.0e4
# A chunk is worked on in slices of rows. On a CPU, the temporary tensors of a slice fit in the cache. On a
# GPU, a slice is enough work to amortize the kernel launches.
_SLICE_BYTES_CPU = 1 << 20
_SLICE_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class LogitTransform:
    """The conversion of an LM head's raw output `hidden . weight + bias` into the policy's logits `z`.

    ::

        z = softcap * tanh(logit_scale * raw / softcap) / temperature      in SGLang's order
        z = logit_scale * raw / temperature                                without a soft cap
    """

    temperature: float | Tensor
    """One number above 0, or a tensor [T] of numbers above 0."""
    softcap: float | None
    logit_scale: float

    @classmethod
    def of(
        cls,
        temperature: float | Tensor,
        softcap: float | None,
        logit_scale: float,
        *,
        num_positions: int,
        device: torch.device,
        may_wait: bool,
    ) -> LogitTransform:
        """Check the arguments, copy a `temperature` tensor to `device`, and build a transform.

        If `may_wait` is False, this method does not wait for the device. An invalid value in a `temperature`
        tensor on an accelerator then raises no error, but becomes NaN in the transform's `temperature`.

        Raises:
            InvalidInputError: an argument is not positive and finite, `temperature` is neither one number nor
                one number per position, or `temperature` requires a gradient.
        """
        if softcap is not None and not 0 < softcap < math.inf:
            raise InvalidInputError(f"softcap: got {softcap}, expected a positive number or None")
        if not 0 < logit_scale < math.inf:
            raise InvalidInputError(
                f"logit_scale: got {logit_scale}, expected a positive number; for a model that divides its"
                " logits (Granite's logits_scaling), pass 1 over its divisor"
            )
        if isinstance(temperature, Tensor):
            temperature = _check_temperatures(temperature, num_positions, may_wait).to(device)
        elif not 0 < temperature < math.inf:
            raise InvalidInputError(f"temperature: got {temperature}, expected a positive number")
        return cls(temperature, softcap, logit_scale)

    def __call__(self, raw: Tensor, positions: Tensor | slice) -> Tensor:
        """Return the logits of raw outputs [m] or [C, V] at the given positions, differentiable in `raw`."""
        logits = raw if self.logit_scale == 1.0 else raw * self.logit_scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if isinstance(self.temperature, Tensor):
            temperature = self.temperature[positions].to(logits)
            return logits / (temperature[:, None] if logits.ndim == 2 else temperature)
        return logits if self.temperature == 1.0 else logits / self.temperature


def _check_temperatures(temperature: Tensor, num_positions: int, may_wait: bool) -> Tensor:
    """Return a copy [T], because the caller may overwrite the tensor before the backward reads it."""
    if temperature.shape not in ((), (num_positions,)):
        raise InvalidInputError(
            f"temperature: got shape {tuple(temperature.shape)}, expected one number or [{num_positions}]"
        )
    if temperature.requires_grad:
        raise InvalidInputError("temperature: it requires a gradient, and none is computed; detach it")
    is_valid = (temperature > 0) & temperature.isfinite()
    checks = may_wait or temperature.device.type == "cpu"
    if checks and (bad := first_true(~is_valid.reshape(-1))) is not None:
        raise InvalidInputError(
            f"temperature: got {float(temperature.reshape(-1)[bad])} at position {bad}, expected above 0"
        )
    return torch.where(is_valid, temperature, torch.nan).expand(num_positions)


class Softmax(NamedTuple):
    """The results of one softmax over logits of the vocabulary. Each tensor has one value per row."""

    logprobs: Tensor
    """[R]: the log-prob of each row's target."""
    entropy: Tensor | None
    log_total: Tensor
    """[R]: the log-sum-exp of each row's logits, -inf if none is above -inf."""


@dataclass(frozen=True, eq=False)
class VocabPass:
    """Which values to compute from the logits of R rows over the vocabulary, and how."""

    shard: Shard
    num_rows: int
    rows: Tensor | None
    """int64 [R]: the position of each row, or None if the rows are all positions."""
    transform: LogitTransform
    dropped: list[Callable[[slice], Tensor | None]]
    """For each softmax, a function that returns bool [C, V], True at the ids of some rows that the softmax
    leaves out, or None."""
    columns: Tensor | None
    """int64 [R], the column of each row's target on this rank, or -1; None without targets."""
    picks: RowIds | None
    """The columns whose raw outputs are returned, or None."""
    entropy: bool
    """Whether each softmax has an entropy."""
    dtype: torch.dtype
    chunk_rows: int

    @property
    def parts(self) -> list[slice]:
        """The rows of each chunk."""
        return _slices(0, self.num_rows, self.chunk_rows)

    def forward(self, source: Source, device: torch.device) -> tuple[list[Tensor], list[Softmax], Tensor]:
        """Return the picked raw outputs [k], the softmaxes, and the last chunk's raw outputs."""
        picked, raw_CV = [], torch.empty(0, dtype=self.dtype, device=device)
        sums = [_Sums(self.num_rows, self.dtype, device, self.entropy) for _ in self.dropped]
        for part in self.parts:
            raw_CV = source.raw(part)
            if self.picks is not None:
                picked.append(raw_CV.view(-1).index_select(0, self.picks.places(part, self.shard.num_ids)))
            for rows, here in self._slices_of(part, raw_CV):
                logits_CV = self.transform(raw_CV[rows], self._positions(here))
                for each, dropped in zip(sums, self.dropped, strict=True):
                    columns = None if self.columns is None else self.columns[here]
                    each.add(here, _without(logits_CV, dropped(here)), columns)
        return picked, [each.finish(self.shard) for each in sums], raw_CV

    def backward(
        self,
        source: Source,
        kept: Tensor | None,
        softmaxes: list[Softmax],
        grad_picked: Tensor | None,
        grads: list[Softmax],
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows of each chunk, and the gradient of their raw outputs.

        Args:
            kept: the raw outputs that `forward` returned if they are of all rows, or None. The gradient
                overwrites them.
            softmaxes: the results of `forward`.
            grad_picked: [k], the gradient of the picked raw outputs.
            grads: the gradients of the softmaxes; each may be None.
        """
        terms = [_Gradient(*both, self.columns) for both in zip(softmaxes, grads, strict=True)]
        for part in self.parts:
            if terms:
                chunk = source.raw(part) if kept is None else kept
            elif grad_picked is not None:
                shape = part.stop - part.start, self.shard.num_ids
                chunk = torch.zeros(shape, dtype=self.dtype, device=grad_picked.device)
            else:
                return
            for rows, here in self._slices_of(part, chunk):
                raw_CV = chunk[rows].detach().requires_grad_()
                with torch.enable_grad():
                    logits_CV = self.transform(raw_CV, self._positions(here))
                total, *others = [
                    term.of(here, _without(logits_CV.detach(), dropped(here)))
                    for term, dropped in zip(terms, self.dropped, strict=True)
                ]
                for other in others:
                    total += other
                (chunk[rows],) = torch.autograd.grad(logits_CV, raw_CV, total)
            if self.picks is not None and grad_picked is not None:
                places = self.picks.places(part, self.shard.num_ids)
                chunk.view(-1).index_add_(0, places, grad_picked[self.picks.entries(part)])
            yield part, chunk

    def _positions(self, here: slice) -> Tensor | slice:
        return here if self.rows is None else self.rows[here]

    def _slices_of(self, part: slice, chunk: Tensor) -> list[tuple[slice, slice]]:
        """Return slices of a chunk for the softmaxes: the rows within the chunk, and the rows of the pass."""
        if not self.dropped or not self.shard.num_ids:
            return []
        num_bytes = _SLICE_BYTES_CPU if chunk.is_cpu else _SLICE_BYTES
        step = max(1, num_bytes // (self.shard.num_ids * chunk.itemsize))
        return list(zip(_slices(0, len(chunk), step), _slices(part.start, part.stop, step), strict=True))


def _slices(start: int, stop: int, step: int) -> list[slice]:
    return [slice(first, min(first + step, stop)) for first in range(start, stop, step)]


def _without(logits_CV: Tensor, dropped: Tensor | None) -> Tensor:
    return logits_CV if dropped is None else logits_CV.masked_fill(dropped, -torch.inf)


class _Sums:
    """The sums of one softmax on this rank. `finish` combines those of all ranks."""

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device, entropy: bool) -> None:
        self.peak_R = torch.full((num_rows,), -torch.inf, dtype=dtype, device=device)
        self.sums_KR = torch.zeros((3 if entropy else 2, num_rows), dtype=dtype, device=device)

    def add(self, here: slice, logits_CV: Tensor, column_C: Tensor | None) -> None:
        """Add up the logits of some rows."""
        peak_C = logits_CV.amax(dim=1)
        self.peak_R[here] = peak_C
        shifted_CV = logits_CV - torch.where(peak_C.isneginf(), 0.0, peak_C)[:, None]
        weight_CV = shifted_CV.exp()
        total_R, target_R, *moments = self.sums_KR
        total_R[here] = weight_CV.sum(dim=1)
        if column_C is not None:
            target_C = logits_CV.gather(1, column_C.clamp(min=0)[:, None]).squeeze(1)
            target_R[here] = torch.where(column_C >= 0, target_C, 0.0)
        for moment_R in moments:
            moment_R[here] = torch.linalg.vecdot(weight_CV, shifted_CV.clamp_(min=LOG_PROB_FLOOR))

    def finish(self, shard: Shard) -> Softmax:
        """Combine the sums of all ranks, with two reductions."""
        peak_R = reduce_max(self.peak_R.clone(), shard.group)
        drop_R = self.peak_R - peak_R
        total_R, _, *moments = self.sums_KR
        # If all logits of a rank are -inf, the rank adds nothing to the sums.
        is_empty_R = self.peak_R.isneginf()
        for moment_R in moments:
            moment_R.addcmul_(total_R, drop_R).mul_(drop_R.exp()).masked_fill_(is_empty_R, 0.0)
        total_R.mul_(drop_R.exp()).masked_fill_(is_empty_R, 0.0)
        total_R, target_R, *moments = reduce_sum(self.sums_KR, shard.group)
        log_total_R = total_R.log()
        entropy_R = log_total_R - moments[0] / total_R if moments else None
        return Softmax(target_R - peak_R - log_total_R, entropy_R, peak_R + log_total_R)


def gradient_of_softmax(logprobs: Tensor, factor: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """Return `p * (factor - grad_entropy * log p)` for `p = exp(logprobs)`, and 0 where `p` is 0.

    The gradient of a function of a softmax in each logit is::

        [i is target] * grad_logprob + p_i * (grad_log_total - grad_logprob - grad_entropy * (log p_i + H))
    """
    p = logprobs.exp()
    if grad_entropy is not None:
        factor = torch.addcmul(factor, grad_entropy, logprobs.clamp(LOG_PROB_FLOOR), value=-1)
    return p.mul_(factor)


class _Gradient:
    """The gradient of one softmax of a pass in the logits."""

    def __init__(self, result: Softmax, grads: Softmax, columns: Tensor | None) -> None:
        # Where no logit is above -inf: exp(-inf - 0) is 0, but exp(-inf + inf) is NaN.
        is_empty_R = result.log_total.isneginf()
        self._log_total_R = result.log_total.masked_fill(is_empty_R, 0.0)
        self._factor_R, self._grad_entropy_R = torch.zeros_like(result.log_total), None
        self._grad_target_R = None
        if grads.log_total is not None:
            self._factor_R += grads.log_total
        if grads.logprobs is not None and columns is not None:
            self._factor_R -= grads.logprobs
            self._columns, self._grad_target_R = columns, torch.where(columns >= 0, grads.logprobs, 0.0)
        if grads.entropy is not None and result.entropy is not None:
            self._grad_entropy_R = grads.entropy
            entropy_R = result.entropy.masked_fill(is_empty_R, 0.0)
            self._factor_R.addcmul_(grads.entropy, entropy_R, value=-1)

    def of(self, here: slice, logits_CV: Tensor) -> Tensor:
        """Return the gradient of some rows' logits."""
        entropy_C1 = None if self._grad_entropy_R is None else self._grad_entropy_R[here, None]
        logprobs_CV = logits_CV - self._log_total_R[here, None]
        grad_CV = gradient_of_softmax(logprobs_CV, self._factor_R[here, None], entropy_C1)
        if self._grad_target_R is not None:
            columns_C1 = self._columns[here, None].clamp(min=0)
            grad_CV.scatter_add_(1, columns_C1, self._grad_target_R[here, None])
        return grad_CV


class Source(Protocol):
    """Where raw outputs are read, and where their gradients go, in one forward or one backward."""

    def saved(self, *, has_pass: bool) -> tuple[Tensor | None, ...]:
        """Return what the backward needs in place of the tensors, for a node with or without a pass."""

    def gather(self, entries: Entries) -> Tensor:
        """Return the raw outputs [m] of some candidates."""

    def raw(self, part: slice) -> Tensor:
        """Return the raw outputs [C, V] of some rows of the pass, which the caller may overwrite."""

    def gradients(
        self,
        wanted: tuple[bool, ...],
        gathered: tuple[Entries, Tensor] | None,
        chunks: Iterable[tuple[slice, Tensor]] | None,
    ) -> tuple[Tensor | None, ...]:
        """Return the wanted tensors' gradients, from those of the raw outputs. No pass: no chunks."""


def evaluate(
    gathered: Entries | None,
    vocab: VocabPass | None,
    source: Callable[..., Source],
    *tensors: Tensor | None,
) -> tuple[Tensor, list[Softmax]]:
    """Return the raw outputs of candidates, and the softmaxes of a pass over the vocabulary.

    Everything is differentiable once in `tensors`. With the rows of the pass, they make a source.

    Args:
        gathered: the candidates whose raw outputs are computed one by one. The pass's picks follow them.
    """
    raw, *values = _Evaluate.apply(gathered, vocab, source, *tensors)
    return raw, _softmaxes(values)


class _Evaluate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gathered: Entries | None,
        vocab: VocabPass | None,
        make: Callable[..., Source],
        *tensors: Tensor | None,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.work, ctx.num_tensors, ctx.kept = (gathered, vocab, make), len(tensors), None
        ctx.device = device = next(tensor.device for tensor in tensors if tensor is not None)
        raw: list[Tensor] = []
        results: list[Tensor | None] = []
        with torch.autocast(device.type, enabled=False):
            source = make(*tensors, rows=None if vocab is None else vocab.rows)
            if gathered is not None:
                raw.append(source.gather(gathered))
            if vocab is not None:
                picked, softmaxes, chunk = vocab.forward(source, device)
                raw += picked
                results = [each for softmax in softmaxes for each in softmax]
                if len(vocab.parts) == 1 and softmaxes and any(ctx.needs_input_grad):
                    ctx.kept = chunk
        ctx.save_for_backward(*source.saved(has_pass=vocab is not None), *results)
        raw_m = raw[0] if len(raw) == 1 else torch.cat([torch.empty(0, device=device), *raw])
        return raw_m, *results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_m: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        gathered, vocab, make = ctx.work
        saved = ctx.saved_tensors
        tensors, results = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
        grad_picked, of_gathered = grad_m, None
        if gathered is not None and grad_m is not None:
            num_gathered = len(gathered.ids)
            if vocab is not None:
                grad_m, grad_picked = grad_m[:num_gathered], grad_m[num_gathered:]
            of_gathered = gathered, grad_m
        with torch.autocast(ctx.device.type, enabled=False):
            source, chunks = make(*tensors, rows=None if vocab is None else vocab.rows), None
            if vocab is not None:
                # The gradient overwrites the kept raw outputs, so a second backward computes them again.
                kept, ctx.kept = ctx.kept, None
                chunks = vocab.backward(source, kept, _softmaxes(results), grad_picked, _softmaxes(grads))
            return None, None, None, *source.gradients(ctx.needs_input_grad[3:], of_gathered, chunks)


def _softmaxes(values: Iterable[Any]) -> list[Softmax]:
    each = iter(values)
    return [Softmax(*three) for three in zip(each, each, each, strict=True)]


class LogitsSource:
    """Existing logits [T, V], which are only read. They count as raw outputs."""

    def __init__(self, logits: Tensor, *, rows: Tensor | None, num_ids: int, dtype: torch.dtype) -> None:
        self._logits, self._rows, self._num_ids, self._dtype = logits, rows, num_ids, dtype

    def saved(self, *, has_pass: bool) -> tuple[Tensor]:
        # Without a pass, the backward does not need the logits, so the caller may free or overwrite them.
        return (self._logits if has_pass else self._logits.new_empty(()).expand(self._logits.shape),)

    def gather(self, entries: Entries) -> Tensor:
        return self._logits[entries.positions, entries.ids].to(self._dtype)

    def raw(self, part: slice) -> Tensor:
        if self._rows is None:
            return self._logits[part, : self._num_ids].to(self._dtype, copy=True)
        return self._logits[:, : self._num_ids].index_select(0, self._rows[part]).to(self._dtype)

    def gradients(
        self,
        wanted: tuple[bool, ...],
        gathered: tuple[Entries, Tensor] | None,
        chunks: Iterable[tuple[slice, Tensor]] | None,
    ) -> tuple[Tensor]:
        grad_TV = torch.zeros(self._logits.shape, dtype=self._logits.dtype, device=self._logits.device)
        rows_TV = grad_TV[:, : self._num_ids]
        for part, grad_CV in chunks or ():
            if self._rows is None:
                rows_TV[part] = grad_CV
            else:
                rows_TV.index_copy_(0, self._rows[part], grad_CV.to(grad_TV.dtype))
        if gathered is not None:
            entries, grad_m = gathered  # no candidate occurs twice
            grad_TV[entries.positions, entries.ids] = grad_m.to(grad_TV.dtype)
        return (grad_TV,)
