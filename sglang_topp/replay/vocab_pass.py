"""One pass over logits of the whole vocabulary, a chunk of rows at a time: picked logits and softmaxes.

A pass reads its logits from a source, which computes them from hidden states or copies them. The forward
keeps a few sums per row, and the backward computes the logits again, unless one chunk holds all rows. Each
softmax of a pass is over all ids, over each row's candidates, or over all ids that are no candidates.

Shape legend: R rows, V ids of this rank without padding, C rows of one chunk or of a slice of it, k picked
logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.candidate_index import RowIds
from sglang_topp.replay.logit_scaling import LogitTransform
from sglang_topp.replay.vocab_shards import reduce_max, reduce_sum

__all__ = ["Softmax", "SoftmaxOver", "VocabPass", "VocabSource", "check_chunk_rows"]

# For the entropy, the code multiplies each log-prob by its probability. Before, it raises log-probs below
# `_LOWEST` to `_LOWEST`, because 0 times `_LOWEST` is 0, but 0 times -inf is NaN. This changes no result,
# because `exp(_LOWEST)` is 0 in float32 and float64.
_LOWEST = -1.0e4
# A chunk is worked on in slices of rows. On a CPU, the temporary tensors of a slice fit in the cache. On a
# GPU, a slice is enough work to amortize the kernel launches.
_SLICE_BYTES_CPU = 1 << 20
_SLICE_BYTES = 1 << 26


class VocabSource(Protocol):
    """Where a pass reads the raw outputs of an LM head, and where their gradients go."""

    def raw(self, part: slice) -> Tensor:
        """Return the raw outputs [C, V] of some rows, which the caller may overwrite."""

    def add(self, part: slice, grad_CV: Tensor) -> None:
        """Add the gradient of the raw outputs of some rows."""


@dataclass(frozen=True, eq=False)
class SoftmaxOver:
    """The ids that a softmax of a pass is over: "all", only the `candidates`, or all but the `candidates`."""

    ids: Literal["all", "candidates", "others"]
    candidates: RowIds | None = None

    def dropped(self, rows: slice, num_ids: int) -> Tensor | None:
        """Return bool [C, V], True at the ids of some rows that the softmax leaves out, or None."""
        if self.candidates is None:
            return None
        mask = self.candidates.mask(rows, num_ids)
        return mask if self.ids == "others" else mask.logical_not_()


@dataclass(frozen=True, eq=False)
class Softmax:
    """The results of one softmax. Each tensor has one value per row."""

    logprobs: Tensor
    """[R]: the log-prob of each row's target."""
    entropy: Tensor | None
    log_total: Tensor
    """[R]: the log-sum-exp of each row's logits, -inf if none is above -inf."""

    def take(self, rows: Tensor) -> Softmax:
        """Return the results of some rows."""
        entropy = None if self.entropy is None else self.entropy.index_select(0, rows)
        return Softmax(self.logprobs.index_select(0, rows), entropy, self.log_total.index_select(0, rows))


class VocabPass:
    """The specification of a pass: which values to compute. `forward` and `backward` run it."""

    def __init__(
        self,
        num_rows: int,
        num_ids: int,
        *,
        softmaxes: list[SoftmaxOver],
        columns: Tensor | None,
        picks: RowIds | None,
        entropy: bool,
        transform: LogitTransform,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
        chunk_rows: int | None,
        chunk_bytes: int,
    ) -> None:
        """Describe a pass over `num_rows` rows.

        Args:
            softmaxes: the softmaxes to compute.
            columns: int64 [R], the column of each row's target on this rank, or -1; None without targets.
            picks: the columns of the raw outputs to return, or None.
            entropy: also compute the entropy of each softmax.
            transform: what converts the raw outputs of these rows to logits.
            dtype: the dtype of sums and results.
            chunk_rows: the rows of a chunk, or None for as many as take `chunk_bytes`.
        """
        row_bytes = max(1, num_ids * dtype.itemsize)
        self.num_rows, self.num_ids = num_rows, num_ids
        self.parts = _slices(num_rows, chunk_rows or max(1, chunk_bytes // row_bytes))
        self.softmaxes, self.columns, self.picks, self.entropy = softmaxes, columns, picks, entropy
        self.transform, self.dtype, self.group = transform, dtype, group
        self._row_bytes = row_bytes

    def forward(
        self, source: VocabSource, device: torch.device
    ) -> tuple[Tensor | None, list[Softmax], Tensor]:
        """Return the picked raw outputs [k], the softmaxes, and the last chunk's logits."""
        picked = None
        if self.picks is not None:
            picked = torch.empty(len(self.picks.ids), dtype=self.dtype, device=device)
        sums = [_Sums(self.num_rows, self.dtype, device, entropy=self.entropy) for _ in self.softmaxes]
        logits = torch.empty(0, dtype=self.dtype, device=device)
        for part in self.parts:
            logits = source.raw(part)
            if self.picks is not None and picked is not None:
                places = self.picks.places(part, self.num_ids)
                picked[self.picks.entries(part)] = logits.view(-1).index_select(0, places)
            if not self.softmaxes or not self.num_ids:
                continue
            self.transform.of_rows_(logits, part)
            for rows, here in self._slices_of(part, logits):
                for softmax, each in zip(self.softmaxes, sums, strict=True):
                    values = _without(logits[rows], softmax.dropped(here, self.num_ids))
                    each.add(here, values, None if self.columns is None else self.columns[here])
        return picked, [each.finish(self.group) for each in sums], logits

    def backward(
        self,
        source: VocabSource,
        kept: Tensor | None,
        softmaxes: list[Softmax],
        grad_picked: Tensor | None,
        grads: list[tuple[Tensor | None, Tensor | None, Tensor | None]],
    ) -> None:
        """Give the gradient of the raw outputs to the source.

        Args:
            kept: the logits that `forward` returned if they are of all rows, or None. They are overwritten.
            softmaxes: the results of `forward`.
            grad_picked: [k], the gradient of the picked raw outputs.
            grads: for each softmax, the gradients of `logprobs`, `entropy`, and `log_total`.
        """
        terms = [
            _gradient_of(result, *grad, self.columns) for result, grad in zip(softmaxes, grads, strict=True)
        ]
        for part in self.parts:
            if kept is not None:
                chunk = kept
            elif self.softmaxes:
                chunk = self.transform.of_rows_(source.raw(part), part)
            elif grad_picked is not None:
                shape = part.stop - part.start, self.num_ids
                chunk = torch.zeros(shape, dtype=self.dtype, device=grad_picked.device)
            else:
                continue
            for rows, here in self._slices_of(part, chunk) if self.softmaxes and self.num_ids else ():
                logits = chunk[rows]
                slope = self.transform.softcap_slope(logits, here)
                total, *others = [
                    term(here, _without(logits, softmax.dropped(here, self.num_ids)))
                    for softmax, term in zip(self.softmaxes, terms, strict=True)
                ]
                for other in others:
                    total += other
                logits.copy_(self.transform.backward_rows_(total, slope, here))
            if self.picks is not None and grad_picked is not None:
                places = self.picks.places(part, self.num_ids)
                chunk.view(-1).index_add_(0, places, grad_picked[self.picks.entries(part)])
            source.add(part, chunk)

    def _slices_of(self, part: slice, chunk: Tensor) -> list[tuple[slice, slice]]:
        """Return slices that cover a chunk: the rows within the chunk, and the same rows of the pass."""
        num_bytes = _SLICE_BYTES_CPU if chunk.is_cpu else _SLICE_BYTES
        return [
            (rows, slice(part.start + rows.start, part.start + rows.stop))
            for rows in _slices(len(chunk), max(1, num_bytes // self._row_bytes))
        ]


def check_chunk_rows(chunk_rows: int | None) -> None:
    """Raise InvalidInputError unless `chunk_rows` is positive or None."""
    if chunk_rows is not None and chunk_rows < 1:
        raise InvalidInputError(f"chunk_rows: got {chunk_rows}, expected 1 or more")


def _slices(num_rows: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _without(logits_CV: Tensor, dropped: Tensor | None) -> Tensor:
    return logits_CV if dropped is None else logits_CV.masked_fill(dropped, -torch.inf)


class _Sums:
    """The sums of one softmax on this rank. `finish` combines those of all ranks."""

    def __init__(self, num_rows: int, dtype: torch.dtype, device: torch.device, *, entropy: bool) -> None:
        def filled(value: float) -> Tensor:
            return torch.full((num_rows,), value, dtype=dtype, device=device)

        self.peak_R, self.total_R, self.target_R = filled(-torch.inf), filled(0.0), filled(0.0)
        self.moment_R = filled(0.0) if entropy else None

    def add(self, here: slice, logits_CV: Tensor, column_C: Tensor | None) -> None:
        """Add up the logits of some rows."""
        peak_C = logits_CV.amax(dim=1)
        self.peak_R[here] = peak_C
        shifted_CV = logits_CV - torch.where(peak_C.isneginf(), 0.0, peak_C)[:, None]
        weight_CV = shifted_CV.exp()
        self.total_R[here] = weight_CV.sum(dim=1)
        if self.moment_R is not None:
            self.moment_R[here] = torch.linalg.vecdot(weight_CV, shifted_CV.clamp_(min=_LOWEST))
        if column_C is not None:
            target_C = logits_CV.gather(1, column_C.clamp(min=0)[:, None]).squeeze(1)
            self.target_R[here] = torch.where(column_C >= 0, target_C, 0.0)

    def finish(self, group: dist.ProcessGroup | None) -> Softmax:
        """Combine the sums of all ranks, with two reductions."""
        peak_R = reduce_max(self.peak_R.clone(), group)
        drop_R = self.peak_R - peak_R
        # If all logits of a rank are -inf, the rank adds nothing to the sums.
        is_empty_R = self.peak_R.isneginf()
        sums = [torch.where(is_empty_R, 0.0, self.total_R * drop_R.exp()), self.target_R]
        if self.moment_R is not None:
            moment_R = (self.moment_R + self.total_R * drop_R) * drop_R.exp()
            sums.append(torch.where(is_empty_R, 0.0, moment_R))
        total_R, target_R, *moments = reduce_sum(torch.stack(sums), group).unbind()
        log_total_R = total_R.log()
        entropy_R = log_total_R - moments[0] / total_R if moments else None
        return Softmax(target_R - peak_R - log_total_R, entropy_R, peak_R + log_total_R)


def _gradient_of(
    result: Softmax,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_log_total: Tensor | None,
    columns: Tensor | None,
) -> Callable[[slice, Tensor], Tensor]:
    """Return a function that computes the gradient [C, V] of one softmax in the logits of some rows.

    ::

        d/dz_i = grad_logprob * [i is target]
               + p_i * (grad_log_total - grad_logprob - grad_entropy * (log p_i + H))

    Here, `p` is the softmax of a row's logits `z`, and `H` is the entropy of `p`.
    """
    # Where no logit is above -inf: exp(-inf - 0) is 0, but exp(-inf + inf) is NaN.
    is_empty_R = result.log_total.isneginf()
    log_total_R = torch.where(is_empty_R, 0.0, result.log_total)
    entropy_R = None if result.entropy is None else torch.where(is_empty_R, 0.0, result.entropy)
    factor_R = torch.zeros_like(log_total_R)
    if grad_log_total is not None:
        factor_R = factor_R + grad_log_total
    if grad_logprobs is not None:
        factor_R = factor_R - grad_logprobs

    def gradient(here: slice, logits_CV: Tensor) -> Tensor:
        log_p_CV = logits_CV - log_total_R[here, None]
        p_CV = log_p_CV.exp()
        if grad_entropy is None or entropy_R is None:
            p_CV *= factor_R[here, None]
        else:
            log_p_CV.clamp_(min=_LOWEST).add_(entropy_R[here, None]).mul_(-grad_entropy[here, None])
            p_CV *= log_p_CV.add_(factor_R[here, None])
        if grad_logprobs is not None and columns is not None:
            column_C = columns[here]
            grad_C = torch.where(column_C >= 0, grad_logprobs[here], 0.0)
            p_CV.scatter_add_(1, column_C.clamp(min=0)[:, None], grad_C[:, None])
        return p_CV

    return gradient
