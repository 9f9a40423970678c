"""Pack samples into bins within a token budget, and distribute the bins evenly over data-parallel ranks.

Shape legend: n samples. A sample's footprint is its number of tokens, including padding.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError

__all__ = ["deal_bins", "first_fit_decreasing"]


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
    if (wrong := np.flatnonzero((footprints > capacity) | (footprints < 0))).size:
        i = int(wrong[0])
        raise InvalidInputError(
            f"sample {i}: needs {footprints[i]} tokens, padding included, expected at most {capacity}"
        )
    bins: list[list[int]] = []
    room = np.zeros(max(1, len(footprints)), np.int64)
    for i in np.argsort(-footprints, kind="stable").tolist():
        fits = room[: len(bins)] >= footprints[i]
        at = int(fits.argmax()) if len(bins) else 0
        if not bins or not fits[at]:
            at = len(bins)
            bins.append([])
            room[at] = capacity
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
    bins = even if fits else _split(bins, sizes, count)
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


def _split(bins: list[list[int]], sizes: list[int], count: int) -> list[list[int]]:
    """Repeatedly split the fullest bin with two or more samples, until there are `count` bins.

    A bin with several samples always exists, because `deal_bins` calls this function only if the total
    number of samples is above `count`. If there are at most `count` samples, `_spread` puts each sample into
    its own bin, and `deal_bins` keeps these bins.
    """
    out = list(bins)
    fullest = [(-_load(members, sizes), at) for at, members in enumerate(out) if len(members) > 1]
    heapq.heapify(fullest)
    while len(out) < count:
        _, at = heapq.heappop(fullest)
        out[at], rest = _spread(out[at], sizes, 2)
        out.append(rest)
        for half in (at, len(out) - 1):
            if len(out[half]) > 1:
                heapq.heappush(fullest, (-_load(out[half], sizes), half))
    return out
