"""Find the candidates whose LM-head rows this rank holds, if the vocabulary is split over ranks.

The class `SupportIndex` lists the candidates that this rank holds, position after position. By default, the
index leaves out positions with fewer than two candidates, because such positions always score 0. For a KL
that also counts the ids outside the candidate sets, the index leaves out only positions without candidates.
With the index, the replay functions gather the candidates' LM-head rows or logits. The functions also use the
index for the maximum and the sum over each position's candidates.

Shape legend: T positions, n candidates in all, A positions in the index, m candidates that this rank holds at
the A positions.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_topp.candidates import CandidateSets
from sglang_topp.candidates.torch_tensors import CandidateTensors, to_torch
from sglang_topp.errors import InvalidCandidateSetsError, InvalidInputError
from sglang_topp.replay.vocab_shard_reductions import first_true

__all__ = [
    "Shard",
    "SupportIndex",
    "TargetMatch",
    "check_num_sets",
    "check_targets",
    "refuse_dtensors",
    "sets_on",
]


@dataclass(frozen=True)
class Shard:
    """The ids `start <= id < stop` that this rank holds, out of a vocabulary of `vocab_size` ids.

    `vocab_size` is None if this rank holds only a part of the vocabulary, and the caller did not pass the
    size. The last shard may contain padding, so `num_ids` counts only the ids below `vocab_size`.
    """

    start: int
    stop: int
    vocab_size: int | None

    @classmethod
    def of(cls, num_held: int, start: int, vocab_size: int | None, *, parallel: bool) -> Shard:
        """Build the `Shard` of a rank that holds the ids from `start` to `start + num_held - 1`."""
        if start < 0:
            raise InvalidInputError(f"vocab_start: got {start}, expected 0 or more")
        if vocab_size is not None and vocab_size < 1:
            raise InvalidInputError(f"vocab_size: got {vocab_size}, expected 1 or more")
        if not parallel:
            stop = start + num_held
            vocab_size = stop if vocab_size is None else min(vocab_size, stop)
        return cls(start, start + num_held, vocab_size)

    @property
    def num_ids(self) -> int:
        """The number of ids in the shard, not counting padding."""
        stop = self.stop if self.vocab_size is None else min(self.stop, self.vocab_size)
        return max(0, stop - self.start)


@dataclass(frozen=True, eq=False)
class SupportIndex:
    """The candidates at positions with two or more candidates. Replay needs only these candidates' logits.

    A position with one candidate has log-prob 0 under any policy, and a position with an empty set scores 0
    too. The index therefore leaves out all positions with zero or one candidate. For a KL with a tail, pass
    `smallest=1` to `SupportIndex.of`. The tail is one outcome that stands for all ids outside the set, so a
    position with one candidate has two outcomes.

    All tensors are on one device. All tensors are int64, except for `token_ids`. No tensor of the index
    depends on the targets (the token ids that replay scores). In the descriptions of the fields, a held
    candidate is one of the m candidates that this rank holds.
    """

    token_ids: Tensor
    """int32 [n]: the token ids of all candidate sets."""
    span_offsets: Tensor
    """[T + 1]: the offsets of all candidate sets."""
    rows: Tensor
    """[A]: the positions in the index, ascending."""
    sizes: Tensor
    """[A]: the set sizes of the positions `rows`, over all shards."""
    segment: Tensor
    """[m]: the index in `rows` of each held candidate's position, ascending."""
    positions: Tensor
    """[m]: the position of each held candidate."""
    ids: Tensor
    """[m]: the column of each held candidate in this shard (token id - start)."""
    entries: Tensor
    """[m]: the index of each held candidate in the flat arrays of the candidate sets."""
    offsets: Tensor
    """[A + 1]: the held candidates of position `rows[a]` are `offsets[a]:offsets[a + 1]`, possibly none."""

    @property
    def num_positions(self) -> int:
        """The number of positions T."""
        return len(self.span_offsets) - 1

    @property
    def num_candidates(self) -> int:
        """The number of candidates n."""
        return len(self.token_ids)

    @functools.cached_property
    def by_id(self) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's candidates, sorted by id: `(sorted_ids, order, sorted_positions)`, all int64 [m].

        `order` is the permutation that sorts the field `ids`. In sorted order, candidate `i` has the column
        `sorted_ids[i]` in this shard, and is in the set of the position `sorted_positions[i]` (0 to T - 1).
        """
        ids, order = self.ids.sort(stable=True)
        return ids, order, self.positions.index_select(0, order)

    def per_entry(self, values_A: Tensor) -> Tensor:
        """Return [m]: for each held candidate, the element of `values_A` for the candidate's position.

        The method uses `index_select`, because `values_A[...]` would start all of torch's CPU threads.
        Starting the CPU threads takes longer than copying thousands of numbers.
        """
        return values_A.index_select(0, self.segment)

    @classmethod
    def of(
        cls,
        candidates: CandidateSets | CandidateTensors,
        device: torch.device,
        shard: Shard,
        *,
        smallest: int = 2,
    ) -> tuple[SupportIndex, bool]:
        """Return the `SupportIndex`, and whether the caller should run checks that wait for the device.

        If `candidates` is a `CandidateTensors`, the first call stores the `SupportIndex` in it. Later calls
        with the same `shard` and `smallest` return the stored `SupportIndex`, without work on the host and
        without waiting for the device.

        The second value is False if an earlier call stored the index, and the device is not a CPU. The caller
        should then skip the checks.

        Args:
            device: the device of the index. `candidates` of type `CandidateTensors` must be on this device.
            smallest: the index leaves out positions with fewer than `smallest` candidates.

        Raises:
            InvalidInputError: the `CandidateTensors` are not on `device`.
            InvalidCandidateSetsError: an id is outside the vocabulary.
        """
        sets = sets_on(candidates, device)
        if (index := sets._index_cache.get((shard, smallest))) is not None:
            return index, device.type == "cpu"
        # Turn inference mode off. A later call with gradients may use the cached index, and autograd cannot
        # save inference tensors for the backward pass.
        with torch.inference_mode(False), torch.no_grad():
            index = sets._index_cache[shard, smallest] = _build(sets, shard, smallest)
        return index, True


@dataclass(frozen=True, eq=False)
class TargetMatch:
    """The result of comparing each position's target with the position's candidates."""

    is_target: Tensor
    """bool [m]: for each candidate on this rank, whether the candidate is the target of its position."""
    is_absent: Tensor | None
    """bool [T]: whether each position's set lacks the position's target. None if the host has checked that no
    set lacks its target. A position whose set lacks the target must get NaN scores."""

    @classmethod
    def of(cls, support: SupportIndex, targets: Tensor, *, may_wait: bool) -> TargetMatch:
        """Find each position's target among the position's candidates, and skip positions with empty sets.

        `targets` holds integers [T]. If `may_wait` is True, the method waits for the device, and checks that
        each target is in its set. If `may_wait` is False, the method does not wait. The field `is_absent` of
        the result then shows which sets lack their target.

        Raises:
            InvalidInputError: `may_wait` is True, and a target is not in its set.
        """
        sizes = support.span_offsets.diff()
        wanted = torch.repeat_interleave(targets, sizes, output_size=support.num_candidates)
        is_target = support.token_ids == wanted
        seen = torch.zeros(len(is_target) + 1, dtype=torch.int64, device=is_target.device)
        torch.cumsum(is_target, 0, out=seen[1:])
        is_absent = (seen.index_select(0, support.span_offsets).diff() == 0) & (sizes > 0)
        if may_wait and (position := first_true(is_absent)) is not None:
            raise InvalidInputError(
                f"targets: {int(targets[position])} at position {position} is not among the"
                f" {int(sizes[position])} candidates there; its log-prob would be minus infinity"
            )
        return cls(is_target.index_select(0, support.entries), None if may_wait else is_absent)


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


def check_num_sets(candidates: CandidateSets | CandidateTensors, targets: Tensor) -> None:
    """Raise InvalidInputError unless there is one candidate set for each target."""
    if len(targets) != len(candidates):
        raise InvalidInputError(
            f"candidates: got {len(candidates)} positions for {len(targets)} targets;"
            " select both with the same RowSelection"
        )


def sets_on(candidates: CandidateSets | CandidateTensors, device: torch.device | str) -> CandidateTensors:
    """Return the candidate sets as tensors on `device`.

    If `candidates` is a `CandidateSets`, the result has no log-probs.

    Raises:
        InvalidInputError: the `CandidateTensors` are not on `device`.
    """
    if isinstance(candidates, CandidateSets):
        return to_torch(candidates.token_ids, None, candidates.offsets, candidates.sampled_ids, device=device)
    # An empty tensor's device has a number, such as "cuda:0", even if `device` is only "cuda".
    if candidates.device != torch.empty(0, device=device).device:
        raise InvalidInputError(
            f"candidates: they are on {candidates.device}, expected {device}; call"
            " CandidateSets.to_torch with this device"
        )
    return candidates


def _build(sets: CandidateTensors, shard: Shard, smallest: int) -> SupportIndex:
    token_ids, sizes = sets.token_ids, sets.offsets.diff()
    if shard.vocab_size is not None:
        _check_ids(sets, shard.vocab_size)
    has_choice = sizes >= smallest
    rows = has_choice.nonzero().squeeze(1)
    position = torch.repeat_interleave(sizes, output_size=len(token_ids))
    kept = has_choice.index_select(0, position) & (token_ids >= shard.start) & (token_ids < shard.stop)
    entries = kept.nonzero().squeeze(1)
    positions = position.index_select(0, entries)
    segment = (has_choice.cumsum(0) - 1).index_select(0, positions)
    return SupportIndex(
        token_ids=token_ids,
        span_offsets=sets.offsets,
        rows=rows,
        sizes=sizes[rows],
        segment=segment,
        positions=positions,
        ids=token_ids.index_select(0, entries).long() - shard.start,
        entries=entries,
        offsets=torch.searchsorted(segment, torch.arange(len(rows) + 1, device=token_ids.device)),
    )


def _check_ids(sets: CandidateTensors, vocab_size: int) -> None:
    entry = first_true(sets.token_ids >= vocab_size)
    if entry is not None:
        position = int(torch.searchsorted(sets.offsets, entry, right=True)) - 1
        raise InvalidCandidateSetsError(
            "token_ids",
            f"got {int(sets.token_ids[entry])} at position {position},"
            f" outside the vocabulary of {vocab_size}",
        )
