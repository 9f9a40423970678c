"""Loss masks become int8 arrays, and other values and shapes are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp.batch import pack_loss_mask, unpack_loss_masks
from sglang_topp.errors import InvalidInputError
from tests.fake_gpu import gpu

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


@given(MASKS, st.sampled_from(list(KINDS)))
def test_a_mask_of_every_input_type_becomes_int8(mask: list[int], kind: str) -> None:
    packed = pack_loss_mask(KINDS[kind](mask), length=len(mask))
    assert packed.dtype == np.int8
    assert packed.tolist() == mask
    (tensor,) = unpack_loss_masks([packed])
    assert tensor.dtype == torch.float32
    assert tensor.tolist() == mask
    tensor += 1
    assert packed.tolist() == mask


@given(st.lists(MASKS, max_size=6), st.sampled_from([torch.int8, torch.int64, torch.float32]))
def test_many_masks_are_unpacked_together(masks: list[list[int]], dtype: torch.dtype) -> None:
    out = unpack_loss_masks([pack_loss_mask(mask) for mask in masks], dtype=dtype)
    assert [tensor.tolist() for tensor in out] == masks
    assert all(tensor.dtype == dtype for tensor in out)


def test_masks_are_unpacked_on_the_device() -> None:
    masks = [[1, 0, 1], [], [1] * 9]
    with gpu():
        out = unpack_loss_masks([pack_loss_mask(mask) for mask in masks], "cuda")
    assert [tensor.device.type for tensor in out] == ["cuda"] * 3
    assert [tensor.tolist() for tensor in out] == masks


def test_packing_copies_the_mask() -> None:
    mask = np.array([1, 0, 1], np.int8)
    packed = pack_loss_mask(mask)
    mask[:] = 0
    assert packed.tolist() == [1, 0, 1]
    with pytest.raises(ValueError, match="read-only"):
        packed[0] = 0


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


def test_a_wrong_length_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="loss mask: got 2 values, expected 3"):
        pack_loss_mask([1, 0], length=3)


def test_the_message_names_the_mask_and_the_token() -> None:
    with pytest.raises(InvalidInputError, match=r"loss masks\[2\]: got 2 at token 1, expected 0 or 1"):
        unpack_loss_masks([[1], [], [1, 2], [3]])
