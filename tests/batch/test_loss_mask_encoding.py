"""Packed loss masks equal plain lists of ints, and refuse other values and shapes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp.batch import PackedLossMask, pack_loss_mask, unpack_loss_masks
from sglang_topp.errors import InvalidInputError
from tests.fake_gpu import gpu

FORMS: Any = st.sampled_from(["bits", "int8"])
MASKS = st.lists(st.integers(0, 1), max_size=70)
KINDS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "list of bools": lambda row: [bool(x) for x in row],
    "list of floats": lambda row: [float(x) for x in row],
    **{f"{dtype.__name__} array": lambda row, dtype=dtype: np.array(row, dtype)
       for dtype in (np.bool_, np.int8, np.uint8, np.int64, np.float16, np.float64)},
    **{f"{dtype} tensor": lambda row, dtype=dtype: torch.tensor(row, dtype=dtype)
       for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float32)},
}  # fmt: skip


@given(MASKS, FORMS, st.sampled_from(list(KINDS)))
def test_packing_round_trips_for_every_input_type(mask: list[int], form: Any, kind: str) -> None:
    packed = pack_loss_mask(KINDS[kind](mask), form=form, length=len(mask))
    assert packed.data.dtype == (np.uint8 if form == "bits" else np.int8)
    assert packed.nbytes == (-(-len(mask) // 8) if form == "bits" else len(mask))
    assert len(packed) == packed.length == len(mask)
    assert list(packed) == packed.to_numpy().tolist() == mask
    assert packed.to_numpy().dtype == np.int8
    assert packed.sum() == sum(packed) == sum(mask)
    assert packed == pickle.loads(pickle.dumps(packed, 5))
    tensor = packed.to_tensor()
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == mask
    tensor += 1
    assert list(packed) == mask


@given(
    st.lists(st.tuples(MASKS, FORMS), max_size=6), st.sampled_from([torch.int8, torch.int64, torch.float32])
)
def test_many_masks_are_unpacked_together(masks: list[tuple[list[int], Any]], dtype: torch.dtype) -> None:
    out = unpack_loss_masks([pack_loss_mask(mask, form=form) for mask, form in masks], dtype=dtype)
    assert [tensor.tolist() for tensor in out] == [mask for mask, _ in masks]
    assert all(tensor.dtype == dtype for tensor in out)


def test_bits_are_unpacked_on_the_device() -> None:
    masks = [[1, 0, 1], [], [1] * 9]
    with gpu():
        out = unpack_loss_masks([pack_loss_mask(mask) for mask in masks], "cuda")
    assert [tensor.device.type for tensor in out] == ["cuda"] * 3
    assert [tensor.tolist() for tensor in out] == masks


def test_lowest_bit_is_the_first_token() -> None:
    assert pack_loss_mask([1, 0, 0, 0, 0, 0, 0, 0, 0, 1]).data.tolist() == [1, 2]


@pytest.mark.parametrize("form", ["bits", "int8"])
def test_sums_do_not_overflow(form: Any) -> None:
    packed = pack_loss_mask([1] * 100_000, form=form)
    assert packed.sum() == sum(packed) == 100_000


@pytest.mark.parametrize("form", ["bits", "int8"])
def test_packing_copies_the_mask_and_keeps_the_input(form: Any) -> None:
    mask = np.array([1, 0, 1], np.int8)
    packed = pack_loss_mask(mask, form=form)
    mask[:] = 0
    assert list(packed) == [1, 0, 1]
    with pytest.raises(ValueError, match="read-only"):
        packed.data[0] = 0
    ints = [1, 0, 1]
    pack_loss_mask(ints, form=form)
    assert ints == [1, 0, 1]
    assert all(type(value) is int for value in ints)


@pytest.mark.parametrize(
    "bad", [2, -1, 256, 257, 2**70, 0.5, 1.0000001, float("nan"), float("inf"), "1", None, [1]]
)
def test_values_other_than_0_and_1_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"loss mask\[0\]|inhomogeneous|got"):
        pack_loss_mask([1, bad, 0])


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.uint64, np.float32])
def test_array_values_other_than_0_and_1_are_refused(dtype: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"loss mask\[0\]: got 3\S* at token 1, expected 0 or 1"):
        pack_loss_mask(np.array([1, 3, 0], dtype))


@pytest.mark.parametrize("mask", [np.zeros((2, 2), int), np.array(["a"]), 1, np.array(1)])
def test_other_shapes_are_refused(mask: Any) -> None:
    with pytest.raises(InvalidInputError, match="expected one 0 or 1 per token"):
        pack_loss_mask(mask)


def test_wrong_length_and_unknown_form_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="loss mask: got 2 values, expected 3"):
        pack_loss_mask([1, 0], length=3)
    with pytest.raises(InvalidInputError, match="form: got 'bytes'"):
        pack_loss_mask([1, 0], form="bytes")


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (np.zeros(1, np.uint8), 9),
        (np.zeros(2, np.uint8), 8),
        (np.zeros(3, np.int8), 4),
        (np.zeros(1, np.int64), 1),
        (np.full(1, 0b100, np.uint8), 2),
        (np.zeros((1, 1), np.uint8), 1),
        (np.array([1, 2], np.int8), 2),
        (np.array([-1, 0], np.int8), 2),
    ],
)
def test_data_that_does_not_fit_the_length_is_refused(data: Any, length: int) -> None:
    with pytest.raises(InvalidInputError, match="data:"):
        PackedLossMask(data, length)
