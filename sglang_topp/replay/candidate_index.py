"""The candidates whose logits this rank computes, and in which order: built once, and used by every pass.

A position with fewer than two candidates scores 0 under any policy, so the index leaves it out. The logits
of most other positions are dot products of single rows of the LM head. A position whose set is a large part
of the vocabulary is *dense*: one matrix product over the whole vocabulary is faster there.

The index does not depend on the policy. The policy, the reference, and every epoch over the same
`CandidateTensors` share one index, with the plans for the sums of the backward pass.

Shape legend: T positions, n candidates in all, A listed positions, m candidates of them that this rank holds,
D dense positions, S segments, V ids of this rank, C rows of a chunk.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.torch_tensors import CandidateTensors, to_torch
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError

__all__ = [
    "DENSE_SHARES",
    "CandidateIndex",
    "DenseShare",
    "Entries",
    "RowIds",
    "Segments",
    "Shard",
    "dense_mask",
    "first_true",
    "mask_logits",
    "reduce_max",
    "reduce_sum",
    "vocab_range",
]


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


def vocab_range(vocab_size: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """Return `(vocab_start, vocab_stop)` of one rank's rows of the LM head, as `torch.chunk` splits them.

    The first shards hold `ceil(vocab_size / tp_size)` ids each. The last shards may hold fewer ids, or none.
    For a head that is padded to a multiple of `tp_size`, pass the padded size.

    Raises:
        InvalidInputError: the rank is not within the group, or a size is not positive.
    """
    if vocab_size < 1 or tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise InvalidInputError(
            f"got vocab_size={vocab_size}, tp_size={tp_size}, tp_rank={tp_rank};"
            " expected positive sizes and 0 <= tp_rank < tp_size"
        )
    width = -(-vocab_size // tp_size)
    return min(tp_rank * width, vocab_size), min((tp_rank + 1) * width, vocab_size)


def reduce_sum(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Sum `tensor` over the ranks of `group` in place, and return it. Without a group, nothing is summed.

    In `torch.distributed`, by contrast, `group=None` means all processes.
    """
    if group is not None:
        dist.all_reduce(tensor, dist.ReduceOp.SUM, group=group)
    return tensor


def reduce_max(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Take the elementwise maximum over the ranks of `group` in place, as `reduce_sum` does the sum."""
    if group is not None:
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


def first_true(mask: Tensor) -> int | None:
    """Return the index of the first True of a 1-D mask, or None.

    The host waits until the device has computed the mask.
    """
    return int(mask.int().argmax()) if bool(mask.any()) else None


@dataclass(frozen=True)
class DenseShare:
    """When a position is dense: if its set is at least this share of the vocabulary.

    A row of logits takes as long as single logits for this share of its ids, and all rows together take as
    long as `more_rows` more rows. So no position is dense if the candidates of all dense positions are fewer
    than this share of `(D + more_rows) * vocab_size`.
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

    @functools.cached_property
    def plans(self) -> dict[int, Any]:
        """The data that a backend derives from the segments once."""
        return {}


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
        if rows == slice(0, len(self.offsets) - 1):
            return slice(0, len(self.columns))
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
    """The candidates at the listed positions, and the dense positions. All tensors are on one device."""

    shard: Shard
    token_ids: Tensor
    """int32 [n]: the token ids of all candidate sets."""
    span_offsets: Tensor
    """int64 [T + 1]: the offsets of all candidate sets."""
    rows: Tensor
    """int64 [A]: the listed positions: those that are not dense, then the dense ones, each ascending."""
    segment: Tensor
    """int64 [m]: the index in `rows` of each listed candidate's position, ascending."""
    offsets: Tensor
    """int64 [A + 1]: position `rows[a]` has the listed candidates `offsets[a]:offsets[a + 1]`."""
    positions: Tensor
    """int64 [m]: the position of each listed candidate."""
    at: Tensor
    """int64 [m]: the index of each listed candidate in the flat arrays of the candidate sets."""
    gathered: Entries
    """The listed candidates at positions that are not dense, which come first."""
    dense_rows: Tensor
    """int64 [D]: the dense positions, ascending. They are listed only if every candidate is asked for."""
    dense_ids: RowIds
    """The candidates of the dense positions; if these are listed, only those that this rank holds."""
    lists_dense: bool
    """Whether any dense position is listed."""

    @property
    def num_positions(self) -> int:
        """The number of positions T."""
        return len(self.span_offsets) - 1

    def per_candidate(self, values: Tensor) -> Tensor:
        """Return [n]: for each candidate of all sets, the element of `values` [T] for its position."""
        sizes = self.span_offsets.diff().int()  # for int32 temporaries
        return torch.repeat_interleave(values, sizes, output_size=len(self.token_ids))

    def sum_candidates(self, values: Tensor) -> Tensor:
        """Return [T]: the sum of `values` [n] over the candidates of each position."""
        return torch.segment_reduce(values, "sum", offsets=self.span_offsets)

    @functools.cached_property
    def occurring_ids(self) -> Tensor:
        """int64 [U]: this rank's columns that are candidates of any listed or dense position, ascending."""
        ids: Tensor = torch.unique(torch.cat([self.gathered.ids, self.dense_ids.columns]))
        return ids[ids < self.shard.num_ids]

    @classmethod
    def of(
        cls,
        sets: CandidateSets | CandidateTensors,
        device: torch.device,
        shard: Shard,
        *,
        smallest: int = 2,
        lists_all: bool = False,
        dense: Literal["head", "logits"] | None = None,
    ) -> tuple[CandidateIndex, bool]:
        """Return the index, and whether the caller should run checks that wait for the device.

        The first call with a `CandidateTensors` stores the index in it. Later calls return the stored index,
        without work on the host and without waiting for the device. If the device is not a CPU, the caller
        should then skip its own checks too.

        Args:
            smallest: the index leaves out positions with fewer candidates.
            lists_all: list the candidates of dense positions too.
            dense: the key of `DENSE_SHARES` that decides which positions are dense, or None if none is.

        Raises:
            InvalidInputError: the `CandidateTensors` are not on `device`.
            InvalidCandidateSetsError: an id is outside the vocabulary, or not on exactly one rank.
        """
        tensors = _sets_on(sets, device)
        key = (shard, smallest, lists_all, dense)
        if (index := tensors._index_cache.get(key)) is not None:
            return index, device.type == "cpu"
        # Turn inference mode off. A later call with gradients may use the stored index, and autograd cannot
        # save inference tensors for the backward pass.
        with torch.inference_mode(False), torch.no_grad():
            index = _build(tensors, shard, smallest, lists_all, dense)
        keys = {key}
        if dense is None or not len(index.dense_rows):
            keys |= {(shard, smallest, lists, share) for lists in (False, True) for share in {dense, None}}
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
        sizes = self.span_offsets.diff()
        narrow = targets.clamp(min=-1, max=torch.iinfo(torch.int32).max).int()
        is_target = self.token_ids == self.per_candidate(narrow)
        num_found = self.sum_candidates(is_target.float())
        is_absent = (num_found == 0) & (sizes > 0)
        if may_wait and (position := first_true(is_absent)) is not None:
            raise InvalidInputError(
                f"targets: {int(targets[position])} at position {position} is not among the"
                f" {int(sizes[position])} candidates there; its log-prob would be minus infinity"
            )
        return is_target.index_select(0, self.at), None if may_wait else is_absent


def dense_mask(
    sets: CandidateSets | CandidateTensors,
    vocab_start: int,
    vocab_local: int,
    device: torch.device | str,
) -> Tensor:
    """Return bool [T, vocab_local], which is True where `vocab_start + column` is a candidate.

    If a row's set is empty, every element of the row is True, because softmax over a row without a True would
    be NaN. The mask is built without a loop and without waiting for the device.
    """
    tensors = _sets_on(sets, device)
    shard = Shard(vocab_start, vocab_start + vocab_local, None)
    every = RowIds(shard.columns(tensors.token_ids), tensors.offsets)
    mask = every.mask(slice(0, len(tensors)), vocab_local)
    return mask.logical_or_((tensors.offsets.diff() == 0)[:, None])


def mask_logits(logits: Tensor, sets: CandidateSets | CandidateTensors, *, vocab_start: int = 0) -> Tensor:
    """Return a copy of `logits` [T, V] with minus infinity outside the candidate sets.

    A row of `logits` whose candidate set is empty is unchanged, because a row of only minus infinity would be
    NaN after softmax, and a loss mask of 0 does not remove a NaN. `score_logits` scores such a row as 0.

    Raises:
        InvalidInputError: `logits` is not [T, V] for the T positions of the sets.
    """
    if logits.ndim != 2 or len(logits) != len(sets):
        raise InvalidInputError(f"logits: got shape {tuple(logits.shape)}, expected [{len(sets)}, V]")
    mask = dense_mask(sets, vocab_start, logits.shape[1], logits.device)
    return logits.masked_fill(mask.logical_not_(), -torch.inf)


def _sets_on(sets: CandidateSets | CandidateTensors, device: torch.device | str) -> CandidateTensors:
    """Return the candidate sets as tensors on `device`, without log-probs if `sets` is a `CandidateSets`.

    Raises:
        InvalidInputError: the `CandidateTensors` are not on `device`.
    """
    if isinstance(sets, CandidateSets):
        return to_torch(sets.token_ids, None, sets.offsets, sets.sampled_ids, device=device)
    # An empty tensor's device has a number, such as "cuda:0", even if `device` is only "cuda".
    if sets.device != torch.empty(0, device=device).device:
        raise InvalidInputError(
            f"sets: they are on {sets.device}, expected {device}; call CandidateSets.to_torch with this"
            " device"
        )
    return sets


def _build(
    sets: CandidateTensors,
    shard: Shard,
    smallest: int,
    lists_all: bool,
    dense: Literal["head", "logits"] | None,
) -> CandidateIndex:
    token_ids, sizes = sets.token_ids, sets.offsets.diff()
    columns, is_listed = shard.columns(token_ids), sizes >= smallest
    _check_ids(sets, columns, is_listed, shard)
    is_dense = _dense_positions(sizes, is_listed, shard, dense)
    rows, at, positions = _entries(is_listed & ~is_dense, columns, sizes, shard.num_ids)
    gathered = Entries(positions, columns.index_select(0, at).long(), len(sizes), shard.stop - shard.start)
    dense_rows = is_dense.nonzero().squeeze(1)
    lists_dense = lists_all and len(dense_rows) > 0
    if lists_dense:
        _, at_dense, positions_dense = _entries(is_dense, columns, sizes, shard.num_ids)
        rows, at = torch.cat([rows, dense_rows]), torch.cat([at, at_dense])
        positions = torch.cat([positions, positions_dense])
        held = torch.searchsorted(positions_dense, dense_rows)
        ends = held.new_full((1,), len(at_dense))
        dense_ids = RowIds(columns.index_select(0, at_dense), torch.cat([held, ends]))
    else:
        if len(dense_rows) < len(sizes):
            columns = columns[torch.repeat_interleave(is_dense, sizes, output_size=len(columns))]
        dense_ids = RowIds(columns, torch.nn.functional.pad(sizes[dense_rows].cumsum(0), (1, 0)))
    number = torch.zeros_like(sizes).index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
    segment = number.index_select(0, positions)
    offsets = _offsets(segment, len(rows))
    _ = dense_ids.stops  # so that no later call waits for them
    return CandidateIndex(
        shard,
        token_ids,
        sets.offsets.clone(),  # not an inference tensor
        rows,
        segment,
        offsets,
        positions,
        at,
        gathered,
        dense_rows,
        dense_ids,
        lists_dense,
    )


def _dense_positions(
    sizes: Tensor, is_listed: Tensor, shard: Shard, dense: Literal["head", "logits"] | None
) -> Tensor:
    """Return bool [T], True at the dense positions."""
    if dense is not None:
        share = DENSE_SHARES[dense]
        smallest = share.share * shard.count_ids(sizes.device)
        is_large = is_listed & (sizes >= smallest)
        num_rows, num_candidates = torch.stack([is_large.sum(), sizes[is_large].sum()]).tolist()
        if num_rows and num_candidates >= smallest * (num_rows + share.more_rows):
            return is_large
    return torch.zeros_like(is_listed)


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
