"""Support: candidate sets as index tensors on a device, cut to one vocabulary shard.

Shape legend: T positions, n candidates in all, A positions with a choice (two candidates or more),
m candidates of those positions that this shard holds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError
from sglang_topp.replay.parallel import first_true

__all__ = ["Shard", "Support", "check_targets"]


@dataclass(frozen=True)
class Shard:
    """The ids `start <= id < stop` that this rank holds, of a vocabulary of `vocab_size`.

    `vocab_size` is None where other ranks hold the rest and the caller did not name its size. A
    padded vocabulary ends before its last shard does: `real` is the number of ids held that exist.
    """

    start: int
    stop: int
    vocab_size: int | None

    @classmethod
    def of(cls, held: int, start: int, vocab_size: int | None, *, parallel: bool) -> Shard:
        """The shard of a rank that holds `held` rows or columns from id `start` on."""
        if start < 0:
            raise InvalidInputError(f"vocab_start: got {start}, expected 0 or more")
        if vocab_size is not None and vocab_size < 1:
            raise InvalidInputError(f"vocab_size: got {vocab_size}, expected 1 or more")
        if not parallel:
            stop = start + held
            vocab_size = stop if vocab_size is None else min(vocab_size, stop)
        return cls(start, start + held, vocab_size)

    @property
    def real(self) -> int:
        """Number of ids held that are no padding."""
        stop = self.stop if self.vocab_size is None else min(self.stop, self.vocab_size)
        return max(0, stop - self.start)


@dataclass(frozen=True)
class Support:
    """Which logits a replay needs: the candidates of every position that had a choice.

    A position with one candidate has log-prob 0 whatever the policy, and an empty span is not
    scored: neither has entries here, so neither costs anything. (Where more can be drawn than the
    candidates, one of them is a choice too: `smallest` of `of` is 1 there.)

    All tensors are int64 (bool for `is_target`), on the device that they were made for.
    """

    num_positions: int
    """T."""
    span_offsets: Tensor
    """[T + 1]: the offsets of the candidate sets, all of them."""
    rows: Tensor
    """[A]: positions with a choice, ascending."""
    sizes: Tensor
    """[A]: their set sizes, over all shards."""
    segment: Tensor
    """[m]: for each entry, its index into `rows`; ascending."""
    ids: Tensor
    """[m]: for each entry, its column in this shard (token id - start)."""
    entries: Tensor
    """[m]: for each entry, its place in the flat arrays of the candidate sets."""
    offsets: Tensor
    """[A + 1]: the span of each of `rows` in the three above; may be empty on a shard."""
    is_target: Tensor
    """[m]: whether the entry is its position's target."""

    @functools.cached_property
    def positions(self) -> Tensor:
        """int64 [m]: the position of each entry."""
        return self.per_entry(self.rows)

    def per_entry(self, values_A: Tensor) -> Tensor:
        """[m]: for each entry, the value of its position.

        By `index_select`: indexing starts every thread, which costs more than thousands of entries do.
        """
        return values_A.index_select(0, self.segment)

    @classmethod
    def of(cls, candidates: CandidateSets, targets: Tensor, shard: Shard, *, smallest: int = 2) -> Support:
        """Check `targets` (integers) against the sets and lay both out on the targets' device.

        Positions with fewer than `smallest` candidates have no entries.

        Raises:
            InvalidInputError: there are not T targets, or one is not in its set.
            InvalidCandidateSetsError: an id lies outside the vocabulary.
        """
        num_positions = len(candidates)
        if len(targets) != num_positions:
            raise InvalidInputError(
                f"candidates: got {num_positions} positions for {len(targets)} targets;"
                " select both with the same layout.Rows"
            )
        _check_ids(candidates, shard)
        device = targets.device
        offsets = torch.tensor(candidates.offsets, device=device)
        token_ids = torch.tensor(candidates.token_ids, device=device)  # int32: half of what is to be sent
        sizes = offsets.diff()
        position = torch.repeat_interleave(sizes, output_size=len(token_ids))
        is_target = token_ids == targets.index_select(0, position)
        _check_membership(candidates, targets, offsets, is_target)

        has_choice = sizes >= smallest
        rows = has_choice.nonzero().squeeze(1)
        kept = has_choice.index_select(0, position) & (token_ids >= shard.start) & (token_ids < shard.stop)
        entries = kept.nonzero().squeeze(1)
        segment = (has_choice.cumsum(0) - 1).index_select(0, position.index_select(0, entries))
        return cls(
            num_positions=num_positions,
            span_offsets=offsets,
            rows=rows,
            sizes=sizes[rows],
            segment=segment,
            ids=token_ids.index_select(0, entries).long() - shard.start,
            entries=entries,
            offsets=torch.searchsorted(segment, torch.arange(len(rows) + 1, device=device)),
            is_target=is_target.index_select(0, entries),
        )


def check_targets(targets: Tensor) -> None:
    """Raise InvalidInputError unless targets are integers [T]."""
    if targets.ndim != 1 or targets.is_floating_point() or targets.dtype == torch.bool:
        raise InvalidInputError(
            f"targets: got shape {tuple(targets.shape)} and dtype {targets.dtype}, expected integers [T]"
        )


def _check_ids(candidates: CandidateSets, shard: Shard) -> None:
    ids, stop = candidates.token_ids, shard.vocab_size
    if not len(ids) or stop is None:
        return
    outside = ids >= stop
    if outside.any():
        entry = int(outside.argmax())
        position = int(candidates.offsets.searchsorted(entry, side="right")) - 1
        raise InvalidCandidateSetsError(
            "token_ids", f"got {ids[entry]} at position {position}, outside the vocabulary of {stop}"
        )


def _check_membership(candidates: CandidateSets, targets: Tensor, offsets: Tensor, is_target: Tensor) -> None:
    seen = torch.zeros(len(is_target) + 1, dtype=torch.int64, device=is_target.device)
    torch.cumsum(is_target, 0, out=seen[1:])
    hits = seen[offsets[1:]] - seen[offsets[:-1]]
    position = first_true((hits == 0) & (offsets.diff() > 0))
    if position is not None:
        raise InvalidInputError(
            f"targets: {int(targets[position])} at position {position} is not among the"
            f" {candidates.sizes[position]} candidates there; its log-prob would be minus infinity"
        )
