"""Micro-batches contain every row once within the budget, and `undo` restores the row order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import CandidateSets
from sglang_topp.batch import (
    BatchCandidateSets,
    nest_batch,
    split_micro_batches,
    take_batch,
    unnest_batch,
)
from sglang_topp.errors import InvalidInputError
from tests.batch.hypothesis_samples import random_sets
from tests.fake_gpu import gpu


def make_batch(lengths: list[int], width: int) -> dict[str, Any]:
    rng = np.random.default_rng(sum(lengths))
    mask = torch.from_numpy(np.arange(width) >= width - np.array(lengths)[:, None])
    ids = [rng.integers(0, 99, n).tolist() for n in lengths]
    return {
        "sequences": torch.from_numpy(rng.integers(1, 99, (len(lengths), width))) * mask,
        "mask": mask,
        "names": [str(i) for i in range(len(lengths))],
        "candidates": BatchCandidateSets.from_rows(random_sets(ids, [[1] * n for n in lengths], 0)),
        "temperature": 0.7,
    }


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(20, 60), st.integers(1, 5))
def test_undo_inverts_split(lengths: list[int], max_tokens: int, ranks: int) -> None:
    batch = make_batch(lengths, 20)
    plan = split_micro_batches(lengths, max_tokens, ranks=ranks)
    assert len(plan.rows) == ranks
    assert all(len(rank) == len(plan) for rank in plan.rows)
    seen: list[int] = []
    results = []
    for rank in range(ranks):
        results.append([])
        for rows, micro in zip(plan.rows[rank], plan.of(batch, rank), strict=True):
            assert sum(lengths[i] for i in rows) <= max_tokens
            assert rows.tolist() == sorted(rows.tolist())
            seen += rows.tolist()
            assert micro["sequences"].equal(batch["sequences"][rows])
            assert micro["names"] == [batch["names"][i] for i in rows]
            assert list(micro["candidates"]) == [batch["candidates"][i] for i in rows.tolist()]
            assert micro["temperature"] == 0.7
            results[rank].append(micro["sequences"] * 2)
    assert sorted(seen) == list(range(len(lengths)))
    assert plan.undo(results).equal(batch["sequences"] * 2)


def test_dense_and_nested_batches_are_split_alike() -> None:
    lengths = [3, 9, 5, 1]
    batch = make_batch(lengths, 10)
    plan = split_micro_batches(lengths, 10, ranks=2)
    nested = nest_batch(batch, {"sequences": "mask", "mask": "mask"})
    for rank in range(2):
        for dense, small in zip(plan.of(batch, rank), plan.of(nested, rank), strict=True):
            unnested = unnest_batch(small)
            for name in ("sequences", "mask"):
                assert dense[name].equal(unnested[name])
            assert dense["candidates"] == unnested["candidates"]


def test_adjacent_rows_are_views() -> None:
    batch = {"x": torch.arange(12).view(4, 3)}
    assert take_batch(batch, [1, 2])["x"].data_ptr() == batch["x"][1:].data_ptr()
    assert take_batch(batch, torch.tensor([2, 1]))["x"].tolist() == [[6, 7, 8], [3, 4, 5]]


def test_batch_is_split_on_its_own_device() -> None:
    with gpu():
        batch = {"x": torch.arange(12, device="cuda").view(4, 3), "label": torch.arange(4, device="cuda")}
        plan = split_micro_batches([1, 3, 2, 1], 4, ranks=2)
        results = [[micro["x"] * 2 for micro in plan.of(batch, rank)] for rank in range(2)]
        assert take_batch(batch, [3, 1])["label"].tolist() == [3, 1]
        assert results[0][0].device.type == "cuda"
        assert plan.undo(results).tolist() == (batch["x"] * 2).tolist()
        with pytest.raises(InvalidInputError, match="label: got 4 rows, expected 2, as in x"):
            take_batch({"x": batch["x"][:2], "label": batch["label"]}, [0])


class Shape(NamedTuple):
    rows: int
    columns: int


def test_named_tuple_is_kept_whole_and_tuple_is_split() -> None:
    batch = {"x": torch.zeros(2, 3), "shape": Shape(2, 3), "pair": ("a", "b")}
    assert take_batch(batch, [1])["shape"] == Shape(2, 3)
    assert take_batch(batch, [1])["pair"] == ("b",)


@pytest.mark.parametrize("num_rows", [2, 4])
def test_batch_with_a_different_number_of_rows_is_refused(num_rows: int) -> None:
    plan = split_micro_batches([5, 5, 5], 10)
    with pytest.raises(InvalidInputError, match=f"batch: got {num_rows} rows, expected 3"):
        plan.of({"x": torch.zeros(num_rows)}, 0)


@pytest.mark.parametrize("lengths", [[], [[1]], [1.0], "a"])
def test_malformed_lengths_are_refused(lengths: Any) -> None:
    with pytest.raises(InvalidInputError, match="lengths: got"):
        split_micro_batches(lengths, 10)


def test_long_rows_and_inconsistent_fields_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="sample 1: needs 11 tokens"):
        split_micro_batches([1, 11], 10)
    with pytest.raises(InvalidInputError, match="sets: got 1 rows, expected 2, as in x"):
        take_batch({"x": torch.zeros(2), "sets": BatchCandidateSets.from_rows([CandidateSets.empty(1)])}, [0])
    with pytest.raises(InvalidInputError, match="rows: got 2, expected 0 to 1"):
        take_batch({"x": torch.zeros(2)}, [2])


def test_undo_refuses_results_that_do_not_match_the_plan() -> None:
    plan = split_micro_batches([5, 5, 5], 10, ranks=2)
    right = [[torch.zeros(len(rows)) for rows in rank] for rank in plan.rows]
    assert plan.undo(right).shape == (3,)
    with pytest.raises(InvalidInputError, match=r"results: got \[\[2\]\] rows, expected \[\[2\], \[1\]\]"):
        plan.undo(right[:1])
    with pytest.raises(InvalidInputError, match=r"results: got \[\[2\], \[\]\] rows"):
        plan.undo([right[0], []])
    with pytest.raises(InvalidInputError, match=r"results: got \[\[4\], \[1\]\] rows"):
        plan.undo([[torch.zeros(4)], right[1]])
