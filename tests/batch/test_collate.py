"""Collation equals its plain loop bit for bit, and refuses what does not fit together."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_topp import CandidateSets
from sglang_topp.batch import RowSets, collate_rl, collate_sft, pack_loss_mask, reference
from sglang_topp.errors import InvalidInputError
from tests.batch.strategies import IDS, rollout_lists, sets_of
from tests.gpu import gpu

PAD = 7


def assert_same(got: Any, expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        assert torch.equal(got[name], tensor), name
        if tensor.dtype == torch.float32:  # -0.0 is not 0.0
            assert torch.equal(got[name].view(torch.int32), tensor.view(torch.int32)), name


def _array(kind: str) -> Any:
    return {
        "list": lambda row, floats: list(row),
        "tuple": lambda row, floats: tuple(row),
        "narrow array": lambda row, floats: np.array(row, np.float32 if floats else np.int64),
        "wide array": lambda row, floats: np.array(row, np.float64 if floats else np.int64),
        "tensor": lambda row, floats: torch.tensor(row, dtype=torch.float32 if floats else torch.int64),
        "tensor with grad": lambda row, floats: (
            torch.tensor(row, dtype=torch.float32, requires_grad=True) if floats else torch.tensor(row).long()
        ),
    }[kind]


KINDS = ["list", "tuple", "narrow array", "wide array", "tensor", "tensor with grad"]


@given(rollout_lists(), st.sampled_from([0, PAD, -1]), st.booleans(), st.data())
def test_rl_equals_the_loop_for_every_kind_of_row(
    columns: dict[str, Any], pad: int, with_logprobs: bool, data: st.DataObject
) -> None:
    if not with_logprobs:
        del columns["logprobs"]
    mixed = {}
    for name, rows in columns.items():
        kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=len(rows), max_size=len(rows)))
        floats = name in ("rewards", "logprobs")
        mixed[name] = [_array(kind)(row, floats) for kind, row in zip(kinds, rows, strict=True)]
    assert_same(collate_rl(**mixed, pad_token_id=pad), reference.collate_rl(**columns, pad_token_id=pad))


@given(rollout_lists(), st.integers(0, 2**32 - 1))
def test_rl_carries_every_samples_sets(columns: dict[str, Any], seed: int) -> None:
    sets = sets_of(columns["responses"], columns["loss_masks"], seed)
    batch = collate_rl(**columns, candidates=sets, pad_token_id=PAD)
    candidates = batch.pop("candidates")
    assert list(candidates) == sets
    assert candidates.row_offsets.tolist() == np.cumsum([0, *map(len, columns["responses"])]).tolist()
    assert_same(batch, reference.collate_rl(**columns, pad_token_id=PAD))


@pytest.mark.parametrize("form", ["bits", "int8"])
def test_rl_takes_packed_loss_masks(form: Any) -> None:
    columns = rl()
    packed = [pack_loss_mask(mask, form=form) for mask in columns["loss_masks"]]
    assert_same(
        collate_rl(**{**columns, "loss_masks": packed}, pad_token_id=PAD),
        reference.collate_rl(**columns, pad_token_id=PAD),
    )


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int32, np.float16, np.float32])
def test_rl_takes_masks_and_ids_of_every_width(dtype: Any) -> None:
    columns = rl()
    narrow = dict(columns, loss_masks=[np.array(mask, dtype) for mask in columns["loss_masks"]])
    narrow["responses"] = [np.array(ids, np.uint32) for ids in columns["responses"]]
    assert_same(collate_rl(**narrow, pad_token_id=PAD), reference.collate_rl(**columns, pad_token_id=PAD))


def test_rl_takes_bfloat16_rewards() -> None:
    columns = rl()
    rewards = [torch.tensor(row, dtype=torch.bfloat16) for row in columns["rewards"]]
    assert_same(
        collate_rl(**{**columns, "rewards": rewards}, pad_token_id=PAD),
        reference.collate_rl(**{**columns, "rewards": rewards}, pad_token_id=PAD),
    )


def test_rl_takes_rows_of_any_device_and_mixes_them() -> None:
    columns = rl()
    with gpu():
        mixed = {
            "prompts": [torch.tensor(columns["prompts"][0], device="cuda"), columns["prompts"][1]],
            "responses": [torch.tensor(row, device="cuda") for row in columns["responses"]],
            "rewards": [torch.tensor(row, device="cuda", requires_grad=True) for row in columns["rewards"]],
            "loss_masks": [
                torch.tensor(row, device="cuda", dtype=torch.bool) for row in columns["loss_masks"]
            ],
            "logprobs": [
                torch.tensor(columns["logprobs"][0]),
                torch.tensor(columns["logprobs"][1], device="cuda"),
            ],
        }
        batch = collate_rl(**mixed, pad_token_id=PAD)
    assert_same(batch, reference.collate_rl(**columns, pad_token_id=PAD))


def test_rl_does_not_share_memory_with_its_inputs() -> None:
    columns = rl(one_sample=True)
    rewards = torch.tensor(columns["rewards"][0], dtype=torch.float32)
    batch = collate_rl(**{**columns, "rewards": [rewards]}, pad_token_id=PAD)
    batch["rewards"].zero_()
    assert rewards.tolist() == pytest.approx(columns["rewards"][0])


def test_rl_warns_of_too_long_a_sample_and_cuts_nothing() -> None:
    columns = rl()
    with pytest.warns(UserWarning, match=r"sample 1 has 7 tokens, more than max_seq_len 6"):
        batch = collate_rl(**columns, pad_token_id=PAD, max_seq_len=6)
    assert batch["sequences"].shape == (2, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        collate_rl(**columns, pad_token_id=PAD, max_seq_len=7)


def rl(one_sample: bool = False) -> dict[str, Any]:
    columns = {
        "prompts": [[1, 2], [3, 4, 5]],
        "responses": [[10, 11, 12], [20, 21, 22, 23]],
        "rewards": [[0.0, 0.5, 1.0], [0.1, 0.2, 0.3, 0.4]],
        "loss_masks": [[1, 0, 1], [1, 1, 1, 0]],
        "logprobs": [[-0.1, -0.2, -0.3], [-1.0, -2.0, -3.0, -4.0]],
    }
    return {name: rows[:1] for name, rows in columns.items()} if one_sample else columns


@pytest.mark.parametrize("field", ["rewards", "loss_masks", "logprobs", "candidates"])
@pytest.mark.parametrize("change", [-1, 1])
def test_rl_refuses_a_row_of_another_length(field: str, change: int) -> None:
    columns = rl()
    if field == "candidates":
        columns[field] = [CandidateSets.empty(3), CandidateSets.empty(4 + change)]
    else:
        columns[field][1] = columns[field][1][:change] if change < 0 else [*columns[field][1], 0]
    with pytest.raises(InvalidInputError, match=rf"{field}\[1\]: got {4 + change} values, expected 4"):
        collate_rl(**columns, pad_token_id=PAD)


@pytest.mark.parametrize("field", ["responses", "rewards", "loss_masks", "logprobs"])
def test_rl_refuses_another_number_of_samples(field: str) -> None:
    columns = rl()
    columns[field] = columns[field][:1]
    with pytest.raises(InvalidInputError, match=rf"{field}: got 1 samples, expected 2"):
        collate_rl(**columns, pad_token_id=PAD)


@pytest.mark.parametrize(
    ("field", "row", "message"),
    [
        ("prompts", [1.5, 2], r"prompts\[1\]: required argument is not an integer"),
        ("prompts", np.array([1.5, 2]), r"prompts\[1\]: got dtype float64, expected integers"),
        ("prompts", np.array([1, 2], np.uint64), r"prompts\[1\]: got dtype uint64, expected integers"),
        ("prompts", [1, 2**63], r"prompts\[1\]"),
        ("prompts", [], r"prompts\[1\]: is empty"),
        ("prompts", 3, r"prompts\[1\]: got 3, expected one value per token"),
        ("prompts", [[1], [2]], r"prompts\[1\]"),
        ("responses", np.zeros((4, 2), int), r"responses\[1\]: got shape \(4, 2\)"),
        ("rewards", ["a"] * 4, r"rewards\[1\]"),
        ("rewards", [None] * 4, r"rewards\[1\]"),
        ("rewards", np.array(["a"] * 4), r"rewards\[1\]: got dtype <U1"),
        ("loss_masks", [1, 0, 2, 0], r"loss_masks\[1\]: got 2 at token 2"),
        ("loss_masks", [1, 0, 0.5, 0], r"loss_masks\[1\]: got 0.5 at token 2"),
        ("loss_masks", [1, 0, -1, 0], r"loss_masks\[1\]: got -1 at token 2"),
        ("loss_masks", [1, 0, 300, 0], r"loss_masks\[1\]: got 300 at token 2"),
        ("loss_masks", np.array([1, 0, -1, 0], np.int8), r"loss_masks\[1\]: got -1 at token 2"),
        ("loss_masks", np.array([1, 0, 256, 0]), r"loss_masks\[1\]: got 256 at token 2"),
        ("loss_masks", [1, 0, float("nan"), 0], r"loss_masks\[1\]: got nan at token 2"),
    ],
)
def test_rl_refuses_wrong_values_by_name(field: str, row: Any, message: str) -> None:
    columns = rl()
    columns[field][1] = row
    with pytest.raises(InvalidInputError, match=message):
        collate_rl(**columns, pad_token_id=PAD)


@pytest.mark.parametrize("field", ["prompts", "responses", "rewards", "loss_masks"])
@pytest.mark.parametrize("rows", [None, 1.0, torch.tensor(1.0), iter([[1]])])
def test_rl_refuses_a_field_without_rows(field: str, rows: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"{field}: got .*, expected one row per sample"):
        collate_rl(**{**rl(), field: rows}, pad_token_id=PAD)


@pytest.mark.parametrize("pad", [None, 0.5, 1.0, "0", 2**63])
def test_refuses_a_padding_token_that_is_no_integer(pad: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"pad_token_id: got .*, expected an integer"):
        collate_rl(**rl(), pad_token_id=pad)
    with pytest.raises(InvalidInputError, match=r"pad_token_id: got .*, expected an integer"):
        collate_sft([[1, 2], [3, 4]], [1, 1], pad_token_id=pad)  # though nothing is padded


@pytest.mark.parametrize("pad", [np.int32(PAD), torch.tensor(PAD)])
def test_takes_a_padding_token_of_any_integer_type(pad: Any) -> None:
    assert_same(collate_rl(**rl(), pad_token_id=pad), reference.collate_rl(**rl(), pad_token_id=PAD))


def test_rl_refuses_sets_that_are_none() -> None:
    columns = rl()
    sets = [CandidateSets.empty(3), [[[1, 2], [0.1, 0.2]]] * 4]
    with pytest.raises(InvalidInputError, match=r"candidates\[1\]: got list, expected CandidateSets"):
        collate_rl(**columns, candidates=sets, pad_token_id=PAD)


def test_rl_refuses_no_samples() -> None:
    with pytest.raises(InvalidInputError, match="prompts: got no samples"):
        collate_rl([], [], [], [], pad_token_id=PAD)


def test_rl_refuses_a_set_of_another_token() -> None:
    columns = rl()
    sets = sets_of(columns["responses"], [[1] * 3, [1] * 4], 0)
    columns["responses"][1][2] = 99
    with pytest.raises(InvalidInputError, match=r"candidates\[1\]: .* position 2 is 22, but .* is 99"):
        collate_rl(**columns, candidates=sets, pad_token_id=PAD)


def test_rl_refuses_a_loss_where_there_is_no_set() -> None:
    columns = rl()
    sets = [*sets_of(columns["responses"][:1], [[1, 1, 1]], 0), CandidateSets.empty(4)]
    with pytest.raises(InvalidInputError, match=r"candidates\[1\]: position 0 has no candidates"):
        collate_rl(**columns, candidates=sets, pad_token_id=PAD)


@given(st.data())
def test_sft_equals_the_loop(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.lists(IDS, max_size=12), min_size=1, max_size=6))
    counts = [data.draw(st.integers(0, len(row))) for row in ids]
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in counts]
    expected = reference.collate_sft(ids, counts, masks, pad_token_id=PAD)
    assert_same(collate_sft(ids, counts, masks, pad_token_id=PAD), expected)
    arrays = [np.array(row, np.int64) for row in ids]
    assert_same(collate_sft(arrays, np.array(counts), masks, pad_token_id=PAD), expected)
    ones = reference.collate_sft(ids, counts, [[1] * n for n in counts], pad_token_id=PAD)
    assert_same(collate_sft(ids, counts, pad_token_id=PAD), ones)


@pytest.mark.parametrize(
    ("counts", "masks", "message"),
    [
        ([2, 4], None, r"num_actions\[1\]: got 4, expected 0 to 3"),
        ([2, -1], None, r"num_actions\[1\]: got -1"),
        ([2], None, "num_actions: got .* expected 2 integers"),
        ([2.0, 1.0], None, "num_actions: got float64"),
        ([[2], [1, 1]], None, "num_actions: expected 2 integers"),
        ([2, 2], [[1, 1], [1]], r"loss_masks\[1\]: got 1 values, expected 2, as in num_actions\[1\]"),
        ([2, 2], [[1, 1]], "loss_masks: got 1 samples"),
        ([2, 2], [[1, 1], [1, 3]], r"loss_masks\[1\]: got 3 at token 1"),
    ],
)
def test_sft_refuses_what_does_not_fit(counts: Any, masks: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        collate_sft([[1, 2, 3], [4, 5, 6]], counts, masks, pad_token_id=PAD)


def test_row_sets_is_what_collation_returns() -> None:
    columns = rl()
    sets = sets_of(columns["responses"], columns["loss_masks"], 0)
    assert isinstance(collate_rl(**columns, candidates=sets, pad_token_id=PAD)["candidates"], RowSets)
