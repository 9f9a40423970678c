"""The candidates whose logits this rank computes, and in which order: built once, and used by every pass.

A position with fewer than two candidates scores 0 under any policy, so the index leaves it out. The logits
of most other positions are dot products of single rows of the LM head. Where the set is a large part of the
vocabulary, one matrix product over the whole vocabulary is faster: a *pass* reads the position. If the scores
of single candidates are not asked for, the position is *dense*: its candidates are masked and not listed.

The index does not depend on the policy. The policy, the reference, and every epoch over the same
`CandidateTensors` share one index, with the plans for the sums of the backward pass.

Shape legend: T positions, n candidates in all, A listed positions, m candidates of them that this rank holds,
D dense positions, R positions that a pass reads, S segments, V ids of this rank, C rows of a chunk.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.torch_tensors import CandidateTensors, share, to_torch
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError


@dataclass(frozen=True)
class Shard:
    """The ids `start <= id < stop` that this rank holds, out of a vocabulary of `vocab_size` ids.

    `vocab_size` is None if this rank holds only a part of the vocabulary, and the caller did not pass the
    size. The last shard may contain padding, so `num_ids` counts only the ids below `vocab_size`. `group` has
    the ranks that hold the vocabulary, or is None if this process holds all of it.
    """

    start: int
    stop: int
    vocab_size: int | None
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, num_held: int, start: int, vocab_size: int | None, group: dist.ProcessGroup | None) -> Shard:
        """Build the `Shard` of a rank that holds the ids from `start` to `start + num_held - 1`."""
        if start < 0:
            raise InvalidInputError(f"vocab_start: got {start}, expected 0 or more")
        if vocab_size is not None and vocab_size < 1:
            raise InvalidInputError(f"vocab_size: got {vocab_size}, expected 1 or more")
        stop = start + num_held
        if group is None:
            vocab_size = stop if vocab_size is None else min(vocab_size, stop)
        return cls(start, stop, vocab_size, group)

    @property
    def num_ids(self) -> int:
        """The number of ids in the shard, not counting padding."""
        stop = self.stop if self.vocab_size is None else min(self.stop, self.vocab_size)
        return max(0, stop - self.start)

    def count_ids(self, device: torch.device) -> int:
        """Return the number of ids on all ranks, not counting padding."""
        if self.group is None:
            return self.num_ids
        return int(reduce_sum(torch.tensor([self.num_ids], device=device), self.group))

    def columns(self, token_ids: Tensor) -> Tensor:
        """Return the column of each id among this rank's, or `num_ids` if another rank holds it."""
        if self.vocab_size is not None and not self.start and self.vocab_size <= self.stop:
            return token_ids  # all are this rank's
        columns = token_ids - self.start
        return columns.masked_fill_((columns < 0) | (columns >= self.num_ids), self.num_ids)


def reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None, op: str = "SUM") -> Tensor:
    """Sum `tensor` over the ranks of `group` in place, and return it. Without a group, nothing is summed.

    In `torch.distributed`, by contrast, `group=None` means all processes.
    """
    if group is not None:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
    return tensor


reduce_max = functools.partial(reduce_sum, op="MAX")


def first_true(mask: Tensor) -> int | None:
    """Return the index of the first True of a 1-D mask, or None.

    The host waits until the device has computed the mask.
    """
    return int(mask.int().argmax()) if bool(mask.any()) else None


Reads: TypeAlias = Literal["dense", "sets", "all"]


@dataclass(frozen=True)
class DenseShare:
    """When a set is large: if it is at least this share of the vocabulary.

    A row of logits takes as long as single logits for this share of its ids, and all rows together take as
    long as `more_rows` more rows. So no set is large if the candidates of all large sets are fewer than this
    share of `(D + more_rows) * vocab_size`.
    """

    share: float
    more_rows: int


# Measured on a CPU. A matrix product reads the whole LM head once for all rows.
DENSE_SHARES = {"head": DenseShare(1 / 8, 16), "logits": DenseShare(3 / 16, 0)}


@dataclass(frozen=True, eq=False)
class Segments:
    """Runs of entries that are summed: segment `s` has the entries `offsets[s]:offsets[s + 1]`."""

    source_rows: Tensor
    """int64 [m]: the row that each entry reads."""
    offsets: Tensor
    """int64 [S + 1]."""
    out_rows: Tensor | None = None
    """int64 [S], ascending: the row that each segment is added to, or None if it is row `s`."""

    plans: dict[int, Any] = field(default_factory=dict, init=False)
    """The data that a backend derives from the segments once."""


@dataclass(frozen=True, eq=False)
class Entries:
    """Candidates as pairs of a row of the hidden states and a row of this rank's LM head."""

    positions: Tensor
    """int64 [m], ascending."""
    ids: Tensor
    """int64 [m]: rows of the LM head (token id - `Shard.start`)."""
    num_positions: int
    num_ids: int

    @functools.cached_property
    def by_position(self) -> Segments:
        """One segment per position, for the gradient of the hidden states."""
        return Segments(self.ids, _offsets(self.positions, self.num_positions))

    @functools.cached_property
    def order(self) -> Tensor:
        """int64 [m]: the permutation that sorts the entries by id, for the gradient of the LM head."""
        return self.ids.argsort(stable=True)

    @functools.cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """The positions and the ids in `order`."""
        return self.positions.index_select(0, self.order), self.ids.index_select(0, self.order)

    @functools.cached_property
    def by_id(self) -> Segments:
        """One segment per row of the LM head, with entries in `order`."""
        positions, ids = self._sorted
        return Segments(positions, _offsets(ids, self.num_ids))

    @functools.cached_property
    def by_distinct_id(self) -> Segments:
        """One segment per id that occurs, with entries in `order`.

        Only the device knows how many ids occur. On a GPU, empty segments follow, up to the largest possible
        number, so that the host does not wait.
        """
        positions, ids = self._sorted
        number = torch.nn.functional.pad((ids[1:] != ids[:-1]).cumsum(0), (min(1, len(ids)), 0))
        most = int(number[-1]) + 1 if ids.is_cpu and len(ids) else min(len(ids), self.num_ids)
        offsets = _offsets(number, most)
        return Segments(positions, offsets, ids.index_select(0, offsets[:-1].clamp(max=len(ids) - 1)))


@dataclass(frozen=True, eq=False)
class RowIds:
    """Some ids of each row of logits: row `r` has `columns[offsets[r]:offsets[r + 1]]`."""

    columns: Tensor
    """`Shard.columns` of the ids."""
    offsets: Tensor

    @functools.cached_property
    def stops(self) -> list[int]:
        """`offsets` on the host."""
        return self.offsets.tolist()

    def entries(self, rows: slice) -> slice:
        """Return the entries of some rows."""
        return slice(self.stops[rows.start], self.stops[rows.stop])

    def places(self, rows: slice, width: int) -> Tensor:
        """Return the index of each id in the flattened [C, width] values of some rows."""
        columns = self.columns[self.entries(rows)]
        first = torch.arange(rows.stop - rows.start, device=columns.device) * width
        sizes = self.offsets[rows.start : rows.stop + 1].diff().int()  # for int32 temporaries
        return torch.repeat_interleave(first, sizes, output_size=len(columns)).add_(columns)

    def mask(self, rows: slice, num_ids: int) -> Tensor:
        """Return bool [C, num_ids], True at the ids of some rows."""
        num_rows, width = rows.stop - rows.start, num_ids + 1  # one more column for the ids of other ranks
        flat = torch.zeros(num_rows * width, dtype=torch.bool, device=self.columns.device)
        return flat.index_fill_(0, self.places(rows, width), True).view(num_rows, width)[:, :num_ids]


@dataclass(frozen=True, eq=False)
class CandidateIndex:
    """The listed candidates, and the positions that a pass over the vocabulary reads, all on one device.

    First are the candidates whose logits are computed one by one, then those that the pass picks.
    """

    token_ids: Tensor
    """int32 [n]: the token ids of all candidate sets."""
    span_offsets: Tensor
    """int64 [T + 1]: the offsets of all candidate sets."""
    sizes: Tensor
    """int32 [T]: the sizes of all candidate sets. As int32, they have int32 temporaries."""
    rows: Tensor
    """int64 [A]: the listed positions."""
    segment: Tensor
    """int64 [m]: the index in `rows` of each listed candidate's position, ascending."""
    offsets: Tensor
    """int64 [A + 1]: position `rows[a]` has the listed candidates `offsets[a]:offsets[a + 1]`."""
    positions: Tensor
    """int64 [m]: the position of each listed candidate."""
    at: Tensor
    """int64 [m]: the index of each listed candidate in the flat arrays of the candidate sets."""
    gathered: Entries | None
    """The candidates whose logits are computed one by one, or None if the pass picks all of them."""
    read_rows: Tensor | None
    """int64 [R], ascending: the positions that the pass reads, or None if it reads all T."""
    num_read: int
    """R. There is no pass if it is 0."""
    picks: RowIds
    """The listed candidates at the positions that the pass reads."""
    read_ids: RowIds
    """The candidate sets of these positions; only what this rank holds of them if no position is dense."""
    dense_rows: Tensor
    """int64 [D], ascending: the dense positions. They are not listed."""

    def per_candidate(self, values: Tensor) -> Tensor:
        """Return [n]: for each candidate of all sets, the element of `values` [T] for its position."""
        return torch.repeat_interleave(values, self.sizes, output_size=len(self.token_ids))

    def sum_candidates(self, values: Tensor) -> Tensor:
        """Return [T]: the sum of `values` [n] over the candidates of each position."""
        return torch.segment_reduce(values, "sum", offsets=self.span_offsets)

    @classmethod
    def of(
        cls,
        sets: CandidateSets | CandidateTensors,
        device: torch.device,
        shard: Shard,
        *,
        dense: DenseShare | None,
        lists_all: bool,
        reads: Reads = "dense",
    ) -> tuple[CandidateIndex, bool]:
        """Return the index, and whether the caller should run checks that wait for the device.

        The first call with a `CandidateTensors` stores the index in it. Later calls return the stored index,
        without work on the host and without waiting for the device. If the device is not a CPU, the caller
        should then skip its own checks too.

        Args:
            dense: when a large set makes its position dense, or None if none does.
            lists_all: list the candidates of large sets too. Then the pass picks them, and no position is
                dense.
            reads: the positions that the pass reads: those of large sets, all positions with a set, or all.
                If it reads all positions with a set, a set of one candidate is listed too.

        Raises:
            InvalidInputError: the `CandidateTensors` are not on `device`.
            InvalidCandidateSetsError: an id is outside the vocabulary, or not on exactly one rank.
        """
        tensors = _sets_on(sets, device)
        key = (shard, dense, lists_all, reads)
        if (index := tensors._index_cache.get(key)) is not None:
            return index, device.type == "cpu"
        # Turn inference mode off. A later call with gradients may use the stored index, and autograd cannot
        # save inference tensors for the backward pass.
        with torch.inference_mode(False), torch.no_grad():
            index = _build(tensors, shard, dense, lists_all, reads)
        keys = {key}
        if not index.num_read:  # no set is large
            keys |= {(shard, share, lists, reads) for lists in (False, True) for share in {dense, None}}
        tensors._index_cache.update(dict.fromkeys(keys, index))
        return index, True

    def find_targets(self, targets: Tensor, *, may_wait: bool) -> tuple[Tensor, Tensor | None]:
        """Find each position's target among its candidates, and skip positions with empty sets.

        Returns:
            bool [m], whether each listed candidate is the target; and bool [T], whether the set of each
            position lacks its target. The second is None if the host waited for the device and has checked
            that none does.

        Raises:
            InvalidInputError: `may_wait` is True, and a target is not in its set.
        """
        narrow = targets.clamp(min=-1, max=torch.iinfo(torch.int32).max).int()
        is_target = self.token_ids == self.per_candidate(narrow)
        num_found = self.sum_candidates(is_target.float())
        is_absent = (num_found == 0) & (self.sizes > 0)
        if may_wait and (position := first_true(is_absent)) is not None:
            raise InvalidInputError(
                f"targets: {int(targets[position])} at position {position} is not among the"
                f" {int(self.sizes[position])} candidates there; its log-prob would be minus infinity"
            )
        return is_target.index_select(0, self.at), None if may_wait else is_absent


def _sets_on(sets: CandidateSets | CandidateTensors, device: torch.device) -> CandidateTensors:
    """Return the candidate sets as tensors on `device`, without log-probs if `sets` is a `CandidateSets`.

    Raises:
        InvalidInputError: the `CandidateTensors` are not on `device`.
    """
    if isinstance(sets, CandidateSets):
        if device.type == "cpu":
            return CandidateTensors(share(sets.token_ids), None, share(sets.offsets), share(sets.sampled_ids))
        return to_torch(sets.token_ids, None, sets.offsets, sets.sampled_ids, device=device)
    # An empty tensor's device has a number, such as "cuda:0", even if `device` is only "cuda".
    if sets.device != torch.empty(0, device=device).device:
        raise InvalidInputError(
            f"sets: they are on {sets.device}, expected {device}; call CandidateSets.to_torch with this"
            " device"
        )
    return sets


def _build(
    sets: CandidateTensors, shard: Shard, dense: DenseShare | None, lists_all: bool, reads: Reads
) -> CandidateIndex:
    token_ids, sizes = sets.token_ids, sets.offsets.diff()
    columns, has_choice = shard.columns(token_ids), sizes >= (1 if reads == "sets" else 2)
    _check_ids(sets, columns, has_choice, shard)
    is_large = _large_sets(sizes, has_choice, shard, dense)
    is_listed = has_choice if lists_all else has_choice & ~is_large
    is_read = {"dense": is_large, "sets": has_choice, "all": torch.ones_like(is_large)}[reads]
    rows, at, positions = _entries(is_listed & ~is_read, columns, sizes, shard.num_ids)
    gathered = Entries(positions, columns.index_select(0, at).long(), len(sizes), shard.stop - shard.start)
    picked_rows, picked_at, picked = _entries(is_listed & is_read, columns, sizes, shard.num_ids)
    rows, at, positions = (
        torch.cat(both) for both in ((rows, picked_rows), (at, picked_at), (positions, picked))
    )
    segment = torch.zeros_like(sizes).index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
    segment = segment.index_select(0, positions)
    read_rows, dense_rows = is_read.nonzero().squeeze(1), (has_choice & ~is_listed).nonzero().squeeze(1)
    num_read = len(read_rows)
    ends = read_rows.new_full((1,), len(sizes))
    picks = read_ids = RowIds(
        columns.index_select(0, picked_at), torch.searchsorted(picked, torch.cat([read_rows, ends]))
    )
    if len(dense_rows):
        if num_read < len(sizes):
            columns = columns[torch.repeat_interleave(is_read, sizes, output_size=len(columns))]
        read_ids = RowIds(columns, torch.nn.functional.pad(sizes[read_rows].cumsum(0), (1, 0)))
    _ = picks.stops, read_ids.stops  # so that no later call waits for them
    return CandidateIndex(
        token_ids,
        sets.offsets,
        sizes.int(),
        rows,
        segment,
        _offsets(segment, len(rows)),
        positions,
        at,
        None if num_read and not len(gathered.ids) else gathered,
        None if num_read == len(sizes) else read_rows,
        num_read,
        picks,
        read_ids,
        dense_rows,
    )


def _large_sets(sizes: Tensor, has_choice: Tensor, shard: Shard, dense: DenseShare | None) -> Tensor:
    """Return bool [T], True at the positions whose sets are a large part of the vocabulary."""
    if dense is not None:
        smallest = dense.share * shard.count_ids(sizes.device)
        is_large = has_choice & (sizes >= smallest)
        num_rows, num_candidates = torch.stack([is_large.sum(), sizes[is_large].sum()]).tolist()
        if num_rows and num_candidates >= smallest * (num_rows + dense.more_rows):
            return is_large
    return torch.zeros_like(has_choice)


def _entries(is_row: Tensor, columns: Tensor, sizes: Tensor, num_ids: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions where `is_row` is True, and `at` and `positions` of their candidates."""
    rows = is_row.nonzero().squeeze(1)
    if not len(rows):
        return rows, rows, rows
    position = torch.repeat_interleave(sizes, output_size=len(columns))
    at = ((columns < num_ids) & is_row.index_select(0, position)).nonzero().squeeze(1)
    return rows, at, position.index_select(0, at)


def _offsets(ascending: Tensor, num_segments: int) -> Tensor:
    return torch.searchsorted(ascending, torch.arange(num_segments + 1, device=ascending.device))


def _check_ids(sets: CandidateTensors, columns: Tensor, is_used: Tensor, shard: Shard) -> None:
    """Raise InvalidCandidateSetsError unless exactly one rank holds each candidate of the used positions."""
    size = shard.vocab_size
    if size is not None and (entry := first_true(sets.token_ids >= size)) is not None:
        position = int(torch.searchsorted(sets.offsets, entry, right=True)) - 1
        raise InvalidCandidateSetsError(
            "token_ids",
            f"got {int(sets.token_ids[entry])} at position {position}, outside the vocabulary of {size}",
        )
    if shard.group is None and not shard.start:
        return
    held = (columns < shard.num_ids).float()
    num_held = reduce_sum(torch.segment_reduce(held, "sum", offsets=sets.offsets), shard.group)
    sizes = sets.offsets.diff()
    if (wrong := first_true((num_held != sizes) & is_used)) is not None:
        raise InvalidCandidateSetsError(
            "token_ids",
            f"the vocabulary shards hold {int(num_held[wrong])} of the {int(sizes[wrong])} candidates"
            f" at position {wrong}; check vocab_start, and that the shards meet",
        )
