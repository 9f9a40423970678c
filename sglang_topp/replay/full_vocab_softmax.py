"""Compute log-probs, entropy, and gradients of a softmax over the whole vocabulary, chunk by chunk.

`full_vocab_head` and `logprobs_from_logits` compute their softmax with this module. To save memory, the
forward pass stores only a few sums per position. The backward pass handles one chunk of positions after the
other. `full_vocab_head` recomputes the logits of the chunk, and `logprobs_from_logits` copies them from the
caller's logits. `to_gradient` then overwrites these logits with their gradient.

Shape legend: T positions, C positions of one chunk, V ids held by this rank without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp.errors import InvalidInputError
from sglang_topp.replay.vocab_shard_candidates import Shard
from sglang_topp.replay.vocab_shard_reductions import first_true, reduce_max, reduce_sum

__all__ = ["RowSums", "Softmax", "local_targets", "row_parts", "rows_per_chunk", "some_rows", "to_gradient"]

# For the entropy, the code subtracts a row's maximum or log-sum-exp from the row's logits, and multiplies
# each resulting value by its exponential. Before the multiplication, the code raises values below `_LOWEST`
# to `_LOWEST`, because 0 times `_LOWEST` is 0, but 0 times -inf is NaN. Raising these values changes no
# result, because `exp(_LOWEST)` is 0 in float32 and float64.
_LOWEST = -1.0e4
# `some_rows` splits rows of logits into slices. The exponentials of a slice with several rows take at most
# this many bytes. On a CPU, the exponentials of one slice then fit in the cache. On a GPU, one slice is
# enough work to amortize the kernel launches.
_EXP_BYTES_CPU = 1 << 21
_EXP_BYTES = 1 << 26


def row_parts(num_rows: int, chunk_rows: int) -> list[slice]:
    """Split `num_rows` rows into slices of `chunk_rows` rows. The last slice may have fewer rows."""
    return [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]


def rows_per_chunk(chunk_rows: int | None, row_bytes: int, chunk_bytes: int) -> int:
    """Return the number of rows per chunk, at least 1.

    If the caller passes `chunk_rows`, the function returns `chunk_rows`. Otherwise, the function returns how
    many rows fit in `chunk_bytes` bytes. Each row takes `row_bytes` bytes.
    """
    if chunk_rows is None:
        return max(1, chunk_bytes // max(1, row_bytes))
    if chunk_rows < 1:
        raise InvalidInputError(f"chunk_rows: got {chunk_rows}, expected 1 or more")
    return chunk_rows


def some_rows(logits_CV: Tensor) -> list[slice]:
    """Return slices that together cover all rows of `logits_CV`, with at least one row per slice.

    The exponentials of a slice's logits take at most `_EXP_BYTES` bytes (`_EXP_BYTES_CPU` on a CPU), unless
    the slice is a single row.
    """
    row_bytes = logits_CV.shape[1] * logits_CV.itemsize
    return row_parts(
        len(logits_CV), rows_per_chunk(None, row_bytes, _EXP_BYTES_CPU if logits_CV.is_cpu else _EXP_BYTES)
    )


def local_targets(targets_T: Tensor, shard: Shard, group: dist.ProcessGroup | None) -> Tensor:
    """Return int64 [T]: each target's column on this rank, or -1 if another rank holds the target.

    Raises:
        InvalidInputError: a target id is on no rank, or on several ranks.
    """
    column_T = targets_T.to(torch.int64) - shard.start
    held_T = (column_T >= 0) & (column_T < shard.num_ids)
    position = first_true(reduce_sum(held_T.to(torch.int32), group) != 1)
    if position is not None:
        raise InvalidInputError(
            f"targets: {int(targets_T[position])} at position {position} is not in the vocabulary"
            " (or the ranks' shards overlap)"
        )
    return torch.where(held_T, column_T, -1)


@dataclass(frozen=True)
class Softmax:
    """The results of a softmax over the whole vocabulary. Each tensor [T] has one value per position."""

    log_total: Tensor
    """The log-sum-exp of each position's logits."""
    logprobs: Tensor
    entropy: Tensor | None
    """The entropy of each position's softmax, or None if no entropy was requested."""


class RowSums:
    """Softmax sums of this rank's logits, computed per chunk. `finish` combines the sums of all ranks."""

    def __init__(
        self, num_positions: int, dtype: torch.dtype, device: torch.device, *, entropy: bool
    ) -> None:
        def zeros() -> Tensor:
            return torch.zeros(num_positions, dtype=dtype, device=device)

        self.peak_T, self.total_T, self.target_T = zeros(), zeros(), zeros()
        self.moment_T = zeros() if entropy else None
        self.peak_T.fill_(-torch.inf)

    @property
    def subtracted_T(self) -> Tensor:
        """[T]: the value that `add` subtracts from each row.

        The value is the row's highest logit on this rank, or 0 if all of the row's logits are -inf.
        """
        return torch.where(self.peak_T.isneginf(), 0.0, self.peak_T)

    def add(self, part: slice, logits_CV: Tensor, target_column_C: Tensor) -> None:
        """Compute the softmax sums of the positions in slice `part` from these positions' logits `logits_CV`.

        The method subtracts `subtracted_T` from `logits_CV` in place. The method may then replace elements
        below `_LOWEST` with `_LOWEST`. Neither change affects a probability.
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
            if self.moment_T is not None:
                self.moment_T[here] = torch.linalg.vecdot(weight, shifted.clamp_(min=_LOWEST))

    def finish(self, group: dist.ProcessGroup | None) -> Softmax:
        """Combine the sums of all ranks, with two reductions, and return the softmax.

        Raises:
            InvalidInputError: a log-prob is NaN.
        """
        peak_T = reduce_max(self.peak_T.clone(), group)
        drop_T = self.peak_T - peak_T
        # If all logits of a rank are -inf at a position, the rank adds nothing to the position's sums.
        empty_T = self.peak_T.isneginf()
        sums = [torch.where(empty_T, 0.0, self.total_T * drop_T.exp()), self.target_T]
        if self.moment_T is not None:
            moment_T = (self.moment_T + self.total_T * drop_T) * drop_T.exp()
            sums.append(torch.where(empty_T, 0.0, moment_T))
        total_T, target_T, *moments = reduce_sum(torch.stack(sums), group).unbind()
        log_total_T = total_T.log()
        logprobs_T = target_T - peak_T - log_total_T
        position = first_true(logprobs_T.isnan())
        if position is not None:
            raise InvalidInputError(
                f"the log-prob over the vocabulary at position {position} is NaN: among its logits is a NaN"
                " or +inf, or none is above -inf"
            )
        entropy_T = log_total_T - moments[0] / total_T if moments else None
        return Softmax(peak_T + log_total_T, logprobs_T, entropy_T)


def to_gradient(
    logits_CV: Tensor,
    part: slice,
    log_total_T: Tensor,
    entropy_T: Tensor | None,
    target_column_C: Tensor,
    grad_logprobs_T: Tensor | None,
    grad_entropy_T: Tensor | None,
) -> Tensor:
    """Overwrite `logits_CV`, the logits of the positions in slice `part`, with the gradient of these logits.

    ::

        d/dz_i = grad_logprob * ([i is target] - p_i) - grad_entropy * p_i * (log p_i + H)

    Here, `p` is the softmax of a position's logits `z`, and `H` is the entropy of `p`.
    """
    if logits_CV.shape[1] == 0:
        return logits_CV
    for rows in some_rows(logits_CV):
        here = slice(part.start + rows.start, part.start + rows.stop)
        values = logits_CV[rows].sub_(log_total_T[here, None])
        probability = values.exp()
        if grad_entropy_T is None or entropy_T is None:
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
