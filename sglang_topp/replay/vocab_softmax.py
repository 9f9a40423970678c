"""The softmax of whole vocabulary rows, shared by what starts from logits and what starts from hidden states.

A few rows at a time: sums of each row are kept, never its probabilities; the backward makes those
again and turns them into the gradient in place.

Shape legend: T positions, C positions of one chunk, V ids held by this rank that are no padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.parallel import first_true, reduce_max, reduce_sum
from sglang_topp.replay.support import Shard

__all__ = ["RowSums", "Softmax", "local_targets", "row_parts", "rows_per_chunk", "some_rows", "to_gradient"]

# exp of anything below is 0 in float32 and float64, so nothing that counts is cut; and unlike -inf it
# may be multiplied by that 0.
_LOWEST = -1.0e4
# Exponentials that are held at one time: a CPU's cache; on a GPU, enough to make up for the launches.
_EXP_BYTES_CPU = 1 << 21
_EXP_BYTES = 1 << 26


def row_parts(num_rows: int, chunk_rows: int) -> list[slice]:
    """The slices of `chunk_rows` rows that cover `num_rows`; the last may be shorter."""
    return [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


def rows_per_chunk(chunk_rows: int | None, row_bytes: int, chunk_bytes: int) -> int:
    """`chunk_rows` if given, else as many rows of `row_bytes` as `chunk_bytes` hold, at least one."""
    if chunk_rows is None:
        return max(1, chunk_bytes // max(1, row_bytes))
    if chunk_rows < 1:
        raise InvalidInputError(f"chunk_rows: got {chunk_rows}, expected 1 or more")
    return chunk_rows


def some_rows(logits_CV: Tensor) -> list[slice]:
    """The slices of rows whose exponentials are held at one time."""
    row_bytes = logits_CV.shape[1] * logits_CV.itemsize
    return row_parts(
        len(logits_CV), rows_per_chunk(None, row_bytes, _EXP_BYTES_CPU if logits_CV.is_cpu else _EXP_BYTES)
    )


def local_targets(targets_T: Tensor, shard: Shard, group: dist.ProcessGroup | None) -> Tensor:
    """int64 [T]: each target's column on this rank, or -1 where another rank holds it.

    Raises:
        InvalidInputError: a target is not held by exactly one rank.
    """
    column_T = targets_T.to(torch.int64) - shard.start
    held_T = (column_T >= 0) & (column_T < shard.real)
    position = first_true(reduce_sum(held_T.to(torch.int32), group) != 1)
    if position is not None:
        raise InvalidInputError(
            f"targets: {int(targets_T[position])} at position {position} is not in the vocabulary"
            " (or the ranks' shards overlap)"
        )
    return torch.where(held_T, column_T, -1)


@dataclass(frozen=True)
class Softmax:
    """Per position: what its log-prob, its entropy and its gradient need. All [T]."""

    log_total: Tensor
    """log-sum-exp of the row."""
    logprobs: Tensor
    entropy: Tensor


class RowSums:
    """Collects the rows of this rank, chunk by chunk; `finish` joins the ranks with two reductions."""

    def __init__(self, num_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        def zeros() -> Tensor:
            return torch.zeros(num_positions, dtype=dtype, device=device)

        self.peak_T, self.total_T, self.moment_T, self.target_T = zeros(), zeros(), zeros(), zeros()
        self.peak_T.fill_(-torch.inf)

    @property
    def subtracted_T(self) -> Tensor:
        """[T]: what `add` subtracts from each row of logits: its highest on this rank."""
        return torch.where(self.peak_T.isneginf(), 0.0, self.peak_T)

    def add(self, part: slice, logits_CV: Tensor, target_column_C: Tensor) -> None:
        """Take in the rows `part`; what is left in `logits_CV` is less by `subtracted_T`.

        Entries far below a row's highest, whose probability is 0, are left as just another such number.
        """
        if logits_CV.shape[1] == 0:
            return
        held_C = target_column_C >= 0
        target_C = logits_CV.gather(1, target_column_C.clamp(min=0)[:, None]).squeeze(1)
        self.target_T[part] = torch.where(held_C, target_C, 0.0)
        for rows in some_rows(logits_CV):
            here = slice(part.start + rows.start, part.start + rows.stop)
            self.peak_T[here] = logits_CV[rows].amax(dim=1)
            shifted = logits_CV[rows].sub_(self.subtracted_T[here, None])
            weight = shifted.exp()
            self.total_T[here] = weight.sum(dim=1)
            self.moment_T[here] = torch.linalg.vecdot(weight, shifted.clamp_(min=_LOWEST))

    def finish(self, group: dist.ProcessGroup | None) -> Softmax:
        """The softmax over all ranks.

        Raises:
            InvalidInputError: a log-prob is NaN.
        """
        peak_T = reduce_max(self.peak_T.clone(), group)
        drop_T = self.peak_T - peak_T
        # A shard whose logits are all -inf has no part in the sums.
        empty_T = self.peak_T.isneginf()
        total_T = torch.where(empty_T, 0.0, self.total_T * drop_T.exp())
        moment_T = torch.where(empty_T, 0.0, (self.moment_T + self.total_T * drop_T) * drop_T.exp())
        total_T, moment_T, target_T = reduce_sum(
            torch.stack([total_T, moment_T, self.target_T]), group
        ).unbind()
        log_total_T = total_T.log()
        logprobs_T = target_T - peak_T - log_total_T
        position = first_true(logprobs_T.isnan())
        if position is not None:
            raise InvalidInputError(
                f"the log-prob over the vocabulary at position {position} is NaN: among its logits is a NaN"
                " or +inf, or none is above -inf"
            )
        return Softmax(peak_T + log_total_T, logprobs_T, log_total_T - moment_T / total_T)


def to_gradient(
    logits_CV: Tensor,
    part: slice,
    log_total_T: Tensor,
    entropy_T: Tensor,
    target_column_C: Tensor,
    grad_logprobs_T: Tensor | None,
    grad_entropy_T: Tensor | None,
) -> Tensor:
    """Turn the rows `part` of the logits, in place, into the gradient with respect to them.

    ::

        d/dz_i = grad_logprob * ([i is target] - p_i) - grad_entropy * p_i * (log p_i + H)
    """
    if logits_CV.shape[1] == 0:
        return logits_CV
    for rows in some_rows(logits_CV):
        here = slice(part.start + rows.start, part.start + rows.stop)
        values = logits_CV[rows].sub_(log_total_T[here, None])
        probability = values.exp()
        if grad_entropy_T is None:
            values.zero_()
        else:
            values.clamp_(min=_LOWEST).add_(entropy_T[here, None]).mul_(grad_entropy_T[here, None])
        if grad_logprobs_T is not None:
            values += grad_logprobs_T[here, None]
        values *= probability.neg_()
    if grad_logprobs_T is not None:
        held_C = (target_column_C >= 0).nonzero().squeeze(1)
        logits_CV[held_C, target_column_C[held_C]] += grad_logprobs_T[part][held_C]
    return logits_CV
