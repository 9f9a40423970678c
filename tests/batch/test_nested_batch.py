"""Nested batches round-trip bit for bit: whole, in chunks, and reordered."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict

from sglang_topp import CandidateSets
from sglang_topp.batch import (
    BatchCandidateSets,
    NestedBatch,
    NestedFieldSpec,
    nest_batch,
    split_micro_batches,
    take_batch,
    unnest_batch,
)
from sglang_topp.errors import InvalidInputError
from tests.batch import reference_loops
from tests.fake_gpu import gpu

DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


MASKED_WRITE_DTYPES = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # these support masked writes


def identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether shape, dtype, and bytes are equal: NaN equals itself, and -0.0 differs from 0.0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left.contiguous().flatten().view(torch.uint8).equal(right.contiguous().flatten().view(torch.uint8))


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 150))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["right", "left", "holes", "random", "all", "none"]))
    lengths = rng.integers(0, width + 1, rows)[:, None]
    columns = np.arange(width)
    keep = {
        "right": columns >= width - lengths,
        "left": columns < lengths,
        "holes": (columns < lengths) & (columns // 7 % 3 != 1),
        "random": rng.random((rows, width)) < draw(st.floats(0, 1)),
        "all": np.ones((rows, width), bool),
        "none": np.zeros((rows, width), bool),
    }[kind]
    dtype = draw(st.sampled_from([torch.bool, torch.int64, torch.float32]))
    return torch.from_numpy(keep).to(dtype)


def random_values(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, spread: int
) -> torch.Tensor:
    """Return random values; floats include NaN, infinity, and -0.0."""
    values = torch.from_numpy(rng.integers(-spread, spread + 1, shape))
    if dtype == torch.bool:
        return values > 0
    out = values.to(dtype) if dtype != torch.uint16 else values.clamp(0).to(dtype)
    if dtype.is_floating_point:
        special = torch.tensor([float("nan"), float("inf"), -0.0, 0.1], dtype=dtype)
        chosen = torch.from_numpy(rng.integers(0, 40, shape))
        out = torch.where(chosen < 4, special[chosen % 4], out)
    return out


@given(masks(), st.data())
def test_round_trip_keeps_every_bit(mask: torch.Tensor, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    batch, fields = {"mask": mask, "label": torch.arange(len(mask))}, {"mask": "mask"}
    for i in range(data.draw(st.integers(1, 3))):
        dtype = data.draw(st.sampled_from(DTYPES))
        rest = data.draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
        spread = data.draw(st.sampled_from([1, 100, 40_000, 2**40]))
        field = random_values(rng, (*mask.shape, *rest), dtype, spread)
        pad = data.draw(st.sampled_from([0, 1])) if dtype != torch.complex64 else 0
        if data.draw(st.booleans()):  # only padding where the mask is 0
            field.view(MASKED_WRITE_DTYPES[dtype.itemsize])[mask == 0] = torch.tensor(pad, dtype=dtype).view(
                MASKED_WRITE_DTYPES[dtype.itemsize]
            )
        batch[f"field{i}"], fields[f"field{i}"] = field, NestedFieldSpec("mask", pad)
    nested = nest_batch(batch, fields, strict=True)

    def check(part: NestedBatch, rows: list[int]) -> None:
        out = unnest_batch(pickle.loads(pickle.dumps(part)))
        assert list(out) == list(batch)
        for name, field in batch.items():
            assert identical(out[name], field[rows]), name

    everything = list(range(len(mask)))
    check(nested, everything)
    order = data.draw(st.permutations(everything))
    check(nested.take(order), order)
    parts = data.draw(st.integers(1, len(mask) + 1))
    for part, rows in zip(nested.take(order).chunk(parts), np.array_split(order, parts), strict=True):
        check(part, rows.tolist())
    twice = data.draw(st.lists(st.sampled_from(everything), max_size=9))
    check(nested.take(twice), twice)
    start, stop = data.draw(st.integers(-8, 8)), data.draw(st.integers(-8, 8))
    check(nested[start:stop], everything[start:stop])


@given(masks(), st.sampled_from([0, 1]), st.sampled_from([(), (2,)]), st.integers(0, 2**32 - 1))
def test_jagged_values_equal_those_of_the_reference(
    mask: torch.Tensor, pad: int, rest: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    field = torch.from_numpy(rng.integers(0, 3, (*mask.shape, *rest)))
    field[torch.from_numpy(rng.random(mask.shape) < 0.8)] = pad
    nested = nest_batch({"mask": mask, "field": field}, {"field": NestedFieldSpec("mask", pad)})
    expected = reference_loops.nest(field, mask, pad)
    assert reference_loops.unnest(expected, mask.shape[1], pad).equal(field)
    got = nested.jagged("field").unbind()
    for row, (_, values) in zip(got, expected, strict=True):
        assert row.equal(values)


@given(masks(), st.sampled_from([0, -100]))
def test_droppable_field_loses_only_masked_values(mask: torch.Tensor, pad: int) -> None:
    field = torch.arange(1, mask.numel() + 1).view(mask.shape)
    nested = nest_batch(
        {"mask": mask, "field": field}, {"field": NestedFieldSpec("mask", pad, droppable=True)}
    )
    assert unnest_batch(nested)["field"].equal(torch.where(mask != 0, field, pad))


def test_masked_tool_tokens_are_kept() -> None:
    responses = torch.tensor([[11, 12, 91, 92, 13, 0], [21, 90, 22, 23, 0, 0]])
    loss_mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 0, 0]])
    batch = {"responses": responses, "loss_mask": loss_mask}
    nested = nest_batch(batch, {"responses": "loss_mask", "loss_mask": "loss_mask"})
    out = unnest_batch(nested)
    assert out["responses"].equal(responses)
    assert out["loss_mask"].equal(loss_mask)
    rows = [row.tolist() for row in nested.jagged("responses").unbind()]
    assert rows == [[11, 12, 91, 92, 13], [21, 90, 22, 23]]


def test_nested_size_is_that_of_the_kept_values() -> None:
    mask = torch.zeros(64, 1000)
    mask[:, 900:] = 1
    batch = {"a": torch.randint(2**40, (64, 1000)) * mask.long(), "b": torch.randn(64, 1000) * mask.abs()}
    batch["b"][mask == 0] = 0  # randn * 0 leaves -0.0, which is not the pad value
    fields = {"a": NestedFieldSpec("mask"), "b": NestedFieldSpec("mask")}
    nested = nest_batch({**batch, "mask": mask}, {**fields, "mask": "mask"})
    values = 64 * 100 * (8 + 4 + 4)
    masks = 64 * (125 + 8) + 8  # one bit per column, and the rows' lengths
    assert nested.nbytes == values + masks


def small_batch() -> dict[str, Any]:
    return {
        "mask": torch.tensor([[1, 1, 0], [1, 0, 0]]),
        "field": torch.tensor([[5, 6, 0], [7, 0, 0]]),
        "advantages": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "score": torch.tensor([0.5, 1.5]),
        "names": ["a", "b"],
        "sets": BatchCandidateSets.from_rows([CandidateSets.empty(2), CandidateSets.empty(1)]),
        "temperature": 0.7,
        "table": np.arange(3),
    }


def test_other_fields_are_kept_and_split_by_rows() -> None:
    batch = small_batch()
    nested = nest_batch(batch, {"field": "mask"})
    out = unnest_batch(nested)
    assert list(out) == list(batch)
    assert out["advantages"].data_ptr() == batch["advantages"].data_ptr()
    assert out["sets"] is batch["sets"]
    last = unnest_batch(nested.chunk(2)[1])
    assert last["advantages"].tolist() == [[3.0, 4.0]]
    assert last["score"].tolist() == [1.5]
    assert last["names"] == ["b"]
    assert list(last["sets"]) == [CandidateSets.empty(1)]
    assert last["temperature"] == 0.7
    assert last["table"].tolist() == [0, 1, 2]


def test_pickled_part_contains_only_its_own_rows() -> None:
    batch = {"mask": torch.ones(100, 100), "field": torch.rand(100, 100), "dense": torch.rand(100, 1000)}
    nested = nest_batch(batch, {"field": "mask"})
    assert len(pickle.dumps(nested[:1])) < len(pickle.dumps(nested)) / 50


def test_strict_error_names_shape_dtype_and_bytes() -> None:
    message = r"mask \[2, 3\] torch.int64 48 bytes; advantages \[2, 2\] torch.float32 16 bytes"
    with pytest.raises(InvalidInputError, match=message):
        nest_batch(small_batch(), {"field": "mask"}, strict=True)
    batch = small_batch()
    del batch["advantages"]
    nest_batch(batch, {"field": "mask", "mask": "mask"}, strict=True)


def test_strict_reports_fields_that_cannot_be_nested() -> None:
    mask, field = torch.ones(2, 3), torch.zeros(2, 3)
    with gpu():
        with pytest.raises(InvalidInputError, match=r"away \[2, 3\] torch.float32 24 bytes"):
            nest_batch({"mask": mask, "away": field.to("cuda")}, {"mask": "mask"}, strict=True)
        with pytest.raises(InvalidInputError, match="away: got 2 rows, expected 1, as in mask"):
            nest_batch({"mask": mask[:1], "away": field.to("cuda")}, {"mask": "mask"})
    with pytest.raises(InvalidInputError, match=r"wide \[2, 3\] torch.complex128 96 bytes"):
        nest_batch({"mask": mask, "wide": field.to(torch.complex128)}, {"mask": "mask"}, strict=True)
    tensors = TensorDict({"mask": mask, "inner": {"x": {"y": field}, "z": field[:, 0]}}, batch_size=[2])
    with pytest.raises(InvalidInputError, match=r": inner.x.y \[2, 3\] torch.float32 24 bytes$"):
        nest_batch(tensors, {"mask": "mask"}, strict=True)


def test_input_is_not_changed_and_shares_no_nested_memory() -> None:
    batch = small_batch()
    out = unnest_batch(nest_batch(batch, {"field": "mask"}))
    out["field"][0, 0] = 99
    assert batch["field"].tolist() == [[5, 6, 0], [7, 0, 0]]


def test_strided_fields_and_fields_with_grad_round_trip() -> None:
    mask = torch.ones(3, 4)
    field = torch.rand(4, 3, requires_grad=True)
    out = unnest_batch(nest_batch({"mask": mask, "field": field.T, "other": field.T}, {"field": "mask"}))
    assert identical(out["field"], field.T.detach())
    assert identical(out["other"], field.T.detach())


def test_lazily_conjugated_and_negated_fields_round_trip() -> None:
    field = torch.tensor([[1j, 2.0]]).conj()
    batch = {"mask": torch.ones(1, 2), "field": field, "other": field.imag}
    out = unnest_batch(nest_batch(batch, {"field": "mask"}))
    assert identical(out["field"], field.resolve_conj())
    assert identical(out["other"], field.imag.resolve_neg())


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        ({}, {"nothing": "mask"}, "nothing: is not in the batch; there are mask, field"),
        ({}, {"field": "nothing"}, "nothing: is not in the batch"),
        (
            {},
            {"score": "mask"},
            r"score: got torch.float32 \[2\] on cpu, expected a padded CPU tensor of two",
        ),
        ({}, {"names": "mask"}, "names: got .*list"),
        ({}, {"field": "score"}, "score: got"),
        ({}, {"advantages": "mask"}, "advantages: got 2 columns, expected 3"),
        ({"mask": torch.ones(2, 3, 1)}, {"field": "mask"}, "mask: got shape"),
        ({"field": torch.ones(3, 3)}, {"field": "mask"}, "field: got 3 rows, expected 2, as in mask"),
        ({"sets": BatchCandidateSets.from_rows([])}, {"field": "mask"}, "sets: got 0 rows"),
        ({}, {"field": NestedFieldSpec("mask", 0.5)}, "pad 0.5 is not a valid torch.int64"),
        (
            {"field": torch.zeros(2, 3, dtype=torch.int8)},
            {"field": NestedFieldSpec("mask", 300)},
            "pad 300 is not a valid torch.int8",
        ),
        (
            {"field": torch.zeros(2, 3, dtype=torch.float16)},
            {"field": NestedFieldSpec("mask", 70_000)},
            "pad 70000 is not a valid torch.float16; the nearest is inf",
        ),
        ({}, {"field": NestedFieldSpec("mask", "0")}, "pad 0 is not a valid torch.int64"),
        ({"field": torch.zeros(2, 3, device="meta")}, {"field": "mask"}, "on meta, expected a padded CPU"),
        ({"field": torch.zeros(2, 3).to_sparse()}, {}, "field: got a tensor of layout torch.sparse_coo"),
        (
            {"field": torch.zeros(2, 4, 3)},
            {"field": "mask"},
            "field: got 4 columns, expected 3, as its mask has; see its spec's `columns`",
        ),
        (
            {"field": torch.zeros(4, 2, 3)},
            {},
            "field: got 4 rows, expected 2, as in mask$",
        ),
        ({}, {"field": NestedFieldSpec("mask", columns=2)}, "columns=2, expected a dimension from 1 to 1"),
        ({}, {"field": NestedFieldSpec("mask", columns=-1)}, "columns=-1, expected a dimension from 1 to 1"),
        (
            {"field": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)},
            {"field": "mask"},
            "field: got .*, expected a padded CPU tensor",
        ),
    ],
)
def test_inconsistent_batches_are_refused(change: Any, fields: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        nest_batch({**small_batch(), **change}, fields)


def test_refuses_an_empty_batch_and_no_parts() -> None:
    with pytest.raises(InvalidInputError, match="no tensors with rows"):
        nest_batch({}, {})
    nested = nest_batch(small_batch(), {"field": "mask"})
    with pytest.raises(InvalidInputError, match="parts: got 0"):
        nested.chunk(0)
    with pytest.raises(InvalidInputError, match="rows: got 2"):
        nested.take([2])
    with pytest.raises(InvalidInputError, match="mask: is not a nested field; there are field"):
        nested.jagged("mask")


def test_jagged_views_hold_the_kept_values_of_higher_rank_fields() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    field = torch.arange(12.0).view(2, 3, 2)
    nested = nest_batch({"mask": mask, "field": field}, {"field": NestedFieldSpec("mask", droppable=True)})
    jagged = nested.jagged("field")
    assert jagged.is_nested
    assert jagged.dtype == torch.float32
    assert [row.tolist() for row in jagged.unbind()] == [[[0.0, 1.0], [4.0, 5.0]], []]


def test_tensordict_comes_back_as_a_tensordict() -> None:
    batch = small_batch()
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    source = TensorDict(tensors, batch_size=[2])
    source["inner"] = TensorDict({"x": torch.arange(2)}, batch_size=[2])
    source.set_non_tensor("sets", batch["sets"])
    source.set_non_tensor("temperature", 0.7)
    nested = nest_batch(source, {"field": "mask", "mask": "mask"})
    out = unnest_batch(pickle.loads(pickle.dumps(nested)))
    assert isinstance(out, TensorDict)
    assert out.batch_size == torch.Size([2])
    assert set(out.keys()) == set(source.keys())
    for name, tensor in tensors.items():
        assert identical(out[name], tensor)
    assert out["inner", "x"].tolist() == [0, 1]
    assert out["sets"] == batch["sets"]
    assert out["temperature"] == 0.7
    last = unnest_batch(nested[1:])
    assert last.batch_size == torch.Size([1])
    assert last["sets"] == batch["sets"][1:]
    assert last["field"].tolist() == [[7, 0, 0]]


def test_a_tensordicts_non_tensors_keep_their_kind() -> None:
    source = TensorDict({"x": torch.arange(3)}, batch_size=[3])
    source["names"] = ["a", "b", "c"]  # one for each row: a stack
    source["stops"] = NonTensorData([7, 8, 9], batch_size=[3])  # one for all rows
    nested = nest_batch(source, {})
    out = unnest_batch(pickle.loads(pickle.dumps(nested)))
    assert list(out["names"]) == ["a", "b", "c"]
    assert out[1]["names"] == source[1]["names"] == "b"
    assert out[1]["stops"] == source[1]["stops"] == [7, 8, 9]
    part = unnest_batch(nested.take([2, 0]))
    assert list(part["names"]) == ["c", "a"]
    assert part[0]["names"] == "c"
    assert part["stops"] == [7, 8, 9]
    assert list(unnest_batch(nested.take([]))["names"]) == []


def test_position_ids_with_their_columns_last_round_trip() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 1]])
    position_ids = torch.arange(24).view(2, 3, 4) * mask[:, None] + torch.tensor([1, 0, 0, 0])
    spec = NestedFieldSpec("mask", columns=2)
    nested = nest_batch({"mask": mask, "position_ids": position_ids}, {"position_ids": spec}, strict=False)
    out = unnest_batch(pickle.loads(pickle.dumps(nested)))["position_ids"]
    assert identical(out, position_ids)
    assert out.is_contiguous()
    assert identical(unnest_batch(nested.take([1]))["position_ids"], position_ids[1:])
    assert [row.shape for row in nested.jagged("position_ids").unbind()] == [(4, 3), (3, 3)]
    heads_first = position_ids.transpose(0, 1)
    with pytest.raises(InvalidInputError, match="mask: got 2 rows, expected 3, as in position_ids"):
        nest_batch({"position_ids": heads_first, "mask": mask}, {"position_ids": spec})
    moved = nest_batch({"mask": mask, "position_ids": heads_first.transpose(0, 1)}, {"position_ids": spec})
    assert identical(unnest_batch(moved)["position_ids"], position_ids)


def jagged(rows: list[torch.Tensor], ragged: int = 1) -> torch.Tensor:
    values = torch.cat(rows, ragged - 1)
    offsets = torch.tensor(np.cumsum([0, *(row.shape[ragged - 1] for row in rows)]))
    return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=ragged)


def test_a_batch_that_holds_jagged_tensors_is_nested() -> None:
    rows = [torch.arange(3.0), torch.arange(0.0), torch.arange(2.0)]
    positions = [torch.arange(9).view(3, 3), torch.zeros(3, 0).long(), torch.arange(6).view(3, 2)]
    mask = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 0]])
    batch = {
        "input_ids": jagged(rows),
        "position_ids": jagged(positions, ragged=2),
        "mask": mask,
        "field": mask * 5,
    }
    nested = nest_batch(batch, {"field": "mask", "mask": "mask"}, strict=True)
    assert nested.nbytes > sum(row.nbytes for row in [*rows, *positions])
    for index in ([0, 1, 2], [2], [2, 0, 2], [1], []):
        part = pickle.loads(pickle.dumps(nested.take(index)))
        out = unnest_batch(part)
        assert out["input_ids"].is_nested
        assert out["position_ids"].shape[1] == 3
        for name, expected in (("input_ids", rows), ("position_ids", positions)):
            held = out[name].unbind()
            assert len(held) == len(index)
            assert all(identical(held[k], expected[i]) for k, i in enumerate(index))
        assert identical(out["field"], batch["field"][index])
    whole = unnest_batch(nested)
    assert whole["input_ids"] is batch["input_ids"]
    assert [len(part["input_ids"]) for part in map(unnest_batch, nested.chunk(2))] == [2, 1]
    with pytest.raises(InvalidInputError, match="input_ids: got 3 rows, expected 2, as in mask"):
        nest_batch({"mask": mask[:2], "input_ids": batch["input_ids"]}, {})


WAYS: dict[str, Callable[[dict[str, Any], list[int]], Iterable[tuple[list[int], Any]]]] = {
    "take_batch": lambda batch, rows: [(rows[::-1], take_batch(batch, rows[::-1]))],
    "take_batch of a TensorDict": lambda batch, rows: [
        (rows[::-1], take_batch(TensorDict(batch, [len(rows)]), rows[::-1]))
    ],
    "slice": lambda batch, rows: [(rows[1:], unnest_batch(nest_batch(batch, {})[1:]))],
    "chunk": lambda batch, rows: [
        (part.tolist(), unnest_batch(each))
        for part, each in zip(np.array_split(rows, 2), nest_batch(batch, {}).chunk(2), strict=True)
    ],
    "MicroBatches.of": lambda batch, rows: [
        (part.tolist(), micro)
        for plan in [split_micro_batches([1] * len(rows), 2, ranks=2)]
        for rank in range(2)
        for part, micro in zip(plan.rows[rank], plan.of(batch, rank), strict=True)
    ],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lengths", [[5, 8, 2], [4, 4, 4], [0, 3], [0, 0], [7], [0]])
@pytest.mark.parametrize("shape", [("j",), ("j", 4), (3, "j"), (9, "j"), (3, 2, "j")])
def test_parts_of_a_jagged_tensor_are_padded_to_their_longest_row(
    way: str, lengths: list[int], shape: tuple[Any, ...]
) -> None:
    ragged = shape.index("j")
    rows = [torch.randn([n if size == "j" else size for size in shape]) for n in lengths]
    batch = {"x": jagged(rows, ragged + 1), "label": torch.arange(len(rows))}
    for part, got in WAYS[way](batch, list(range(len(rows)))):
        assert got["label"].tolist() == part
        width = max((lengths[i] for i in part), default=0)
        expected = torch.zeros(len(part), *(width if size == "j" else size for size in shape))
        for line, i in zip(expected, part, strict=True):
            line.narrow(ragged, 0, lengths[i]).copy_(rows[i])
        if part:  # torch pads no rows to width 0 in every dimension
            assert torch.nested.to_padded_tensor(got["x"], 0).equal(expected)


@pytest.mark.parametrize("lengths", [[5, 8, 2], [4, 4, 4], [0, 3], [0, 0], [7], [0]])
@pytest.mark.parametrize("rest", [(), (3,), (9,), (2, 2)])
def test_a_jagged_field_is_padded_to_its_longest_row(lengths: list[int], rest: tuple[int, ...]) -> None:
    mask = (torch.arange(20) < torch.tensor(lengths)[:, None]).long()
    field = torch.randint(1, 9, (*mask.shape, *rest)) * mask.view(*mask.shape, *(1 for _ in rest))
    nested = nest_batch({"mask": mask, "field": field}, {"field": "mask"})
    assert torch.nested.to_padded_tensor(nested.jagged("field"), 0).equal(field[:, : max(lengths)])


def test_a_pickled_part_of_a_jagged_tensor_holds_its_own_rows_only() -> None:
    rows = [torch.zeros(2), torch.zeros(100_000)]
    nested = nest_batch({"x": jagged(rows)}, {})
    assert len(pickle.dumps(nested[:1])) < 10_000


def test_a_tensordict_with_jagged_tensors_comes_back() -> None:
    source = TensorDict({"x": torch.arange(2), "ids": jagged([torch.arange(3), torch.arange(1)])}, [2])
    out = unnest_batch(nest_batch(source, {}).take([1, 0]))
    assert out["x"].tolist() == [1, 0]
    assert [row.tolist() for row in out["ids"].unbind()] == [[0], [0, 1, 2]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_of_the_older_layout_are_refused() -> None:
    old = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    message = "x: got a nested tensor of layout torch.strided, .* with layout=torch.jagged"
    with pytest.raises(InvalidInputError, match=message):
        nest_batch({"x": old}, {})


@given(masks(), st.sampled_from([(), (2,)]), st.data())
def test_a_workers_values_go_back_into_the_padded_layout(
    mask: torch.Tensor, rest: tuple[int, ...], data: st.DataObject
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    field = random_values(rng, (*mask.shape, *rest), torch.float64, 100)
    nested = nest_batch({"mask": mask, "field": field}, {"field": NestedFieldSpec("mask", droppable=True)})
    index = data.draw(st.lists(st.integers(0, len(mask) - 1), max_size=5))
    part = nested.take(index)
    kept = (mask[index] != 0).view(len(index), mask.shape[1], *(1 for _ in rest))
    expected = torch.where(kept, field[index], 0)
    values = part.jagged("field")
    assert identical(part.padded(values, "field"), expected)
    assert identical(part.padded(values.values(), "field"), expected)
    ones = torch.ones(int(values.offsets()[-1]))
    assert identical(part.padded(ones, "field"), (mask[index] != 0).float())


def test_padded_values_keep_their_gradient_and_those_that_do_not_fit_are_refused() -> None:
    nested = nest_batch(small_batch(), {"field": "mask"})
    lengths = nested.jagged("field").offsets().diff().tolist()
    values = torch.arange(float(sum(lengths)), requires_grad=True)
    weights = torch.arange(1.0, 7).view(2, 3)
    (nested.padded(values, "field") * weights).sum().backward()
    assert values.grad is not None
    assert identical(nested.padded(values.grad, "field"), torch.where(kept_columns(nested), weights, 0))
    leaf = torch.ones(sum(lengths), requires_grad=True)
    rows = torch.nested.nested_tensor_from_jagged(leaf * 2, torch.tensor(np.cumsum([0, *lengths])))
    nested.padded(rows, "field").sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0] * len(leaf)
    with pytest.raises(InvalidInputError, match=rf"values: got shape \[1\], expected {sum(lengths)} values"):
        nested.padded(torch.ones(1), "field")
    with pytest.raises(InvalidInputError, match=r"values\[0\]: got 9 values, expected"):
        nested.padded(jagged([torch.ones(9), torch.ones(lengths[1])]), "field")
    with pytest.raises(
        InvalidInputError, match=r"values: got a jagged tensor of shape .*expected \[2, ragged"
    ):
        nested.padded(jagged([torch.ones(1)]), "field")
    with pytest.raises(InvalidInputError, match=r"expected \[2, ragged"):
        nested.padded(jagged([torch.ones(3, 2), torch.ones(3, 1)], ragged=2), "field")
    with pytest.raises(InvalidInputError, match="mask: is not a nested field"):
        nested.padded(values, "mask")


def kept_columns(nested: NestedBatch) -> torch.Tensor:
    ones = torch.ones(int(nested.jagged("field").offsets()[-1]))
    return nested.padded(ones, "field") != 0
