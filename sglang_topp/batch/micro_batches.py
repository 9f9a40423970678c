"""Split a batch into micro-batches within a token budget, assign them to ranks, and join their results.

Shape legend: B is the number of rows of a batch. n samples are packed; a sample's footprint is its number of
tokens, including padding.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sglang_topp.batch.nested import NestedBatch, nest_batch, unnest_batch
from sglang_topp.candidates.csr_operations import first_true, integer_array
from sglang_topp.errors import InvalidInputError, describe


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """The rows of every rank's micro-batches, as returned by `split_micro_batches`.

    Attributes:
        rows: `rows[rank][k]` is int64: the indices of the batch's rows in the rank's k-th micro-batch, in
            ascending order. Every rank has the same number of micro-batches. A micro-batch is empty only if
            there are fewer rows than micro-batches.
    """

    rows: tuple[tuple[NDArray[np.int64], ...], ...]

    def __len__(self) -> int:
        """Return the number of micro-batches per rank."""
        return len(self.rows[0])

    def of(self, batch: Any, rank: int) -> Iterator[Any]:
        """Yield the micro-batches of `rank`, in order.

        Args:
            batch: a batch of B rows: a NestedBatch, or a dict of tensors, lists, and BatchCandidateSets.

        Raises:
            InvalidInputError: the batch has more or fewer rows than the `lengths` passed to
                `split_micro_batches`.
        """
        nested = batch if isinstance(batch, NestedBatch) else nest_batch(batch, {})
        num_rows = sum(len(rows) for of_rank in self.rows for rows in of_rank)
        if len(nested) != num_rows:
            raise InvalidInputError(f"batch: got {len(nested)} rows, expected {num_rows}, one per length")
        of_same_type = unnest_batch if nested is not batch else lambda part: part
        return (of_same_type(nested.take(rows)) for rows in self.rows[rank])

    def undo(self, results: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Join the results of the micro-batches in the order of the batch's rows.

        Args:
            results: `results[rank][k]` is [rows, ...], the results of the rank's k-th micro-batch.

        Returns:
            [B, ...], one result per row of the batch.

        Raises:
            InvalidInputError: a result is missing, or has more or fewer rows than its micro-batch.
        """
        got, expected = ([[len(part) for part in rank] for rank in parts] for parts in (results, self.rows))
        if got != expected:
            raise InvalidInputError(
                f"results: got {describe(got)} rows, expected {describe(expected)} in the micro-batches"
            )
        order = np.concatenate([rows for rank in self.rows for rows in rank])
        joined = torch.cat([part for rank in results for part in rank])
        return joined[torch.from_numpy(np.argsort(order)).to(joined.device)]


def split_micro_batches(lengths: ArrayLike, max_tokens: int, *, ranks: int = 1) -> MicroBatches:
    """Split B rows into micro-batches of at most `max_tokens` tokens.

    `deal_bins` packs the rows. Every rank gets about the same number of tokens. Every rank gets
    the same number of micro-batches, because all ranks must take part in collective operations.

    Args:
        lengths: integers [B], the number of tokens that the trainer processes in each row. If the trainer
            removes padding, `lengths[i]` is row i's length without padding. If the trainer keeps padding,
            `lengths[i]` is the batch's width for every row.
        max_tokens: the maximum number of tokens in a micro-batch.
        ranks: the number of data-parallel ranks.

    Raises:
        InvalidInputError: there are no rows, a row is longer than `max_tokens`, or `ranks` is below 1.
    """
    tokens = integer_array("lengths", lengths, "integers, one per row").astype(np.int64)
    if not len(tokens):
        raise InvalidInputError("lengths: got no rows, expected at least one")
    shards = deal_bins(tokens, max_tokens, ranks)
    return MicroBatches(tuple(tuple(np.sort(np.array(bin_, np.int64)) for bin_ in shard) for shard in shards))


def take_batch(batch: Any, rows: ArrayLike) -> Any:
    """Return the given rows of a batch, in the given order.

    The result includes the rows' candidate sets. Candidate sets and padded tensors are returned as views if
    the rows are consecutive.

    Args:
        batch: a NestedBatch, or a dict that `nest_batch` accepts, with tensors on any device. The result has
            the same type as `batch`. An entry that does not have one element per row is kept unchanged.
        rows: integers, from 0 to B - 1.

    Raises:
        InvalidInputError: entries differ in their number of rows, or an index is out of range.
    """
    return (
        batch.take(rows) if isinstance(batch, NestedBatch) else unnest_batch(nest_batch(batch, {}).take(rows))
    )


# -- bin packing --------------------------------------------------------------------------------------------


def first_fit_decreasing(footprints: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Put each sample, from the largest to the smallest, into the first bin with room.

    Samples of equal size keep their order.

    Args:
        footprints: int64 [n], each sample's number of tokens with padding, from 0 to `capacity`.
        capacity: the most tokens that a bin may hold.

    Returns:
        The bins, as lists of sample indices. There are at most 11/9 k + 6/9 bins, where k is the smallest
        number of bins that can hold all samples.

    Raises:
        InvalidInputError: a value of `footprints` is negative or above `capacity`. The error message names
            the sample.
    """
    if (i := first_true((footprints > capacity) | (footprints < 0))) is not None:
        raise InvalidInputError(
            f"sample {i}: needs {footprints[i]} tokens, padding included, expected at most {capacity}"
        )
    bins: list[list[int]] = []
    room = np.full(len(footprints), capacity)
    for i in np.argsort(-footprints, kind="stable").tolist():
        at = int((room[: len(bins) + 1] >= footprints[i]).argmax())
        if at == len(bins):
            bins.append([])
        bins[at].append(i)
        room[at] -= footprints[i]
    return bins


def deal_bins(footprints: NDArray[np.int64], capacity: int, ranks: int) -> list[list[list[int]]]:
    """Pack samples into bins of about equal size, with the same number of bins for every rank.

    The function makes as many bins as first-fit decreasing needs, rounded up to a multiple of `ranks`. Each
    sample, from the largest to the smallest, goes into the emptiest bin. If the emptiest bin has no room for
    a sample, the function packs all samples by first-fit decreasing instead. In this case, the function then
    splits bins until the number of bins is a multiple of `ranks`. Each split divides the fullest bin that
    holds at least two samples. A bin is empty only if there are fewer samples than bins.

    The bins are assigned to the ranks, the fullest bin first. Each bin goes to the rank with the fewest
    tokens among the ranks that still need a bin.

    Returns:
        A list of bins for each rank, the fullest bin first. All ranks process their k-th bins at the same
        time.

    Raises:
        InvalidInputError: a value of `footprints` is negative or above `capacity`, or `ranks` is below 1.
    """
    if ranks < 1:
        raise InvalidInputError(f"ranks: got {ranks}, expected 1 or more")
    sizes = footprints.tolist()
    bins = first_fit_decreasing(footprints, capacity)
    count = -(-len(bins) // ranks) * ranks
    even = _spread(range(len(sizes)), sizes, count)
    fits = all(_load(members, sizes) <= capacity for members in even)
    bins = even if fits else bins
    while len(bins) < count:
        # With at most `count` samples, each has a bin of its own, so here some bin has several.
        fullest = max((members for members in bins if len(members) > 1), key=lambda one: _load(one, sizes))
        bins.remove(fullest)
        bins += _spread(fullest, sizes, 2)
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    open_ranks = [(0, rank) for rank in range(ranks)]
    for members in sorted(bins, key=lambda members: -_load(members, sizes)):
        load, rank = heapq.heappop(open_ranks)
        dealt[rank].append(members)
        if len(dealt[rank]) < len(bins) // ranks:
            heapq.heappush(open_ranks, (load + _load(members, sizes), rank))
    return dealt


def _load(members: list[int], sizes: list[int]) -> int:
    return sum(sizes[i] for i in members)


def _spread(members: Iterable[int], sizes: list[int], count: int) -> list[list[int]]:
    """Put each sample of `members`, from the largest to the smallest, into the emptiest bin."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, at) for at in range(count)]
    for i in sorted(members, key=lambda i: (-sizes[i], i)):
        load, held, at = heap[0]
        bins[at].append(i)
        heapq.heapreplace(heap, (load + sizes[i], held + 1, at))
    return bins
