"""Add a trainer's log-probs and rewards to a copy of saved rollouts, and load such copies.

Each of the columns below is optional, and may be null in any row. T is the number of output tokens of the
row's rollout::

    trainer_logprobs                list<float>, T; natural log-probs over the whole vocabulary
    trainer_masked_logprobs         list<float>, T; natural log-probs over the candidate sets
    reward                          double
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.errors import InvalidInputError, describe
from sglang_topp_client.storage.parquet_files import (
    check_new,
    files_of,
    new_parquet_file,
    read_batches,
    reading,
)
from sglang_topp_client.storage.rollout_columns import pyarrow, read_columns, schema, to_rollouts
from sglang_topp_client.types.rollout import Rollout

__all__ = ["ScoredRollout", "TrainerScores", "add_trainer_columns", "load_scored_rollouts"]

_Path: TypeAlias = "str | os.PathLike[str]"


@dataclass(frozen=True, eq=False)
class TrainerScores:
    """The log-probs and the reward that a trainer computed for one rollout of T output tokens.

    Attributes:
        logprobs: float32 [T], the trainer's log-prob of each token over the whole vocabulary; or None.
        masked_logprobs: float32 [T], the trainer's log-prob of each token over its candidate set; or None.
        reward: the reward that the trainer gave to the rollout; or None.
    """

    logprobs: NDArray[np.float32] | None = None
    masked_logprobs: NDArray[np.float32] | None = None
    reward: float | None = None


class ScoredRollout(NamedTuple):
    """A rollout, and the log-probs and the reward that a trainer recorded for the rollout."""

    rollout: Rollout
    scores: TrainerScores = TrainerScores()


def load_scored_rollouts(
    path: _Path, wanted: Collection[int] | None = None
) -> Iterator[tuple[int, ScoredRollout]]:
    """Yield each saved rollout's index, and a ScoredRollout with the rollout and the trainer's values.

    Args:
        path: a file, or a directory written by `RolloutWriter`.
        wanted: the indices of the rollouts to read, counted from 0 over all files, or None to read all
            rollouts.

    Raises:
        WireError: a file was altered or truncated, or holds no rollouts; the error names the file.
        OSError: the path cannot be read.
        ModuleNotFoundError: pyarrow is not installed.
    """
    pyarrow()
    return _load(files_of(path), wanted)


def _load(files: Sequence[str], wanted: Collection[int] | None) -> Iterator[tuple[int, ScoredRollout]]:
    fields = _fields()
    for path, rows, batch in read_batches(files, [*schema().names, *fields], wanted):
        with reading(path):
            known = [field for name, field in fields.items() if name in batch.schema.names]
            columns = read_columns(batch, known)
            for at, rollout in enumerate(to_rollouts(batch, rows)):
                row, values = rows[at], {name: column[at] for name, column in columns.items()}
                yield row, ScoredRollout(rollout, _scores(values, len(rollout.output_ids), row))


def add_trainer_columns(
    path: _Path,
    target: _Path,
    *,
    trainer_logprobs: Iterable[ArrayLike | None] | None = None,
    trainer_masked_logprobs: Iterable[ArrayLike | None] | None = None,
    rewards: Iterable[float | None] | None = None,
    overwrite: bool = False,
) -> None:
    """Copy saved rollouts to a Parquet file, and add a trainer's log-probs and rewards as columns.

    The copy keeps all other columns of `path`, such as those of an earlier call. `load_rollouts` can read it.
    `sglang-topp view` shows its rewards, and importance ratios that it computes from the trainer's log-probs.
    Each argument for a column has one value per rollout, in the order of the saved rollouts. A value may be
    None, which the file stores as null. T is the number of a rollout's output tokens.

    Args:
        path: the file of the saved rollouts, or a directory written by `RolloutWriter`.
        target: the file to write.
        trainer_logprobs: float [T] for each rollout, the trainer's log-probs of the output tokens over the
            whole vocabulary, at the rollout's temperature. `sglang-topp view` ignores the log-probs of tokens
            that `Rollout.extend` appended.
        trainer_masked_logprobs: float [T] for each rollout, the trainer's log-probs of the output tokens over
            their candidate sets, as `sglang_topp.replay.score_logits` returns them.
        rewards: one number for each rollout.
        overwrite: whether to replace `target`, which may be `path`, if it exists. If False, a `target` that
            exists raises InvalidInputError.

    Raises:
        InvalidInputError: the file `target` exists; no column is given; or a column has too few, too many, or
            invalid values. If an error is about a column, the message states the column's name.
        WireError: the rollouts cannot be read; the error names the file.
        OSError: a file cannot be read or written; the error names the file.
        ModuleNotFoundError: pyarrow is not installed.
    """
    given = {
        "trainer_logprobs": trainer_logprobs,
        "trainer_masked_logprobs": trainer_masked_logprobs,
        "reward": rewards,
    }
    added = {name: _Values(name, values) for name, values in given.items() if values is not None}
    if not added:
        raise InvalidInputError(
            "got no column, expected trainer_logprobs, trainer_masked_logprobs, or rewards"
        )
    pa = pyarrow()
    check_new(Path(target), overwrite=overwrite)
    files = files_of(path)
    fields = [*schema(), *_others(files, without=added), *(_fields()[name] for name in added)]
    with new_parquet_file(Path(target), pa.schema(fields)) as write:
        for file, _, batch in read_batches(files):
            with reading(file):
                columns = read_columns(batch, fields[: -len(added)])
            lengths = pa.compute.list_value_length(columns["output_ids"]).to_pylist()
            for name, values in added.items():
                columns[name] = pa.array([values.next(length) for length in lengths], _fields()[name].type)
            write(pa.record_batch(list(columns.values()), schema=pa.schema(fields)))
        for values in added.values():
            values.check_end()


def _others(files: Sequence[str], *, without: Collection[str]) -> list[Any]:
    """Return the fields of the columns that are neither a rollout's nor in `without`."""
    pa = pyarrow()
    schemas = []
    for file in files:
        with reading(file):
            found = pa.parquet.read_schema(file).remove_metadata()
            mine = {*schema().names, *without}
            schemas.append(pa.schema([field for field in found if field.name not in mine]))
            others = pa.unify_schemas(schemas)
    return list(others) if schemas else []


class _Values:
    """The values of one added column. The caller gives one value per rollout, as an iterable."""

    def __init__(self, name: str, values: Iterable[Any]) -> None:
        self._name, self._values, self._row = name, iter(values), 0

    def next(self, num_tokens: int) -> Any:
        """Return the next rollout's value after a check."""
        row, self._row = self._row, self._row + 1
        try:
            value = next(self._values)
        except StopIteration:
            raise InvalidInputError(
                f"{self._name}: got {row} values, expected one for each rollout"
            ) from None
        if value is None:
            return None
        is_reward = self._name == "reward"
        expected = "a number" if is_reward else f"a list or an array of {num_tokens} numbers"
        try:
            numbers = np.asarray(value, np.float64 if is_reward else np.float32)
        except (TypeError, ValueError):
            got = describe(value)
        else:
            if numbers.shape == (() if is_reward else (num_tokens,)):
                return numbers[()]
            got = f"shape {list(numbers.shape)}"
        raise InvalidInputError(f"{self._name}: rollout {row}: got {got}, expected {expected}")

    def check_end(self) -> None:
        """Raise InvalidInputError if the caller's iterable has more values than there are rollouts."""
        if next(self._values, self) is not self:
            raise InvalidInputError(f"{self._name}: got more values than the {self._row} rollouts")


def _fields() -> dict[str, Any]:
    """Return the `pyarrow.Field` of each column that a trainer adds, by column name."""
    pa = pyarrow()
    floats = pa.list_(pa.field("element", pa.float32(), nullable=False))
    kinds = {"trainer_logprobs": floats, "trainer_masked_logprobs": floats, "reward": pa.float64()}
    return {name: pa.field(name, kind) for name, kind in kinds.items()}


def _scores(values: dict[str, Any], num_tokens: int, row: int) -> TrainerScores:
    """Return the trainer's values of one row, given as Arrow scalars."""

    def floats(name: str) -> NDArray[np.float32] | None:
        if name not in values or not values[name].is_valid:
            return None
        found: NDArray[np.float32] = values[name].values.to_numpy(zero_copy_only=False).copy()
        if len(found) != num_tokens:
            raise InvalidInputError(f"rollout {row}: {name}: got {len(found)} for {num_tokens} output_ids")
        return found

    reward = values["reward"].as_py() if "reward" in values else None
    return TrainerScores(floats("trainer_logprobs"), floats("trainer_masked_logprobs"), reward)
