"""Packed batches equal their reference, and keep the layout's guarantees that the reference does not show."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp.batch import PackedBatch, PackedCollator, take_batch
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import Layout
from tests.batch import reference_loops
from tests.batch.hypothesis_samples import IDS, random_sets, rollout_lists

PAD = 7


@st.composite
def collators(draw: st.DrawFn) -> PackedCollator:
    sizes = {
        "dp_size": draw(st.integers(1, 4)),
        "tp_size": draw(st.sampled_from([1, 2, 3])),
        "cp_size": draw(st.sampled_from([1, 1, 2])),
        "pp_size": draw(st.sampled_from([1, 2])),
        "fp8_multiple": draw(st.sampled_from([1, 1, 4])),
    }
    least = PackedCollator(max_tokens=10_000, pad_token_id=PAD, **sizes).row_multiple
    budget = draw(st.integers(24 + 2 * least, 120 + 2 * least))
    return PackedCollator(max_tokens=budget, pad_token_id=draw(st.sampled_from([0, PAD])), **sizes)


def check_layout(collator: PackedCollator, batch: PackedBatch, lengths: list[int]) -> None:
    num_rows, width = batch["sequences"].shape
    assert num_rows % collator.dp_size == 0
    assert width <= collator.max_tokens
    assert width == batch["row_lengths"].max()
    assert sorted(torch.cat(batch["samples"]).tolist()) == list(range(len(lengths)))
    assert all(len(batch[name]) == num_rows for name in ("cu_seqlens", "seq_lengths", "samples"))
    for row in range(num_rows):
        total, members = int(batch["row_lengths"][row]), batch["samples"][row].tolist()
        edges, real = batch["cu_seqlens"][row].tolist(), batch["seq_lengths"][row].tolist()
        assert batch["cu_seqlens"][row].dtype == batch["seq_lengths"][row].dtype == torch.int32
        assert total % collator.row_multiple == 0
        assert edges[0] == 0
        assert edges[-1] == total
        assert len(edges) == len(real) + 1
        assert real == ([lengths[i] for i in members] or [1])
        assert all(edge % collator.sequence_multiple == 0 for edge in edges)
        expected = torch.zeros(width, dtype=torch.int64)
        for start, stop, length in zip(edges[:-1], edges[1:], real, strict=True):
            assert stop - start >= length
            expected[start : start + length] = 1
            if stop != total:  # padding at the end of a row counts as part of its last sample
                assert stop - start - length < collator.sequence_multiple
            assert batch["position_ids"][row, start : start + length].tolist() == list(range(length))
            assert batch["loss_mask"][row, start + length - 1] == 0
        assert batch["attention_mask"][row].equal(expected)
        if collator.pp_size > 1:
            assert total == width
        else:
            filled = sum(-(-n // collator.sequence_multiple) * collator.sequence_multiple for n in real)
            assert total - filled < collator.row_multiple


def assert_same(batch: Any, expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert batch[name].dtype == tensor.dtype, name
        assert torch.equal(batch[name], tensor), name


def multiples(collator: PackedCollator) -> dict[str, int]:
    return {
        "pad_token_id": collator.pad_token_id,
        "sequence_multiple": collator.sequence_multiple,
        "row_multiple": collator.row_multiple,
    }


@given(collators(), st.data())
def test_sft_equals_the_reference(collator: PackedCollator, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.lists(IDS, min_size=1, max_size=24), min_size=1, max_size=12))
    counts = [data.draw(st.integers(0, len(row))) for row in ids]
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in counts]
    batch = collator.collate_sft(ids, counts, masks)
    check_layout(collator, batch, [len(row) for row in ids])
    bins = [members.tolist() for members in batch["samples"]]
    assert_same(batch, reference_loops.pack_sft(bins, ids, counts, masks, **multiples(collator)))
    losses = sum(
        sum(mask[1:] if n == len(row) else mask) for row, n, mask in zip(ids, counts, masks, strict=True)
    )
    assert float(batch["loss_mask"].sum(dtype=torch.float64)) == pytest.approx(
        1.0 if losses else 0.0, rel=1e-6
    )


@given(collators(), rollout_lists(), st.integers(0, 2**32 - 1))
def test_rl_equals_the_reference_and_places_every_set(
    collator: PackedCollator, columns: dict[str, Any], seed: int
) -> None:
    sets = random_sets(columns["responses"], columns["loss_masks"], seed)
    batch = collator.collate_rl(**columns, candidates=sets)
    lengths = [len(p) + len(r) for p, r in zip(columns["prompts"], columns["responses"], strict=True)]
    check_layout(collator, batch, lengths)
    bins = [members.tolist() for members in batch["samples"]]
    assert_same(batch, reference_loops.pack_rl(bins, **columns, **multiples(collator)))

    ids = [np.array(row, np.int64) for row in columns["responses"]]
    further: Any = collator.collate_rl(**columns, fields={"again": columns["rewards"], "ids": ids})
    assert further["again"].equal(batch["rewards"])
    if any(map(len, ids)):  # a token's id, in the column that predicts it
        assert further["ids"][:, :-1].equal((batch["response_mask"] * batch["sequences"].roll(-1, 1))[:, :-1])
        assert further["ids"].dtype == torch.int64

    candidates, width = batch["candidates"], batch["sequences"].shape[1]
    assert np.diff(candidates.row_offsets).tolist() == [width] * len(bins)
    covered = np.zeros(batch["sequences"].shape, bool)
    for row, members in enumerate(bins):
        for i, start in zip(members, batch["cu_seqlens"][row].tolist(), strict=False):
            first = start + len(columns["prompts"][i]) - 1
            stop = first + len(columns["responses"][i])
            assert candidates[row][first:stop] == sets[i]
            covered[row, first:stop] = True
    sizes = candidates.sets.sizes.reshape(covered.shape)
    assert not sizes[~covered].any()
    # The score at column t predicts the token in column t + 1, which is the sampled token.
    sampled = candidates.sets.sampled_ids.reshape(covered.shape)[:, :-1]
    following = batch["sequences"].numpy()[:, 1:]
    replayed = sizes[:, :-1] > 0
    assert np.array_equal(sampled[replayed], following[replayed])


def columns_of_rank(edges: list[int], cp_size: int, cp_rank: int) -> list[int]:
    """Return the columns of a packed row on one rank: two chunks of each sequence of `cu_seqlens`."""
    if cp_size == 1:
        return list(range(edges[-1]))
    columns: list[int] = []
    for start, stop in pairwise(edges):
        chunk = (stop - start) // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            columns += range(start + number * chunk, start + (number + 1) * chunk)
    return columns


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("fp8_multiple", [1, 4])
def test_layout_selects_the_columns_that_predict_the_response(
    tp_size: int, cp_size: int, pp_size: int, fp8_multiple: int
) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 99, n).tolist() for n in rng.integers(1, 9, 30)]
    responses = [rng.integers(0, 99, n).tolist() for n in rng.integers(0, 20, 30)]
    zeros = [[0] * len(row) for row in responses]
    sizes = {"tp_size": tp_size, "cp_size": cp_size, "pp_size": pp_size, "fp8_multiple": fp8_multiple}
    for samples, dp_size in ((20, 20), (30, 2), (3, 5)):  # a row has one sample, several, or none
        collator = PackedCollator(max_tokens=96, pad_token_id=0, dp_size=dp_size, **sizes)
        batch = collator.collate_rl(*(rows[:samples] for rows in (prompts, responses, zeros, zeros)))
        for row, members in enumerate(batch["samples"]):
            before, after = ([len(rows[i]) for i in members] for rows in (prompts, responses))
            edges, sequence = batch["cu_seqlens"][row].tolist(), batch["sequences"][row]
            expected = [
                start + p - 1 + t for start, p, r in zip(edges, before, after, strict=False) for t in range(r)
            ]
            assert batch["response_mask"][row].nonzero().flatten().tolist() == expected
            assert [sequence[at + 1] for at in expected] == [t for i in members for t in responses[i]]
            seen = []
            for rank in range(cp_size):
                columns = torch.tensor(columns_of_rank(edges, cp_size, rank), dtype=torch.float32)[:, None]
                layout = replace(batch["layouts"][row], cp_rank=rank)
                rows = layout.select_rows(before, after)
                picked = rows.select(columns).flatten().tolist()
                assert picked == [expected[at] for at in rows.positions]
                seen += picked

                other = Layout(cp_size=cp_size, cp_rank=rank).select_rows(before, after)
                if other.num_hidden_rows == len(columns):  # there is no other padding
                    assert other.select(columns).flatten().tolist() == picked
                else:
                    with pytest.raises(InvalidInputError, match="by the layout this rank holds"):
                        other.select(columns)
                mask = batch["attention_mask"][row : row + 1]
                padded = Layout(cp_size=cp_size, cp_rank=rank, attention_mask=mask)
                if len(members) == 1:
                    whole = columns_of_rank([0, mask.shape[1]], cp_size, rank)
                    alone = padded.select_rows(before, after)
                    states = torch.tensor(whole, dtype=torch.float32)[None, :, None]
                    assert alone.select(states).flatten().tolist() == [expected[at] for at in alone.positions]
                else:
                    with pytest.raises(InvalidInputError, match="attention_mask: got"):
                        padded.select_rows(before, after)
            assert sorted(seen) == expected


def test_layout_refuses_samples_of_another_row_or_order() -> None:
    collator = PackedCollator(max_tokens=32, pad_token_id=0, tp_size=8)
    batch = collator.collate_rl(
        [[1], [1], [1] * 9], [[2], [2, 2], [2]], [[0], [0, 0], [0]], [[1], [1, 1], [1]]
    )
    members = torch.cat(batch["samples"]).tolist()
    assert members == [2, 0, 1]
    layout = batch["layouts"][0]
    layout.select_rows([9, 1, 1], [1, 1, 2])
    for prompts, responses in (([9, 1, 1], [1, 2, 1]), ([9, 1], [1, 2]), ([9, 1, 1, 1], [1, 2, 1, 0])):
        with pytest.raises(InvalidInputError, match=r"samples of .* tokens, expected .*, as in seq_lengths"):
            layout.select_rows(prompts, responses)


def test_shards_are_consecutive_rows_with_their_sets() -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 99, n).tolist() for n in rng.integers(1, 9, 20)]
    responses = [rng.integers(0, 99, n).tolist() for n in rng.integers(1, 30, 20)]
    zeros = [[0] * len(row) for row in responses]
    collator = PackedCollator(max_tokens=64, pad_token_id=0, dp_size=4)
    batch = collator.collate_rl(prompts, responses, zeros, zeros, candidates=random_sets(responses, zeros, 0))
    each = len(batch["sequences"]) // 4
    for rank in range(4):
        shard = take_batch(batch, np.arange(rank * each, (rank + 1) * each))
        assert len(shard["sequences"]) == len(shard["candidates"]) == len(shard["samples"]) == each
        assert shard["candidates"] == batch["candidates"][rank * each : (rank + 1) * each]
        assert shard["sequences"].equal(batch["sequences"][rank * each : (rank + 1) * each])


def test_budget_counts_padded_lengths() -> None:
    # 9 + 9 + 6 = 24 tokens fit into 24 columns, but their padded lengths 12 + 12 + 8 = 32 do not.
    collator = PackedCollator(max_tokens=24, pad_token_id=0, cp_size=2)
    batch = collator.collate_sft([[1] * 9, [2] * 9, [3] * 6], [1, 1, 1])
    assert len(batch["sequences"]) == 2
    assert batch["row_lengths"].max() == 20


def test_rank_without_a_sample_gets_a_row_without_loss() -> None:
    collator = PackedCollator(max_tokens=8, pad_token_id=0, dp_size=3)
    batch = collator.collate_sft([[1, 2, 3]], [2])
    assert batch["sequences"].shape == (3, 3)
    assert batch["row_lengths"].tolist() == [3, 1, 1]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert batch["loss_mask"].tolist() == [[0.5, 0.5, 0], [0, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("sizes", "sequence", "row"),
    [
        ({}, 1, 1),
        ({"tp_size": 4}, 4, 4),
        ({"cp_size": 2}, 4, 4),
        ({"cp_size": 2, "tp_size": 4}, 16, 16),
        ({"cp_size": 2, "tp_size": 4, "fp8_multiple": 16}, 16, 256),
    ],
)
def test_alignment_follows_parallel_sizes(sizes: dict[str, int], sequence: int, row: int) -> None:
    collator = PackedCollator(max_tokens=4096, pad_token_id=0, **sizes)
    assert (collator.sequence_multiple, collator.row_multiple) == (sequence, row)


def test_invalid_sizes_and_samples_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="tp_size: got 0"):
        PackedCollator(max_tokens=8, pad_token_id=0, tp_size=0)
    sizes: dict[str, Any]
    for sizes in ({"max_tokens": 8.5}, {"pad_token_id": None}, {"pad_token_id": 0.5}, {"cp_size": 2.0}):
        with pytest.raises(InvalidInputError, match=rf"{next(iter(sizes))}: got .*, expected an integer"):
            PackedCollator(**{"max_tokens": 8, "pad_token_id": 0, **sizes})
    with pytest.raises(InvalidInputError, match="max_tokens: got 8, expected at least 16"):
        PackedCollator(max_tokens=8, pad_token_id=0, fp8_multiple=16)
    collator = PackedCollator(max_tokens=9, pad_token_id=0, tp_size=2)
    with pytest.raises(
        InvalidInputError, match="sample 1: needs 10 tokens, padding included, expected at most 8"
    ):
        collator.collate_sft([[1], [1] * 9], [1, 1])
    with pytest.raises(InvalidInputError, match=r"input_ids\[1\]: is empty"):
        collator.collate_sft([[1], []], [1, 0])
    with pytest.raises(InvalidInputError, match=r"loss_masks\[0\]: got 2 values, expected 1"):
        collator.collate_sft([[1]], [1], [[1, 1]])
    with pytest.raises(InvalidInputError, match=r"rewards\[0\]: got 2 values, expected 1"):
        collator.collate_rl([[1]], [[1]], [[0.0, 0.0]], [[1]])
    with pytest.raises(InvalidInputError, match=r"candidates\[0\]: the token sampled at position 0 is 5"):
        collator.collate_rl([[1]], [[6]], [[0.0]], [[1]], candidates=random_sets([[5]], [[1]], 0))


def test_rl_refuses_a_field_with_the_name_of_a_packed_field() -> None:
    columns = {"prompts": [[1]], "responses": [[2]], "rewards": [[0]], "loss_masks": [[1]]}
    collator = PackedCollator(max_tokens=4, pad_token_id=PAD)
    with pytest.raises(InvalidInputError, match="fields: got 'position_ids', which is a field of the batch"):
        collator.collate_rl(**columns, fields={"position_ids": [[0]]})
