"""`collate_rollouts` equals `collate_rl` and `PackedCollator.collate_rl` over columns written by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.batch_collate import candidate_sets
from sglang_topp.batch import PackedCollator, collate_rl, collate_rollouts
from sglang_topp.candidates import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp_client import Rollout

PAD = 7


def make_rollout(prompt: list[int], output: list[int], seed: int) -> Rollout:
    rng = np.random.default_rng(seed)
    ids = np.array(output, np.int32)
    sets = candidate_sets(rng, ids, np.ones(len(ids), bool), mean_size=4.0)
    return Rollout(
        prompt_index=seed,
        sample_index=0,
        request_id=f"r{seed}",
        prompt_ids=np.array(prompt, np.int32),
        output_ids=ids,
        text="",
        logprobs=sets.sampled_logprobs,
        candidates=sets,
        finish_reason="length",
        weight_version="1",
        cached_tokens=0,
        latency_s=0.0,
        weight_spans=(("1", len(ids)),),
    )


@pytest.fixture
def rollouts() -> list[Rollout]:
    """Three lengths. A tool's two tokens end the second."""
    first, second, third = (
        make_rollout(prompt, output, seed)
        for seed, (prompt, output) in enumerate(
            [([1, 2], [10, 11, 12]), ([3], [20, 21, 22, 23]), ([4, 5, 6], [30])]
        )
    )
    return [first, second.extend([8, 9]), third]


def by_hand(rollouts: list[Rollout], rewards: list[list[float]]) -> dict[str, Any]:
    return {
        "prompts": [one.prompt_ids.tolist() for one in rollouts],
        "responses": [one.output_ids.tolist() for one in rollouts],
        "rewards": rewards,
        "loss_masks": [[1, 1, 1], [1, 1, 1, 1, 0, 0], [1]],
    }


def assert_same(got: Any, expected: Any) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        if name in ("candidates", "layouts"):
            assert got[name] == value
        elif isinstance(value, list):
            assert all(a.equal(b) for a, b in zip(got[name], value, strict=True))
        else:
            assert got[name].dtype == value.dtype
            assert got[name].equal(value), name


REWARDS = [[0.5] * 3, [-1.25] * 6, [2.0]]
ROWS = [[0.5, 0.25, 1.0], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [2.0]]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5, -1.25, 2.0], REWARDS),
        (np.array([0.5, -1.25, 2.0]), REWARDS),
        (torch.tensor([0.5, -1.25, 2.0], requires_grad=True), REWARDS),
        ([np.float32(0.5), torch.tensor(-1.25), 2], REWARDS),
        (ROWS, ROWS),
        ([np.array(row) for row in ROWS], ROWS),
        ([0.5, ROWS[1], torch.tensor(ROWS[2])], [REWARDS[0], ROWS[1], ROWS[2]]),
    ],
)
def test_one_call_equals_the_columns(rollouts: list[Rollout], rewards: Any, expected: Any) -> None:
    columns = by_hand(rollouts, expected)
    columns["logprobs"] = [one.masked_logprobs for one in rollouts]
    columns["candidates"] = [one.candidates for one in rollouts]
    assert not np.array_equal(columns["logprobs"][0], rollouts[0].logprobs)
    assert_same(
        collate_rollouts(rollouts, rewards, pad_token_id=PAD), collate_rl(**columns, pad_token_id=PAD)
    )
    collator = PackedCollator(max_tokens=16, pad_token_id=PAD)
    assert_same(collator.collate_rollouts(rollouts, rewards), collator.collate_rl(**columns))


def test_rollouts_without_sets_have_logprobs_over_the_vocabulary(rollouts: list[Rollout]) -> None:
    bare = [replace(one, candidates=None) for one in rollouts]
    columns = by_hand(rollouts, REWARDS) | {"logprobs": [one.logprobs for one in rollouts]}
    batch = collate_rollouts(bare, [0.5, -1.25, 2.0], pad_token_id=PAD)
    assert_same(batch, collate_rl(**columns, pad_token_id=PAD))
    assert "candidates" not in batch


@pytest.mark.parametrize("with_own", [True, False])
def test_sets_of_a_teacher_replace_the_rollouts_own(rollouts: list[Rollout], with_own: bool) -> None:
    rng = np.random.default_rng(9)
    teacher = [
        candidate_sets(rng, one.output_ids, np.ones(len(one.output_ids), bool), mean_size=2.0)
        for one in rollouts
    ]
    if not with_own:
        rollouts = [replace(one, candidates=None) for one in rollouts]
    batch = collate_rollouts(rollouts, [0, 0, 0], candidates=teacher, pad_token_id=PAD)
    assert list(batch["candidates"]) == teacher
    own = [one.masked_logprobs if with_own else one.logprobs for one in rollouts]
    assert batch["logprobs"][batch["response_mask"].bool()].tolist() == np.concatenate(own).tolist()


def test_further_fields_are_collated(rollouts: list[Rollout]) -> None:
    fields = {"values": ROWS}
    batch: Any = collate_rollouts(rollouts, [0, 0, 0], fields=fields, pad_token_id=PAD)
    assert batch["values"].equal(collate_rollouts(rollouts, ROWS, pad_token_id=PAD)["rewards"])
    collator = PackedCollator(max_tokens=16, pad_token_id=PAD)
    packed: Any = collator.collate_rollouts(rollouts, [0, 0, 0], fields=fields)
    assert packed["values"].equal(collator.collate_rollouts(rollouts, ROWS)["rewards"])


def test_a_rollout_without_sets_among_others_is_refused(rollouts: list[Rollout]) -> None:
    rollouts[1] = replace(rollouts[1], candidates=None)
    with pytest.raises(InvalidInputError, match=r"rollouts\[1\]: has no candidate sets, but 2 of 3"):
        collate_rollouts(rollouts, [0, 0, 0], pad_token_id=PAD)


def test_sets_without_logprobs_are_refused(rollouts: list[Rollout]) -> None:
    sets = [one.candidates for one in rollouts if one.candidates is not None]
    bare = [replace(one, candidates=s.without_logprobs()) for one, s in zip(rollouts, sets, strict=True)]
    with pytest.raises(InvalidInputError, match="these candidate sets have none"):
        collate_rollouts(bare, [0, 0, 0], pad_token_id=PAD)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([0, 0], "rewards: got 2, expected 3, one per rollout"),
        (1.0, r"rewards: got 1\.0, expected one entry per rollout"),
        (np.array(1.0), "rewards: got array.*, expected one entry per rollout"),
        ({"a": 0.5, "b": 1.0, "c": 2.0}, "rewards: got {'a': .*, expected one entry per rollout"),
        ({0: 0.5, 1: 1.0, 2: 2.0}, "rewards: got {0: .*, expected one entry per rollout"),
        ({0.5, 1.0, 2.0}, "rewards: got {.*, expected one entry per rollout"),
        (frozenset([0.5, 1.0, 2.0]), "rewards: got frozenset.*, expected one entry per rollout"),
        ({0: 0.5, 1: 1.0, 2: 2.0}.keys(), "rewards: got dict_keys.*, expected one entry per rollout"),
        (b"abc", "rewards: got b'abc', expected one entry per rollout"),
        (bytearray(b"abc"), "rewards: got bytearray.*, expected one entry per rollout"),
        ([0, {1.0}, 0], r"rewards\[1\]: got {1.0}, expected a number"),
        ([0, {0: 1.0}, 0], r"rewards\[1\]: got {0: 1.0}, expected a number"),
        ([0, b"a", 0], r"rewards\[1\]: got b'a', expected a number"),
        ([0, "1", 0], r"rewards\[1\]: got '1', expected a number, or one number per token"),
        ([0, None, 0], r"rewards\[1\]: got None, expected a number"),
        ([0, [1, 2], 0], r"rewards\[1\]: got 2 values, expected 6"),
    ],
)
def test_wrong_rewards_are_refused(rollouts: list[Rollout], rewards: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        collate_rollouts(rollouts, rewards, pad_token_id=PAD)


def test_wrong_rollouts_are_refused(rollouts: list[Rollout]) -> None:
    with pytest.raises(InvalidInputError, match="rollouts: got none"):
        collate_rollouts([], [], pad_token_id=PAD)
    by_name: Any = dict(zip("abc", rollouts, strict=True))
    with pytest.raises(InvalidInputError, match=r"rollouts: got {.*, expected a sequence of rollouts"):
        collate_rollouts(by_name, [0, 0, 0], pad_token_id=PAD)
    mixed: Any = [rollouts[0], {"output_ids": [1]}]
    with pytest.raises(InvalidInputError, match=r"rollouts\[1\]: got dict, expected a Rollout"):
        collate_rollouts(mixed, [0, 0], pad_token_id=PAD)


def test_a_set_of_another_rollout_is_refused(rollouts: list[Rollout]) -> None:
    wrong = make_rollout([1, 2], [10, 99, 12], 5).candidates
    rollouts[0] = replace(rollouts[0], candidates=wrong)
    with pytest.raises(InvalidInputError, match=r"candidates\[0\]: .* position 1 is 99"):
        collate_rollouts(rollouts, [0, 0, 0], pad_token_id=PAD)
    short = [CandidateSets.empty(2), *(one.candidates for one in rollouts[1:])]
    with pytest.raises(InvalidInputError, match=r"candidates\[0\]: got 2 values, expected 3"):
        collate_rollouts(rollouts, [0, 0, 0], candidates=short, pad_token_id=PAD)
