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
    assert batch.lengths.tolist() == [len(row) for row in rows]
    start, stop = data.draw(st.integers(-8, 8)), data.draw(st.integers(-8, 8))
    assert list(batch[start:stop]) == rows[start:stop]
    order = data.draw(st.lists(st.sampled_from(range(len(rows))), max_size=8)) if rows else []
    assert list(batch.take(order)) == [rows[i] for i in order]
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert pickle.loads(pickle.dumps(batch[start:stop])) == batch[start:stop]


@given(rows_of_sets(), st.data())
def test_place_puts_every_set_into_its_column(rows: list[CandidateSets], data: st.DataObject) -> None:
    width, into, starts = 14, [], []
    line, column = 0, 0
    for row in rows:
        column += data.draw(st.integers(0, 3))
        if column + len(row) > width or data.draw(st.booleans()):
            line, column = line + 1 + data.draw(st.integers(0, 1)), data.draw(st.integers(0, 3))
        into.append(line)
        starts.append(column)
        column += len(row)
    shape = (line + 2, width)
    placed = BatchCandidateSets.from_rows(rows).place(into, starts, shape)
    assert placed.lengths.tolist() == [width] * shape[0]
    expected = [[([], [], -1)] * width for _ in range(shape[0])]
    for row, i, start in zip(rows, into, starts, strict=True):
        for t, (ids, logprobs) in enumerate(row):
            expected[i][start + t] = (ids.tolist(), as_list(logprobs), int(row.sampled_ids[t]))
    for i, line_sets in enumerate(placed):
        got = [
            (ids.tolist(), as_list(logprobs), int(sampled))
            for (ids, logprobs), sampled in zip(line_sets, line_sets.sampled_ids, strict=True)
        ]
        assert got == expected[i]
    # The placed sets pass the constructor's checks.
    assert CandidateSets(*placed.sets._arrays()) == placed.sets


def as_list(logprobs: np.ndarray | None) -> list[float]:
    """Return the log-probs as a list. Empty spans may have none."""
    return [] if logprobs is None else logprobs.tolist()


def test_rows_with_and_without_logprobs_do_not_mix() -> None:
    known = CandidateSets([5, 2], [-0.5, -1.0], [0, 2], [2])
    ids_only = known.without_logprobs()
    rows = [CandidateSets.empty(1), ids_only, CandidateSets.empty(0), ids_only]
    batch = BatchCandidateSets.from_rows(rows)
    assert not batch.sets.has_logprobs
    assert list(batch) == rows
    assert list(batch.take([3, 0])) == [ids_only, rows[0]]
    assert pickle.loads(pickle.dumps(batch)) == batch
    assert batch.nbytes == 4 * 4 + 8 * 4 + 4 * 3 + 8 * 5
    with pytest.raises(
        InvalidInputError, match=r"candidates\[1\]: has no log-probs, and candidates\[0\] has"
    ):
        BatchCandidateSets.from_rows([known, ids_only])


@pytest.mark.parametrize(
    ("into", "starts"),
    [
        ([0, 0], [0, 1]),
        ([0, 0], [3, 0]),
        ([1, 0], [0, 0]),
        ([0, 2], [0, 0]),
        ([0, 1], [0, 4]),
        ([0, 1], [-1, 0]),
    ],
)
def test_place_refuses_overlaps_disorder_and_overhang(into: list[int], starts: list[int]) -> None:
    batch = BatchCandidateSets.from_rows([CandidateSets.empty(2), CandidateSets.empty(2)])
    with pytest.raises(InvalidInputError, match="cannot lie at row"):
        batch.place(into, starts, (2, 5))


@pytest.mark.parametrize("wrong", [[0.9, 1.0], ["0", "1"], [False, True], [[0], [0, 1]], [0, None]])
def test_place_refuses_values_that_are_no_integers(wrong: Any) -> None:
    batch = BatchCandidateSets.from_rows([CandidateSets.empty(2), CandidateSets.empty(2)])
    with pytest.raises(InvalidInputError, match=r"into: .*expected integers"):
        batch.place(wrong, [0, 0], (2, 5))
    with pytest.raises(InvalidInputError, match=r"starts: .*expected integers"):
        batch.place([0, 1], wrong, (2, 5))


def test_place_refuses_a_different_number_of_rows() -> None:
    with pytest.raises(InvalidInputError, match="into, starts"):
        BatchCandidateSets.from_rows([CandidateSets.empty(2)]).place([0, 1], [0, 0], (2, 5))


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


def test_offsets_are_read_only_and_nbytes_counts_all_arrays() -> None:
    offsets = np.array([0, 1, 3])
    batch = BatchCandidateSets(CandidateSets.empty(3), offsets)
    with pytest.raises(ValueError, match="read-only"):
        batch.row_offsets[0] = 1
    assert batch.nbytes == 8 * 4 + 4 * 3 + 8 * 3
    with pytest.raises(InvalidInputError, match="step"):
        batch[::2]
