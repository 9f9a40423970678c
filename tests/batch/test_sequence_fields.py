"""Integers of prompt and response, such as routed experts, are in their tokens' columns of every layout."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from sglang_topp.batch import PackedCollator, collate_rl, take_batch
from sglang_topp.errors import InvalidInputError
from sglang_topp.replay import Layout

PAD = 7


def value_of(ids: Any) -> Any:
    """Return a token's value, [..., 2, 3], which tells the token's id."""
    return torch.as_tensor(ids)[..., None, None] * 6 + torch.arange(6).reshape(2, 3)


def samples(seed: int = 0) -> dict[str, Any]:
    """Return samples of other lengths, whose tokens all differ from each other and from 0 and `PAD`."""
    random = np.random.default_rng(seed)
    ends = np.cumsum(random.integers(1, 9, 14)) + 10
    rows = [list(range(start, stop)) for start, stop in pairwise(ends.tolist())][:12]
    prompts, responses = rows[::2], rows[1::2]
    return {
        "prompts": prompts,
        "responses": responses,
        "rewards": [[0.0] * len(row) for row in responses],
        "loss_masks": [[1] * len(row) for row in responses],
    }


def routes(columns: dict[str, Any], kind: str) -> list[Any]:
    """Return each sample's values, with or without that of its last token."""
    rows = zip(columns["prompts"], columns["responses"], strict=True)
    values = [
        value_of([*prompt, *response])[: -1 if i % 2 else None] for i, (prompt, response) in enumerate(rows)
    ]
    return [one.to(torch.int32) if kind == "tensor" else one.numpy().astype(kind) for one in values]


def check(sequences: torch.Tensor, values: torch.Tensor, columns: dict[str, Any]) -> None:
    last = [response[-1] for response in columns["responses"]][1::2]
    has_value = (sequences > PAD) & ~torch.isin(sequences, torch.tensor(last))
    assert has_value.any()
    torch.testing.assert_close(values[has_value].long(), value_of(sequences[has_value]))
    assert not values[~has_value].any()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("uint16", torch.int32), ("int16", torch.int16), ("uint32", torch.int64), ("tensor", torch.int32)],
)
def test_padded(kind: str, dtype: torch.dtype) -> None:
    columns = samples()
    fields = {"routed_experts": routes(columns, kind)}
    batch: Any = collate_rl(**columns, sequence_fields=fields, pad_token_id=PAD)
    assert batch["routed_experts"].shape == (*batch["sequences"].shape, 2, 3)
    assert batch["routed_experts"].dtype == dtype
    check(batch["sequences"], batch["routed_experts"], columns)
    part = take_batch(batch, [2, 1])
    check(part["sequences"], part["routed_experts"], columns)


def test_the_smallest_dtype_of_all_rows() -> None:
    rows = [np.zeros((2, 1), np.uint8), np.full((2, 1), 300, np.uint16)]
    one = {"prompts": [[1], [1]], "responses": [[2], [2]], "rewards": [[0], [0]], "loss_masks": [[1], [1]]}
    small: Any = collate_rl(**one, sequence_fields={"routes": [rows[0]] * 2}, pad_token_id=0)
    wide: Any = collate_rl(**one, sequence_fields={"routes": rows}, pad_token_id=0)
    assert (small["routes"].dtype, wide["routes"].dtype) == (torch.uint8, torch.int32)
    assert wide["routes"].flatten().tolist() == [0, 0, 300, 300]


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_packed_and_cut_for_context_parallelism(cp_size: int, tp_size: int) -> None:
    columns = samples(cp_size)
    collator = PackedCollator(max_tokens=48, pad_token_id=PAD, cp_size=cp_size, tp_size=tp_size)
    batch: Any = collator.collate_rl(**columns, sequence_fields={"routes": routes(columns, "uint16")})
    check(batch["sequences"], batch["routes"], columns)
    assert len(batch["layouts"]) > 1
    for row, (layout, length) in enumerate(zip(batch["layouts"], batch["row_lengths"].tolist(), strict=True)):
        ids, values = batch["sequences"][row, :length], batch["routes"][row, :length]
        parts = [replace(layout, cp_rank=rank) for rank in range(cp_size)]
        held = [part.take_tokens(ids) for part in parts]
        assert {len(one) for one in held} == {length // cp_size}
        assert torch.cat(held).sort().values.equal(ids.sort().values)
        for part, one in zip(parts, held, strict=True):
            got = part.take_tokens(values).long()
            has_value = got.flatten(1).any(1)
            assert got[has_value].equal(value_of(one[has_value]))


def test_zigzag_order() -> None:
    layout = Layout(cp_size=2, cu_seqlens=[0, 4, 12])
    values = torch.arange(12)
    assert layout.take_tokens(values).tolist() == [0, 3, 4, 5, 10, 11]
    assert replace(layout, cp_rank=1).take_tokens(values).tolist() == [1, 2, 6, 7, 8, 9]
    with pytest.raises(InvalidInputError, match="values: got 11, expected 12, one per token"):
        layout.take_tokens(values[:-1])
    with pytest.raises(InvalidInputError, match="cu_seqlens: got None"):
        Layout(cp_size=2).take_tokens(values)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([np.zeros((1, 2), np.int32)], r"routes: got 1 samples, expected 2, as in prompts"),
        ([np.zeros((2, 2)), np.zeros((2, 2))], r"routes\[0\]: got float64 \[2, 2\], expected integers"),
        (
            [np.zeros((2, 2), int), np.zeros((2, 3), int)],
            r"routes\[1\]: got int64 \[2, 3\], expected integers",
        ),
        ([np.zeros((2, 2), int), np.zeros((3, 2), int)], r"routes\[1\]: got 3 rows for 2 tokens"),
        ([np.zeros((0, 2), int), np.zeros((2, 2), int)], r"routes\[0\]: got 0 rows for 2 tokens"),
        ([np.zeros((2, 2), np.uint64)] * 2, r"routes: got uint64, expected integers that fit int64"),
    ],
)
def test_what_does_not_fit_is_refused(rows: list[Any], words: str) -> None:
    columns = {
        "prompts": [[1], [1]],
        "responses": [[2], [2]],
        "rewards": [[0], [0]],
        "loss_masks": [[1], [1]],
    }
    with pytest.raises(InvalidInputError, match=words):
        collate_rl(**columns, sequence_fields={"routes": rows}, pad_token_id=0)


@pytest.mark.parametrize("name", ["rewards", "mine"])
def test_a_name_stands_for_one_field(name: str) -> None:
    columns = {"prompts": [[1]], "responses": [[2]], "rewards": [[0]], "loss_masks": [[1]]}
    rows = [np.zeros((2, 1), np.int32)]
    with pytest.raises(InvalidInputError, match=f"fields: got '{name}'"):
        collate_rl(**columns, fields={"mine": [[0]]}, sequence_fields={name: rows}, pad_token_id=0)
