"""BatchCandidateSets equals the same operations on plain lists of CandidateSets."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import CandidateSets
from sglang_topp.batch import BatchCandidateSets
from sglang_topp.errors import InvalidInputError
from tests.batch.hypothesis_samples import random_sets


@st.composite
def rows_of_sets(draw: st.DrawFn, min_size: int = 0) -> list[CandidateSets]:
    lengths = draw(st.lists(st.integers(0, 6), min_size=min_size, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = [rng.integers(0, 150_000, n).tolist() for n in lengths]
    masks = [rng.integers(0, 2, n).tolist() for n in lengths]
    return random_sets(ids, masks, int(rng.integers(2**32)))


@given(rows_of_sets(), st.data())
def test_slice_and_take_equal_those_of_a_list(rows: list[CandidateSets], data: st.DataObject) -> None:
    batch = BatchCandidateSets.from_rows(rows)
    assert len(batch) == len(rows)
    assert list(batch) == rows
    start, stop = data.draw(st.integers(-8, 8)), data.draw(st.integers(-8, 8))
    assert list(batch[start:stop]) == rows[start:stop]
    order = data.draw(st.lists(st.sampled_from(range(len(rows))), max_size=8)) if rows else []
    assert list(batch.take(order)) == [rows[i] for i in order]
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert pickle.loads(pickle.dumps(batch[start:stop])) == batch[start:stop]


def test_rows_with_and_without_logprobs_do_not_mix() -> None:
    known = CandidateSets([5, 2], [-0.5, -1.0], [0, 2], [2])
    ids_only = known.without_logprobs()
    rows = [CandidateSets.empty(1), ids_only, CandidateSets.empty(0), ids_only]
    batch = BatchCandidateSets.from_rows(rows)
    assert not batch.sets.has_logprobs
    assert list(batch) == rows
    assert list(batch.take([3, 0])) == [ids_only, rows[0]]
    assert pickle.loads(pickle.dumps(batch)) == batch
    with pytest.raises(
        InvalidInputError, match=r"candidates\[1\]: has no log-probs, and candidates\[0\] has"
    ):
        BatchCandidateSets.from_rows([known, ids_only])


@pytest.mark.parametrize("rows", [[2], [-1], [0.5], [[0]], [[0], [0, 1]], "a"])
def test_take_refuses_invalid_rows(rows: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"rows: (got|expected)"):
        BatchCandidateSets.from_rows([CandidateSets.empty(2), CandidateSets.empty(1)]).take(rows)


@pytest.mark.parametrize(
    "offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [], np.array([0, 3], np.int32), np.array([[0, 3]])]
)
def test_invalid_offsets_are_refused(offsets: Any) -> None:
    array = offsets if isinstance(offsets, np.ndarray) else np.array(offsets, np.int64)
    with pytest.raises(InvalidInputError, match="row_offsets"):
        BatchCandidateSets(CandidateSets.empty(3), array)


def test_offsets_are_read_only() -> None:
    offsets = np.array([0, 1, 3])
    batch = BatchCandidateSets(CandidateSets.empty(3), offsets)
    with pytest.raises(ValueError, match="read-only"):
        batch.row_offsets[0] = 1
