"""Collation equals its reference bit for bit, and refuses inconsistent columns."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from sglang_topp import CandidateSets
from sglang_topp.batch import (
    BatchCandidateSets,
    PackedCollator,
    collate_rl,
    collate_sft,
)
from sglang_topp.errors import InvalidInputError
from tests.batch import reference_loops
from tests.batch.hypothesis_samples import IDS, random_sets, rollout_lists
from tests.fake_gpu import gpu

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
def test_rl_equals_the_reference_for_every_kind_of_row(
    columns: dict[str, Any], pad: int, with_logprobs: bool, data: st.DataObject
) -> None:
    if not with_logprobs:
        del columns["logprobs"]
    mixed = {}
    for name, rows in columns.items():
        kinds = data.draw(st.lists(st.sampled_from(KINDS), min_size=len(rows), max_size=len(rows)))
        floats = name in ("rewards", "logprobs")
        mixed[name] = [_array(kind)(row, floats) for kind, row in zip(kinds, rows, strict=True)]
    assert_same(
        collate_rl(**mixed, pad_token_id=pad), reference_loops.collate_rl(**columns, pad_token_id=pad)
    )


@given(rollout_lists(), st.integers(0, 2**32 - 1))
def test_rl_keeps_the_candidate_sets_of_every_sample(columns: dict[str, Any], seed: int) -> None:
    sets = random_sets(columns["responses"], columns["loss_masks"], seed)
    batch = collate_rl(**columns, candidates=sets, pad_token_id=PAD)
    candidates = batch.pop("candidates")
    assert list(candidates) == sets
    assert candidates.row_offsets.tolist() == np.cumsum([0, *map(len, columns["responses"])]).tolist()
    assert_same(batch, reference_loops.collate_rl(**columns, pad_token_id=PAD))


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint8, np.int32, np.float16, np.float32])
def test_rl_accepts_masks_and_ids_of_every_width(dtype: Any) -> None:
    columns = rl_columns()
    narrow = dict(columns, loss_masks=[np.array(mask, dtype) for mask in columns["loss_masks"]])
    narrow["responses"] = [np.array(ids, np.uint32) for ids in columns["responses"]]
    assert_same(
        collate_rl(**narrow, pad_token_id=PAD), reference_loops.collate_rl(**columns, pad_token_id=PAD)
    )


def test_rl_accepts_bfloat16_rewards() -> None:
    columns = rl_columns()
    rewards = [torch.tensor(row, dtype=torch.bfloat16) for row in columns["rewards"]]
    assert_same(
        collate_rl(**{**columns, "rewards": rewards}, pad_token_id=PAD),
        reference_loops.collate_rl(**{**columns, "rewards": rewards}, pad_token_id=PAD),
    )


def test_rl_accepts_rows_on_different_devices() -> None:
    columns = rl_columns()
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
    assert_same(batch, reference_loops.collate_rl(**columns, pad_token_id=PAD))


def test_rl_does_not_share_memory_with_its_inputs() -> None:
    columns = rl_columns(one_sample=True)
    rewards = torch.tensor(columns["rewards"][0], dtype=torch.float32)
    batch = collate_rl(**{**columns, "rewards": [rewards]}, pad_token_id=PAD)
    batch["rewards"].zero_()
    assert rewards.tolist() == pytest.approx(columns["rewards"][0])


def rl_columns(one_sample: bool = False) -> dict[str, Any]:
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
def test_rl_refuses_a_row_of_different_length(field: str, change: int) -> None:
    columns = rl_columns()
    if field == "candidates":
        columns[field] = [CandidateSets.empty(3), CandidateSets.empty(4 + change)]
    else:
        columns[field][1] = columns[field][1][:change] if change < 0 else [*columns[field][1], 0]
    with pytest.raises(InvalidInputError, match=rf"{field}\[1\]: got {4 + change} values, expected 4"):
        collate_rl(**columns, pad_token_id=PAD)


@pytest.mark.parametrize("field", ["responses", "rewards", "loss_masks", "logprobs"])
def test_rl_refuses_a_different_number_of_samples(field: str) -> None:
    columns = rl_columns()
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
    columns = rl_columns()
    columns[field][1] = row
    with pytest.raises(InvalidInputError, match=message):
        collate_rl(**columns, pad_token_id=PAD)


@pytest.mark.parametrize("field", ["prompts", "responses", "rewards", "loss_masks"])
@pytest.mark.parametrize("rows", [None, 1.0, torch.tensor(1.0), iter([[1]])])
def test_rl_refuses_a_field_without_rows(field: str, rows: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"{field}: got .*, expected one row per sample"):
        collate_rl(**{**rl_columns(), field: rows}, pad_token_id=PAD)


@pytest.mark.parametrize("pad", [None, 0.5, 1.0, "0", 2**63])
def test_padding_token_that_is_no_integer_is_refused(pad: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"pad_token_id: got .*, expected an integer"):
        collate_rl(**rl_columns(), pad_token_id=pad)
    with pytest.raises(InvalidInputError, match=r"pad_token_id: got .*, expected an integer"):
        collate_sft([[1, 2], [3, 4]], [1, 1], pad_token_id=pad)  # refused even if nothing is padded


@pytest.mark.parametrize("pad", [np.int32(PAD), torch.tensor(PAD)])
def test_padding_token_may_have_any_integer_type(pad: Any) -> None:
    expected = reference_loops.collate_rl(**rl_columns(), pad_token_id=PAD)
    assert_same(collate_rl(**rl_columns(), pad_token_id=pad), expected)


def test_rl_refuses_none_as_candidate_sets() -> None:
    columns = rl_columns()
    sets = [CandidateSets.empty(3), [[[1, 2], [0.1, 0.2]]] * 4]
    with pytest.raises(InvalidInputError, match=r"candidates\[1\]: got list, expected CandidateSets"):
        collate_rl(**columns, candidates=sets, pad_token_id=PAD)


def test_rl_refuses_no_samples() -> None:
    with pytest.raises(InvalidInputError, match="prompts: got no samples"):
        collate_rl([], [], [], [], pad_token_id=PAD)


def test_rl_refuses_a_set_with_a_different_sampled_token() -> None:
    columns = rl_columns()
    sets = random_sets(columns["responses"], [[1] * 3, [1] * 4], 0)
    columns["responses"][1][2] = 99
    with pytest.raises(InvalidInputError, match=r"candidates\[1\]: .* position 2 is 22, but .* is 99"):
        collate_rl(**columns, candidates=sets, pad_token_id=PAD)


def test_rl_refuses_a_token_with_loss_but_without_a_set() -> None:
    columns = rl_columns()
    sets = [*random_sets(columns["responses"][:1], [[1, 1, 1]], 0), CandidateSets.empty(4)]
    with pytest.raises(InvalidInputError, match=r"candidates\[1\]: position 0 has no candidates"):
        collate_rl(**columns, candidates=sets, pad_token_id=PAD)


@given(st.data())
def test_sft_equals_the_reference(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.lists(IDS, max_size=12), min_size=1, max_size=6))
    counts = [data.draw(st.integers(0, len(row))) for row in ids]
    masks = [data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)) for n in counts]
    expected = reference_loops.collate_sft(ids, counts, masks, pad_token_id=PAD)
    assert_same(collate_sft(ids, counts, masks, pad_token_id=PAD), expected)
    arrays = [np.array(row, np.int64) for row in ids]
    assert_same(collate_sft(arrays, np.array(counts), masks, pad_token_id=PAD), expected)
    ones = reference_loops.collate_sft(ids, counts, [[1] * n for n in counts], pad_token_id=PAD)
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
def test_sft_refuses_inconsistent_columns(counts: Any, masks: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        collate_sft([[1, 2, 3], [4, 5, 6]], counts, masks, pad_token_id=PAD)


def test_rl_returns_candidates_as_row_sets() -> None:
    columns = rl_columns()
    sets = random_sets(columns["responses"], columns["loss_masks"], 0)
    assert isinstance(
        collate_rl(**columns, candidates=sets, pad_token_id=PAD)["candidates"], BatchCandidateSets
    )


@given(rollout_lists(), st.data())
def test_rl_collates_further_fields(columns: dict[str, Any], data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    lengths = [len(row) for row in columns["responses"]]
    floats = [torch.from_numpy(rng.normal(size=n).astype(np.float32)) for n in lengths]
    ids = [torch.from_numpy(rng.integers(-(2**62), 2**62, n)) for n in lengths]
    fields = {"values": floats, "expert": ids if any(lengths) else floats}
    expected = reference_loops.collate_rl(**columns, fields=fields, pad_token_id=PAD)
    assert_same(collate_rl(**columns, fields=fields, pad_token_id=PAD), expected)
    as_arrays = {name: [row.numpy() for row in rows] for name, rows in fields.items()}
    assert_same(collate_rl(**columns, fields=as_arrays, pad_token_id=PAD), expected)
    as_lists = {"values": [row.tolist() for row in floats]}
    assert_same(
        {"values": collate_rl(**columns, fields=as_lists, pad_token_id=PAD)["values"]},
        {"values": expected["values"]},
    )


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([[1, 2, 3], [1, 2, 3, 4]], torch.float32),
        ([np.arange(3), [1, 2, 3, 4]], torch.float32),
        ([np.arange(3), np.arange(4, dtype=np.uint16)], torch.int64),
        ([torch.arange(3), np.arange(4)], torch.int64),
        ([np.ones(3, bool), np.ones(4, bool)], torch.float32),
        ([torch.ones(3, dtype=torch.bool), torch.ones(4, dtype=torch.bfloat16)], torch.float32),
    ],
)
def test_rl_chooses_the_dtype_of_a_field_by_the_rows_type(rows: Any, dtype: torch.dtype) -> None:
    batch: Any = collate_rl(**rl_columns(), fields={"x": rows}, pad_token_id=PAD)
    assert batch["x"].dtype == dtype
    assert batch["x"][1].tolist() == [float(value) for value in rows[1]]


def test_rl_ignores_the_type_of_empty_rows() -> None:
    columns = rl_columns()
    for name in columns.keys() - {"prompts"}:
        columns[name][0] = []
    batch: Any = collate_rl(**columns, fields={"x": [[], np.arange(4)]}, pad_token_id=PAD)
    assert batch["x"].tolist() == [[0] * 4, [0, 1, 2, 3]]
    assert batch["x"].dtype == torch.int64


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": [[1] * 3, [1] * 4]}, "fields: got 'rewards', which is a field of the batch"),
        ({"candidates": [[1] * 3, [1] * 4]}, "fields: got 'candidates'"),
        ({"x": [[1] * 3]}, "x: got 1 samples, expected 2, as in responses"),
        ({"x": [[1] * 3, [1] * 3]}, r"x\[1\]: got 3 values, expected 4, as in responses\[1\]"),
        ({"x": [[1] * 3, ["a"] * 4]}, r"x\[1\]"),
        ({"x": [[1] * 3, None]}, r"x\[1\]: got None, expected one value per token"),
        ({"x": [np.arange(3), np.arange(4, dtype=np.uint64)]}, r"x\[1\]: got dtype uint64"),
        ({"x": [np.zeros((3, 2)), np.zeros((4, 2))]}, r"x\[0\]: got shape \(3, 2\)"),
    ],
)
def test_rl_refuses_wrong_fields(fields: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        collate_rl(**rl_columns(), fields=fields, pad_token_id=PAD)


@given(st.data())
def test_sft_normalizes_the_loss_mask(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.lists(IDS, max_size=12), min_size=1, max_size=6))
    masks = [data.draw(st.lists(st.integers(0, 1), max_size=len(row))) for row in ids]
    counts = [len(mask) for mask in masks]
    batch = collate_sft(ids, counts, masks, normalize_loss_mask=True, pad_token_id=PAD)
    expected = reference_loops.collate_sft(ids, counts, masks, normalize_loss_mask=True, pad_token_id=PAD)
    assert_same(batch, expected)
    assert float(batch["loss_mask"].sum(dtype=torch.float64)) == pytest.approx(
        1.0 if batch["loss_mask"].any() else 0.0, rel=1e-6
    )


@pytest.mark.parametrize(
    "counts", [[3, 2, 1, 0], [6, 3, 1, 0], [6, 2, 0, 0], [0, 3, 1, 1], [0, 0, 0, 1], [2, 3, 1, 1]]
)
@torch.no_grad()
def test_sft_loss_of_a_model_is_the_mean_over_the_tokens_that_it_predicts(counts: list[int]) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).eval()
    ids = [[5, 9, 33, 4, 60, 7], [8, 2, 41], [17], [3]]

    expected, num_predicted = 0.0, 0
    for row, count in zip(ids, counts, strict=True):
        if n := min(count, len(row) - 1):
            labels = [-100] * (len(row) - n) + row[len(row) - n :]
            expected += n * float(model(torch.tensor([row]), labels=torch.tensor([labels])).loss)
            num_predicted += n
    expected /= max(1, num_predicted)

    def token_losses(sequences: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return [B, S - 1]: the loss of each token but the first, in the column that predicts it."""
        positions = None if attention_mask is None else (attention_mask.cumsum(1) - 1).clamp(min=0)
        logits = model(sequences, attention_mask, positions).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.mT, sequences[:, 1:], reduction="none")

    batch = collate_sft(ids, counts, normalize_loss_mask=True, pad_token_id=PAD)
    losses, mask = token_losses(batch["sequences"], batch["attention_mask"]), batch["loss_mask"]
    assert mask.shape[1] < batch["sequences"].shape[1]
    loss = (losses[:, losses.shape[1] - mask.shape[1] :] * mask).sum()
    assert float(loss) == pytest.approx(expected, rel=1e-5)

    packed = PackedCollator(max_tokens=8, pad_token_id=PAD, tp_size=2).collate_sft(ids, counts)
    loss = torch.tensor(0.0)
    columns = packed["sequences"], packed["loss_mask"], packed["cu_seqlens"], packed["seq_lengths"]
    for sequence, mask, starts, lengths in zip(*columns, strict=True):
        for start, length in zip(starts[:-1], lengths, strict=True):
            span = slice(start, start + length)
            loss += (token_losses(sequence[None, span])[0] * mask[span][:-1]).sum()
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "rows",
    [{0: [1], 1: [1]}, {"a", "b"}, b"ab", bytearray(b"ab"), "ab", {0: 1, 1: 1}.keys(), memoryview(b"ab")],
)
@pytest.mark.parametrize(
    "field", ["prompts", "responses", "rewards", "loss_masks", "logprobs", "candidates", "x"]
)
def test_rows_without_an_order_and_bytes_are_refused(field: str, rows: Any) -> None:
    """Such as a dict, whose keys would be taken for rows."""
    columns: dict[str, Any] = {**rl_columns(), "fields": {}}
    (columns["fields"] if field == "x" else columns)[field] = rows
    for collate in (
        partial(collate_rl, pad_token_id=PAD),
        PackedCollator(max_tokens=9, pad_token_id=PAD).collate_rl,
    ):
        with pytest.raises(InvalidInputError, match=f"{field}: got .*, expected one row per sample"):
            collate(**columns)
