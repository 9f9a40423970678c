"""Add a trainer's log-probs and rewards to a copy of saved rollouts, and load such copies."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sglang_topp.errors import InvalidInputError, describe
from sglang_topp_client.storage.atomic_parquet_file import AtomicParquetFile
from sglang_topp_client.storage.rollout_columns import num_bytes_of, pyarrow
from sglang_topp_client.storage.rollout_reader import files_of, load_rows, num_rows_of
from sglang_topp_client.storage.trainer_score_columns import NO_SCORES, TrainerScores, trainer_fields
from sglang_topp_client.types.rollout import Rollout

__all__ = ["ScoredRollout", "add_trainer_columns", "load_scored_rollouts"]

_Path: TypeAlias = "str | os.PathLike[str]"
_MAX_ROWS, _MAX_BYTES = 256, 1 << 26
"""The maximum number of rollouts in a row group, and the maximum size of a row group in bytes."""


class ScoredRollout(NamedTuple):
    """A rollout, and the log-probs and the reward that a trainer recorded for the rollout."""

    rollout: Rollout
    scores: TrainerScores = NO_SCORES


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
    num_before = 0
    for file in files:
        here = None if wanted is None else {one - num_before for one in wanted}
        for row, rollout, scores in load_rows(file, here):
            yield num_before + row, ScoredRollout(rollout, scores)
        num_before += num_rows_of(file)


def add_trainer_columns(
    path: _Path,
    target: _Path,
    *,
    trainer_logprobs: Iterable[ArrayLike | None] | None = None,
    trainer_masked_logprobs: Iterable[ArrayLike | None] | None = None,
    rewards: Iterable[float | None] | None = None,
) -> None:
    """Copy saved rollouts to a new Parquet file, and add a trainer's log-probs and rewards as columns.

    `load_rollouts` can read the new file. `sglang-topp view` shows the file's rewards, and importance ratios
    that it computes from the trainer's log-probs. Each argument for a new column has one value per rollout,
    in the order of the saved rollouts. A value may be None, which the new file stores as null. T is the
    number of a rollout's output tokens.

    Args:
        path: the file of the saved rollouts, or a directory written by `RolloutWriter`.
        target: the new file, which must not exist yet.
        trainer_logprobs: float [T] for each rollout, the trainer's log-probs of the output tokens over the
            whole vocabulary, at the rollout's temperature. `sglang-topp view` ignores the log-probs of tokens
            that `Rollout.extend` appended.
        trainer_masked_logprobs: float [T] for each rollout, the trainer's log-probs of the output tokens over
            their candidate sets, as `sglang_topp.replay.score_logits` returns them.
        rewards: one number for each rollout.

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
    columns = {name: _Column(name, values) for name, values in given.items() if values is not None}
    if not columns:
        raise InvalidInputError(
            "got no column, expected trainer_logprobs, trainer_masked_logprobs, or rewards"
        )
    if Path(target).exists():
        raise InvalidInputError(f"{os.fspath(target)}: got a path that exists, expected a new file")

    fields = trainer_fields()
    with AtomicParquetFile(Path(target), [fields[name] for name in columns]) as file:
        batch: list[Rollout] = []
        num_bytes = 0
        for _, (rollout, _) in load_scored_rollouts(path):
            if len(batch) == _MAX_ROWS or (batch and num_bytes + num_bytes_of(rollout) > _MAX_BYTES):
                file.write(batch, [column.flush() for column in columns.values()])
                batch, num_bytes = [], 0
            for column in columns.values():
                column.take(len(rollout.output_ids))
            batch.append(rollout)
            num_bytes += num_bytes_of(rollout)
        for column in columns.values():
            column.check_end()
        file.write(batch, [column.flush() for column in columns.values()])


class _Column:
    """One column of a trainer's values. The caller gives one value per rollout, as an iterable."""

    def __init__(self, name: str, values: Iterable[Any]) -> None:
        self._name, self._values = name, iter(values)
        self._taken: list[Any] = []
        self._num_taken = 0

    def take(self, num_tokens: int) -> None:
        """Take the next rollout's value from the caller's iterable, check it, and keep it until `flush`."""
        try:
            value = next(self._values)
        except StopIteration:
            raise InvalidInputError(
                f"{self._name}: got {self._num_taken} values, expected one for each rollout"
            ) from None
        if value is not None:
            value = self._as_number(value) if self._name == "reward" else self._as_floats(value, num_tokens)
        self._taken.append(value)
        self._num_taken += 1

    def _as_number(self, value: Any) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise InvalidInputError(
                f"{self._name}: rollout {self._num_taken}: got {describe(value)}, expected a number"
            ) from None

    def _as_floats(self, value: Any, num_tokens: int) -> NDArray[np.float32]:
        try:
            floats = np.asarray(value, np.float32)
        except (TypeError, ValueError):
            raise InvalidInputError(
                f"{self._name}: rollout {self._num_taken}: got {describe(value)}, expected a list"
                f" or an array of {num_tokens} numbers"
            ) from None
        if floats.shape != (num_tokens,):
            raise InvalidInputError(
                f"{self._name}: rollout {self._num_taken}: got shape {list(floats.shape)}, expected"
                f" [{num_tokens}], one for each output token"
            )
        return floats

    def flush(self) -> Any:
        """Return the values that `take` kept since the last `flush`, as a `pyarrow.Array`."""
        taken, self._taken = self._taken, []
        return pyarrow().array(taken, trainer_fields()[self._name].type)

    def check_end(self) -> None:
        """Raise InvalidInputError if the caller's iterable has more values than there are rollouts."""
        if next(self._values, self) is not self:
            raise InvalidInputError(f"{self._name}: got more values than the {self._num_taken} rollouts")
