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
from sglang_topp.replay.vocab_shards import Shard, first_true, reduce_sum

__all__ = [
    "DENSE_SHARES",
    "CandidateIndex",
    "DenseShare",
    "Entries",
    "RowIds",
    "Segments",
    "dense_mask",
    "find_targets",
    "mask_logits",
    "sets_on",
]


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
    rows: Tensor | None = None
    """int64 [S]: the row that each segment is added to, or None if it is `s`."""

    @property
    def out_rows(self) -> Tensor:
        """int64 [S]: the row that each segment is added to."""
        return (
            torch.arange(len(self.offsets) - 1, device=self.offsets.device)
            if self.rows is None
            else self.rows
        )

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
    """Some ids of each row of logits: row `r` has `ids[offsets[r]:offsets[r + 1]]`."""

    ids: Tensor
    offsets: Tensor
    shard: Shard | None = None
    """The ids are token ids, of which the columns are this shard's; or None if they are columns already."""

    @functools.cached_property
    def stops(self) -> list[int]:
        """`offsets` on the host."""
        return self.offsets.tolist()

    def columns(self) -> Tensor:
        """Return the columns of all ids that this shard holds, int64."""
        if self.shard is None:
            return self.ids
        columns = self.ids.long() - self.shard.start
        return columns[(columns >= 0) & (columns < self.shard.num_ids)]

    def entries(self, rows: slice) -> slice:
        """Return the entries of some rows."""
        if rows == slice(0, len(self.offsets) - 1):
            return slice(0, len(self.ids))
        return slice(self.stops[rows.start], self.stops[rows.stop])

    def places(self, rows: slice, num_columns: int) -> Tensor:
        """Return the index of each id in the flattened [C, num_columns] logits of some rows.

        Ids of other shards get the index after the last one.
        """
        ids = self.ids[self.entries(rows)]
        first = torch.arange(rows.stop - rows.start, device=ids.device) * num_columns
        held = None
        if self.shard is not None:
            held = (ids >= self.shard.start) & (ids < self.shard.start + num_columns)
            first -= self.shard.start
        sizes = self.offsets[rows.start : rows.stop + 1].diff().int()  # for int32 temporaries
        places = torch.repeat_interleave(first, sizes, output_size=len(ids)).add_(ids)
        return places if held is None else places.masked_fill_(~held, len(first) * num_columns)

    def mask(self, rows: slice, num_columns: int) -> Tensor:
        """Return bool [C, num_columns], True at the ids of some rows."""
        num_rows = rows.stop - rows.start
        flat = torch.zeros(num_rows * num_columns + 1, dtype=torch.bool, device=self.ids.device)
        flat.index_fill_(0, self.places(rows, num_columns), True)
        return flat[:-1].view(num_rows, num_columns)


@dataclass(frozen=True, eq=False)
class CandidateIndex:
    """The candidates at the listed positions, and the dense positions. All tensors are on one device."""

    token_ids: Tensor
    """int32 [n]: the token ids of all candidate sets."""
    span_offsets: Tensor
    """int64 [T + 1]: the offsets of all candidate sets."""
    rows: Tensor
    """int64 [A]: the listed positions, ascending."""
    segment: Tensor
    """int64 [m]: the index in `rows` of each listed candidate's position, ascending."""
    offsets: Tensor
    """int64 [A + 1]: position `rows[a]` has the listed candidates `offsets[a]:offsets[a + 1]`."""
    at: Tensor
    """int64 [m]: the index of each listed candidate in the flat arrays of the candidate sets."""
    listed: Entries
    """The m listed candidates."""
    dense_rows: Tensor
    """int64 [D]: the dense positions, ascending. They are listed only if every candidate is asked for."""
    dense_ids: RowIds
    """The candidates of the dense positions."""
    is_dense: Tensor | None
    """bool [m]: whether each listed candidate is at a dense position, or None if none is."""

    @property
    def num_positions(self) -> int:
        """The number of positions T."""
        return len(self.span_offsets) - 1

    def per_candidate(self, values: Tensor) -> Tensor:
        """Return [n]: for each candidate of all sets, the element of `values` [T] for its position."""
        sizes = self.span_offsets.diff().int()  # for int32 temporaries
        return torch.repeat_interleave(values, sizes, output_size=len(self.token_ids))

    @functools.cached_property
    def occurring_ids(self) -> Tensor:
        """int64 [U]: this rank's columns that are candidates of any listed or dense position, ascending."""
        ids: Tensor = torch.unique(torch.cat([self.listed.ids, self.dense_ids.columns()]))
        return ids

    @functools.cached_property
    def picked(self) -> RowIds | None:
        """The listed candidates at dense positions, by dense position, or None if all are gathered."""
        if self.is_dense is None:
            return None
        rows = torch.searchsorted(self.dense_rows, self.listed.positions[self.is_dense])
        return RowIds(self.listed.ids[self.is_dense], _offsets(rows, len(self.dense_rows)))

    @functools.cached_property
    def gathered(self) -> Entries:
        """The listed candidates at positions that are not dense."""
        if self.is_dense is None:
            return self.listed
        positions, ids = self.listed.positions[~self.is_dense], self.listed.ids[~self.is_dense]
        return Entries(positions, ids, self.listed.num_positions, self.listed.num_ids)

    @functools.cached_property
    def places(self) -> tuple[Tensor, Tensor] | None:
        """The places of `gathered` and `picked` among the listed candidates, or None if all are gathered."""
        if self.is_dense is None:
            return None
        return (~self.is_dense).nonzero().squeeze(1), self.is_dense.nonzero().squeeze(1)

    @classmethod
    def of(
        cls,
        sets: CandidateSets | CandidateTensors,
        device: torch.device,
        shard: Shard,
        group: dist.ProcessGroup | None,
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
        tensors = sets_on(sets, device)
        key = (shard, group, smallest, lists_all, dense)
        if (index := tensors._index_cache.get(key)) is not None:
            return index, device.type == "cpu"
        # Turn inference mode off. A later call with gradients may use the stored index, and autograd cannot
        # save inference tensors for the backward pass.
        with torch.inference_mode(False), torch.no_grad():
            index = _build(tensors, shard, group, smallest, lists_all, dense)
        keys = {key}
        if dense is None or not len(index.dense_rows):
            keys |= {(*key[:3], lists, share) for lists in (False, True) for share in {dense, None}}
        tensors._index_cache.update(dict.fromkeys(keys, index))
        return index, True


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
    tensors = sets_on(sets, device)
    shard = Shard(vocab_start, vocab_start + vocab_local, None)
    every = RowIds(tensors.token_ids, tensors.offsets, shard)
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


def find_targets(index: CandidateIndex, targets: Tensor, *, may_wait: bool) -> tuple[Tensor, Tensor | None]:
    """Find each position's target among its candidates, and skip positions with empty sets.

    Returns:
        bool [m], whether each listed candidate is the target; and bool [T], whether the set of each position
        lacks its target. The second is None if the host waited for the device and has checked that none does.

    Raises:
        InvalidInputError: `may_wait` is True, and a target is not in its set.
    """
    sizes = index.span_offsets.diff()
    narrow = targets.clamp(min=-1, max=torch.iinfo(torch.int32).max).int()
    is_target = index.token_ids == index.per_candidate(narrow)
    num_found = torch.segment_reduce(is_target.float(), "sum", offsets=index.span_offsets)
    is_absent = (num_found == 0) & (sizes > 0)
    if may_wait and (position := first_true(is_absent)) is not None:
        raise InvalidInputError(
            f"targets: {int(targets[position])} at position {position} is not among the"
            f" {int(sizes[position])} candidates there; its log-prob would be minus infinity"
        )
    return is_target.index_select(0, index.at), None if may_wait else is_absent


def sets_on(sets: CandidateSets | CandidateTensors, device: torch.device | str) -> CandidateTensors:
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
    group: dist.ProcessGroup | None,
    smallest: int,
    lists_all: bool,
    dense: Literal["head", "logits"] | None,
) -> CandidateIndex:
    token_ids, sizes, device = sets.token_ids, sets.offsets.diff(), sets.token_ids.device
    num_positions, num_ids = len(sizes), shard.stop - shard.start
    if shard.vocab_size is not None:
        _check_ids(sets, shard.vocab_size)
    is_listed = sizes >= smallest
    _check_held(sets, is_listed, shard, group)
    is_dense = torch.zeros_like(is_listed)
    if dense is not None:
        share = DENSE_SHARES[dense]
        vocab_size = int(reduce_sum(torch.tensor([shard.num_ids], device=device), group))
        is_large = is_listed & (sizes >= share.share * vocab_size)
        num_rows, num_candidates = torch.stack([is_large.sum(), sizes[is_large].sum()]).tolist()
        if num_rows and num_candidates >= share.share * vocab_size * (num_rows + share.more_rows):
            is_dense = is_large
    dense_rows = is_dense.nonzero().squeeze(1)
    dense_ids = token_ids
    if len(dense_rows) < num_positions:
        dense_ids = token_ids[torch.repeat_interleave(is_dense, sizes, output_size=len(token_ids))]
    dense_offsets = torch.nn.functional.pad(sizes[dense_rows].cumsum(0), (1, 0))
    if not lists_all:
        is_listed &= ~is_dense
    rows = is_listed.nonzero().squeeze(1)
    at = torch.empty(0, dtype=torch.int64, device=device)
    positions = at
    if len(rows):
        position = torch.repeat_interleave(sizes, output_size=len(token_ids))
        is_held = (token_ids >= shard.start) & (token_ids < shard.stop)
        at = (is_held & is_listed.index_select(0, position)).nonzero().squeeze(1)
        positions = position.index_select(0, at)
    segment = (is_listed.cumsum(0) - 1).index_select(0, positions)
    index = CandidateIndex(
        token_ids=token_ids,
        span_offsets=sets.offsets,
        rows=rows,
        segment=segment,
        offsets=_offsets(segment, len(rows)),
        at=at,
        listed=Entries(positions, token_ids.index_select(0, at).long() - shard.start, num_positions, num_ids),
        dense_rows=dense_rows,
        dense_ids=RowIds(dense_ids, dense_offsets, shard),
        is_dense=is_dense.index_select(0, positions) if lists_all and len(dense_rows) else None,
    )
    _ = index.dense_ids.stops, index.gathered, index.places  # so that no later call waits for them
    if index.picked is not None:
        _ = index.picked.stops
    return index


def _offsets(ascending: Tensor, num_segments: int) -> Tensor:
    return torch.searchsorted(ascending, torch.arange(num_segments + 1, device=ascending.device))


def _check_ids(sets: CandidateTensors, vocab_size: int) -> None:
    entry = first_true(sets.token_ids >= vocab_size)
    if entry is not None:
        position = int(torch.searchsorted(sets.offsets, entry, right=True)) - 1
        raise InvalidCandidateSetsError(
            "token_ids",
            f"got {int(sets.token_ids[entry])} at position {position},"
            f" outside the vocabulary of {vocab_size}",
        )


def _check_held(
    sets: CandidateTensors, is_used: Tensor, shard: Shard, group: dist.ProcessGroup | None
) -> None:
    """Raise InvalidCandidateSetsError unless exactly one rank holds each candidate of the used positions."""
    if group is None and shard.start == 0:
        return  # `_check_ids` has checked it
    sizes = sets.offsets.diff()
    held = (sets.token_ids >= shard.start) & (sets.token_ids < shard.stop)
    num_held = reduce_sum(torch.segment_reduce(held.float(), "sum", offsets=sets.offsets), group)
    position = first_true((num_held != sizes) & is_used)
    if position is not None:
        raise InvalidCandidateSetsError(
            "token_ids",
            f"the vocabulary shards hold {int(num_held[position])} of the {int(sizes[position])} candidates"
            f" at position {position}; check vocab_start, and that the shards meet",
        )
