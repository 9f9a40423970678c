"""Nested batches round-trip bit for bit: whole, in slices, and reordered."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from sglang_topp import CandidateSets
from sglang_topp.batch import BatchCandidateSets, NestedBatch, nest_batch, take_batch, unnest_batch
from sglang_topp.errors import InvalidInputError
from tests.batch import reference_loops

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
    batch, fields, pads = {"mask": mask, "label": torch.arange(len(mask))}, {"mask": "mask"}, {}
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
        batch[f"field{i}"], fields[f"field{i}"], pads[f"field{i}"] = field, "mask", pad
    nested = nest_batch(batch, fields, pads)

    def check(part: NestedBatch, rows: list[int]) -> None:
        out = unnest_batch(pickle.loads(pickle.dumps(part)))
        assert list(out) == list(batch)
        for name, field in batch.items():
            assert identical(out[name], field[rows]), name

    everything = list(range(len(mask)))
    check(nested, everything)
    order = data.draw(st.permutations(everything))
    check(nested.take(order), order)
    twice = data.draw(st.lists(st.sampled_from(everything), max_size=9))
    check(nested.take(twice), twice)
    start, stop = data.draw(st.integers(-8, 8)), data.draw(st.integers(-8, 8))
    check(nested[start:stop], everything[start:stop])


def test_a_mask_that_is_its_own_field_keeps_negative_zeros() -> None:
    mask = torch.tensor([[1.0, -0.0, 0.0], [0.0, 0.5, -0.0]])
    nested = nest_batch({"mask": mask}, {"mask": "mask"})
    assert identical(unnest_batch(nested)["mask"], mask)


@given(masks(), st.sampled_from([0, 1]), st.sampled_from([(), (2,)]), st.integers(0, 2**32 - 1))
def test_kept_values_equal_those_of_the_reference(
    mask: torch.Tensor, pad: int, rest: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    field = torch.from_numpy(rng.integers(0, 3, (*mask.shape, *rest)))
    field[torch.from_numpy(rng.random(mask.shape) < 0.8)] = pad
    nested = nest_batch({"mask": mask, "field": field}, {"field": "mask"}, {"field": pad})
    expected = reference_loops.nest(field, mask, pad)
    assert reference_loops.unnest(expected, mask.shape[1], pad).equal(field)
    assert kept_values(nested, "field").equal(torch.cat([values for _, values in expected]))


def kept_values(nested: NestedBatch, name: str) -> torch.Tensor:
    entry = nested._entries[name]
    return torch.from_numpy(entry.values).view(entry.dtype)


def test_masked_tool_tokens_are_kept() -> None:
    responses = torch.tensor([[11, 12, 91, 92, 13, 0], [21, 90, 22, 23, 0, 0]])
    loss_mask = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 0, 0]])
    batch = {"responses": responses, "loss_mask": loss_mask}
    nested = nest_batch(batch, {"responses": "loss_mask", "loss_mask": "loss_mask"})
    out = unnest_batch(nested)
    assert out["responses"].equal(responses)
    assert out["loss_mask"].equal(loss_mask)
    assert kept_values(nested, "responses").tolist() == [11, 12, 91, 92, 13, 21, 90, 22, 23]


def test_nested_size_is_that_of_the_kept_values() -> None:
    mask = torch.zeros(64, 1000)
    mask[:, 900:] = 1
    batch = {"a": torch.randint(2**40, (64, 1000)) * mask.long(), "b": torch.randn(64, 1000) * mask.abs()}
    batch["b"][mask == 0] = 0  # randn * 0 leaves -0.0, which is not the pad value
    nested = nest_batch({**batch, "mask": mask}, {"a": "mask", "b": "mask", "mask": "mask"})
    values = 64 * 100 * (8 + 4 + 4)
    masks = 64 * (125 + 8) + 8  # one bit per column, and the rows' lengths
    assert 0 < len(pickle.dumps(nested)) - values - masks < 1500


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
    last = unnest_batch(nested[1:])
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
        ({}, {"names": "mask"}, "names: got .*'a', 'b'"),
        ({}, {"field": "score"}, "score: got"),
        ({}, {"advantages": "mask"}, "advantages: got 2 columns, expected 3, as mask has"),
        ({"mask": torch.ones(2, 3, 1)}, {"field": "mask"}, "mask: got shape"),
        ({"field": torch.ones(3, 3)}, {"field": "mask"}, "field: got 3 rows, expected 2, as in mask"),
        ({"sets": BatchCandidateSets.from_rows([])}, {"field": "mask"}, "sets: got 0 rows"),
        ({"field": torch.zeros(2, 3, device="meta")}, {"field": "mask"}, "on meta, expected a padded CPU"),
        ({"field": torch.zeros(2, 3).to_sparse()}, {}, "field: got torch.sparse_coo, which cannot be cut"),
        ({"field": torch.zeros(2, 4, 3)}, {"field": "mask"}, "field: got 4 columns, expected 3, as mask has"),
        ({"field": torch.zeros(4, 2, 3)}, {}, "field: got 4 rows, expected 2, as in mask$"),
        (
            {"field": torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)},
            {"field": "mask"},
            "field: got torch.jagged, which cannot be cut by rows; expected a padded tensor, an array, or a",
        ),
        ({"inner": TensorDict({"x": torch.ones(2)}, [2])}, {}, "inner: got TensorDict, which cannot be cut"),
        ({"inner": NonTensorStack("a", "b")}, {}, "inner: got .*, which cannot be cut"),
    ],
)
def test_inconsistent_batches_are_refused(change: Any, fields: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        nest_batch({**small_batch(), **change}, fields)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [(torch.int64, 0.5), (torch.int8, 300), (torch.float16, 70_000), (torch.int64, 2**53 + 1)],
)
def test_a_pad_value_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, pad: float) -> None:
    batch = {**small_batch(), "field": torch.zeros(2, 3, dtype=dtype)}
    with pytest.raises(InvalidInputError, match=f"field: pad {pad} is not a valid {dtype}; the nearest is"):
        nest_batch(batch, {"field": "mask"}, {"field": pad})


def test_a_tensordict_is_no_batch() -> None:
    tensors = TensorDict({"x": torch.arange(2), "inner": {"y": torch.arange(2)}}, batch_size=[2])
    with pytest.raises(InvalidInputError, match="batch: got TensorDict, expected a dict"):
        nest_batch(tensors, {})
    with pytest.raises(InvalidInputError, match="inner: got TensorDict, which cannot be cut"):
        take_batch(dict(tensors.items()), [1])
    flat = dict(tensors.flatten_keys().items())
    assert take_batch(flat, [1])["inner.y"].tolist() == [1]


def test_refuses_an_empty_batch_and_rows_that_are_not_there() -> None:
    with pytest.raises(InvalidInputError, match="no tensors with rows"):
        nest_batch({}, {})
    nested = nest_batch(small_batch(), {"field": "mask"})
    with pytest.raises(InvalidInputError, match="rows: got 2"):
        nested.take([2])
