"""A trainer's columns are added to files of rollouts, read with the rollouts, and checked."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client import RolloutWriter, add_trainer_columns, load_rollouts, save_rollouts
from sglang_topp_client.storage.parquet_files import load_scored_rollouts
from tests.client import conftest as fakes


@pytest.fixture
def rollouts():
    return [fakes.sample([5, 6], index, num_tokens=3 + index) for index in range(3)]


@pytest.fixture
def path(tmp_path, rollouts):
    path = tmp_path / "rollouts.parquet"
    save_rollouts(path, rollouts)
    return path


@pytest.fixture
def target(tmp_path):
    return tmp_path / "scored.parquet"


def test_columns_come_back_beside_the_rollouts(path, target, rollouts):
    full = [one.logprobs + np.float32(0.5) for one in rollouts]
    masked = [full[0], None, full[2].tolist()]
    add_trainer_columns(
        path, target, trainer_logprobs=full, trainer_masked_logprobs=masked, rewards=(1, None, 0.5)
    )
    back = [one for _, one in load_scored_rollouts(target)]
    for one, before, values in zip(back, rollouts, full, strict=True):
        assert one.rollout.candidates == before.candidates
        assert one.scores.logprobs.dtype == np.float32
        assert np.array_equal(one.scores.logprobs, values)
    assert back[1].scores.masked_logprobs is None
    assert np.array_equal(back[2].scores.masked_logprobs, full[2])
    assert [one.scores.reward for one in back] == [1.0, None, 0.5]
    assert [one.request_id for one in load_rollouts(target)] == [one.request_id for one in rollouts]


def test_a_file_without_such_columns_has_none(path):
    scores = [one.scores for _, one in load_scored_rollouts(path)]
    assert [(one.logprobs, one.masked_logprobs, one.reward) for one in scores] == [(None, None, None)] * 3


def test_a_directory_becomes_a_file(tmp_path, target, rollouts):
    with RolloutWriter(tmp_path / "run", part_size=2) as writer:
        for rollout in rollouts:
            writer.write(rollout)
    add_trainer_columns(tmp_path / "run", target, rewards=iter([1, 2, 3]))
    assert [one.scores.reward for _, one in load_scored_rollouts(target)] == [1, 2, 3]
    assert pq.read_schema(target).names[-1] == "reward"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "got no column"),
        ({"rewards": [1.0]}, "reward: got 1 values, expected one for each rollout"),
        ({"rewards": [1.0] * 4}, "reward: got more values than the 3 rollouts"),
        ({"rewards": [1.0, "high", 2.0]}, "reward: rollout 1: got 'high', expected a number"),
        ({"rewards": [1.0, [2.0], 2.0]}, "reward: rollout 1: got .*expected a number"),
        (
            {"trainer_logprobs": [["a"], [], []]},
            "trainer_logprobs: rollout 0: got .*expected a list or an array",
        ),
        (
            {"trainer_logprobs": [[[0.5], [0.5, 1.0]], [], []]},
            "trainer_logprobs: rollout 0: got .*expected a list",
        ),
        ({"trainer_logprobs": [np.zeros(3)] * 3}, r"rollout 1: got shape \[3\], .* of 4 numbers"),
        ({"trainer_masked_logprobs": [0.0] * 3}, r"rollout 0: got shape \[\], expected .* of 3 numbers"),
    ],
)
def test_other_lengths_are_errors_and_leave_no_file(path, target, columns, message):
    with pytest.raises(InvalidInputError, match=message):
        add_trainer_columns(path, target, **columns)
    assert [one.name for one in target.parent.iterdir()] == [path.name]


def test_a_file_is_replaced_only_if_asked(path, rollouts):
    with pytest.raises(InvalidInputError, match="got a path that exists"):
        add_trainer_columns(path, path, rewards=[1, 1, 1])
    add_trainer_columns(path, path, rewards=[1, 1, 1], overwrite=True)
    assert [one.scores.reward for _, one in load_scored_rollouts(path)] == [1, 1, 1]
    assert [one.request_id for one in load_rollouts(path)] == [one.request_id for one in rollouts]


def test_columns_of_earlier_calls_and_of_others_stay(tmp_path, path, target, rollouts):
    table = pq.read_table(path)
    others = {
        "step": pa.array([7, None, 9], pa.int64()),
        "judge": pa.array([{"name": "é", "at": 3}] * 3).cast(
            pa.struct({"name": pa.large_string(), "at": "i4"})
        ),
        "when": pa.array([0, 1, 2], pa.duration("us")),
    }
    for name, column in others.items():
        table = table.append_column(name, column)
    pq.write_table(table, tmp_path / "others.parquet")
    full = [one.logprobs for one in rollouts]
    add_trainer_columns(tmp_path / "others.parquet", tmp_path / "one.parquet", trainer_logprobs=full)
    add_trainer_columns(tmp_path / "one.parquet", tmp_path / "two.parquet", rewards=[1, 2, 3])
    add_trainer_columns(tmp_path / "two.parquet", target, rewards=[4, None, 6])

    written = pq.read_table(target)
    for name, column in others.items():
        assert written.column(name).to_pylist() == column.to_pylist()
        assert written.column(name).type == column.type
    back = [one for _, one in load_scored_rollouts(target)]
    assert [one.scores.reward for one in back] == [4, None, 6]
    for one, values, before in zip(back, full, rollouts, strict=True):
        assert np.array_equal(one.scores.logprobs, values)
        assert one.rollout.candidates == before.candidates


def test_a_trainers_column_of_another_type_is_an_error_where_it_is_read(tmp_path, path, rollouts):
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pq.read_table(path).append_column("reward", [["text"] * 3]), foreign)
    with pytest.raises(WireError, match=r"foreign.parquet: reward: got string, expected double"):
        list(load_scored_rollouts(foreign))
    assert len(list(load_rollouts(foreign))) == len(rollouts)


def test_a_column_of_another_length_names_the_row(tmp_path, path):
    foreign = tmp_path / "short.parquet"
    table = pq.read_table(path).append_column(
        "trainer_logprobs", pa.array([[0.0] * 3] * 3, pa.list_(pa.float32()))
    )
    pq.write_table(table, foreign)
    with pytest.raises(WireError, match=r"rollout 1: trainer_logprobs: got 3 for 4 output_ids"):
        list(load_scored_rollouts(foreign))


def test_a_rollout_without_a_token_has_empty_columns(tmp_path, target, rollouts):
    save_rollouts(tmp_path / "empty.parquet", [fakes.without_tokens(rollouts[0])])
    add_trainer_columns(tmp_path / "empty.parquet", target, trainer_logprobs=[[]])
    ((_, one),) = load_scored_rollouts(target)
    assert one.scores.logprobs.shape == (0,)
