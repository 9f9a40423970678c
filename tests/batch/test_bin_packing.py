"""Bin packing equals its reference. No bin exceeds the budget, and all ranks get equally many bins."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp.batch.micro_batches import deal_bins, first_fit_decreasing
from sglang_topp.errors import InvalidInputError
from tests.batch import reference_loops

SIZES = st.lists(st.integers(0, 20), max_size=40).map(lambda sizes: np.array(sizes, np.int64))


@given(SIZES, st.integers(20, 60))
def test_first_fit_decreasing_equals_the_reference(sizes: np.ndarray, capacity: int) -> None:
    assert first_fit_decreasing(sizes, capacity) == reference_loops.first_fit_decreasing(
        sizes.tolist(), capacity
    )


@given(SIZES, st.integers(20, 60), st.integers(1, 9))
def test_deal_bins_places_every_sample_once(sizes: np.ndarray, capacity: int, ranks: int) -> None:
    dealt = deal_bins(sizes, capacity, ranks)
    assert len(dealt) == ranks
    assert len({len(bins) for bins in dealt}) == 1
    bins = [members for bins in dealt for members in bins]
    assert sorted(i for members in bins for i in members) == list(range(len(sizes)))
    assert all(sizes[members].sum() <= capacity for members in bins)
    fewest = len(first_fit_decreasing(sizes, capacity))
    assert len(bins) == -(-fewest // ranks) * ranks  # the fewest bins that divide evenly among the ranks
    assert all(bins) or len(sizes) < len(bins)  # a bin is empty only if there are fewer samples than bins
    loads = [[int(sizes[members].sum()) for members in bins] for bins in dealt]
    for rank in loads:
        assert rank == sorted(rank, reverse=True)


@pytest.mark.parametrize("capacity", [4096, 16_384])
def test_ranks_and_bins_get_similar_numbers_of_tokens(capacity: int) -> None:
    sizes = np.random.default_rng(0).integers(16, 2049, 1024)
    loads = np.array([[sizes[bin_].sum() for bin_ in bins] for bins in deal_bins(sizes, capacity, 8)])
    assert loads.max() <= capacity
    assert loads.sum(1).max() / loads.sum(1).mean() < 1.001
    assert loads.max() / loads.mean() < 1.05


def test_tight_budget_falls_back_to_first_fit_bins() -> None:
    # Spreading the samples evenly would put 7 tokens into one bin.
    assert deal_bins(np.array([3, 3, 2, 2, 2]), 6, 1) == [[[0, 1], [2, 3, 4]]]
    sizes = np.array([3] * 12 + [2] * 15)
    assert len(first_fit_decreasing(sizes, 6)) == 11
    loads = sorted(sizes[bins[0]].sum() for bins in deal_bins(sizes, 6, 12))
    assert loads == [3, 3, *[6] * 10] or loads == [2, 4, *[6] * 10]


@pytest.mark.parametrize(
    "pack", [first_fit_decreasing, lambda sizes, capacity: deal_bins(sizes, capacity, 2)]
)
def test_samples_larger_than_the_capacity_are_refused(pack: Callable[[np.ndarray, int], object]) -> None:
    with pytest.raises(InvalidInputError, match=r"sample 1: needs 9 tokens, .* at most 8"):
        pack(np.array([8, 9, 1]), 8)
    with pytest.raises(InvalidInputError, match="sample 2: needs -1"):
        pack(np.array([8, 8, -1]), 8)


def test_zero_ranks_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="ranks: got 0"):
        deal_bins(np.array([1]), 8, 0)
