"""Which samples go together: bins of a token budget, dealt evenly to data-parallel ranks.

Shape legend: n samples, each with a footprint (the tokens that it costs, padding included).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError

__all__ = ["deal_bins", "first_fit_decreasing"]


def first_fit_decreasing(footprints: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Samples from the largest to the smallest (ties in order), each into the first bin with room.

    Args:
        footprints: int64 [n], each 0 to `capacity`.
        capacity: what the footprints of a bin may add up to.

    Returns:
        The bins, as indices of samples. Never more than 11/9 of the fewest possible, plus 6/9.

    Raises:
        InvalidInputError: a footprint that no bin can hold; names the sample.
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
    """As few bins as first-fit decreasing needs, as many for every rank, and about as full.

    The number of bins is that of first-fit decreasing, rounded up to a multiple of `ranks`. Samples are
    then spread over so many bins from the largest on, each into the emptiest; where that overfills one
    (a tight budget), first-fit's own bins stay, the fullest split in two until they are enough. A bin is
    empty only where there are fewer samples than bins. Bins are dealt from the fullest on, each to the
    rank with the fewest tokens so far among those that still take one.

    Returns:
        For every rank its bins, the fullest first: bin k of every rank runs at the same time.

    Raises:
        InvalidInputError: as `first_fit_decreasing`, or `ranks` is below 1.
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
    """`members` over `count` bins: from the largest on, each into the bin with the least in it."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, at) for at in range(count)]
    for i in sorted(members, key=lambda i: (-sizes[i], i)):
        load, held, at = heap[0]
        bins[at].append(i)
        heapq.heapreplace(heap, (load + sizes[i], held + 1, at))
    return bins


def _split(bins: list[list[int]], sizes: list[int], count: int) -> list[list[int]]:
    """`bins`, the fullest of those with two samples or more split in two until there are `count`.

    There always is one to split: were there a bin for every sample, none would be overfull.
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
