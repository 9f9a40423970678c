"""Columns that a trainer adds to saved rollouts: its own log-probs, and rewards.

Each of the columns below is optional, and may be null in any row. T is the number of output tokens of the
row's rollout::

    trainer_logprobs                list<float>, T; natural log-probs over the whole vocabulary
    trainer_masked_logprobs         list<float>, T; natural log-probs over the candidate sets
    reward                          double
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError
from sglang_topp_client.storage.rollout_columns import pyarrow, schema

__all__ = ["NO_SCORES", "TrainerRows", "TrainerScores", "has_rollout_columns", "trainer_fields"]

_LISTS = ("trainer_logprobs", "trainer_masked_logprobs")


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


NO_SCORES = TrainerScores()


def trainer_fields() -> dict[str, Any]:
    """Return the `pyarrow.Field` of each column that a trainer adds, by column name."""
    pa = pyarrow()
    floats = pa.list_(pa.field("element", pa.float32(), nullable=False))
    return {name: pa.field(name, floats) for name in _LISTS} | {"reward": pa.field("reward", pa.float64())}


def has_rollout_columns(found: Any) -> bool:
    """Return whether a `pyarrow.Schema` has the columns of rollouts, with or without a trainer's columns."""
    expected = schema()
    fields, others = list(found)[: len(expected)], list(found)[len(expected) :]
    known = list(trainer_fields().values())
    return fields == list(expected) and all(field in known for field in others)


class TrainerRows:
    """Reader of the trainer's columns in a `pyarrow.Table` of rollouts.

    If the table lacks a column, `read` returns None for this column in every row.
    """

    def __init__(self, table: Any) -> None:
        self._columns = {
            name: table.column(name).combine_chunks()
            for name in trainer_fields()
            if name in table.column_names
        }

    def read(self, row: int, num_tokens: int) -> TrainerScores:
        """Return the trainer's values for the rollout in row `row`.

        Raises:
            InvalidInputError: the length of a list is not `num_tokens`. The error message names the column.
        """
        if not self._columns:
            return NO_SCORES
        reward = self._columns.get("reward")
        logprobs, masked_logprobs = (self._list(name, row, num_tokens) for name in _LISTS)
        return TrainerScores(logprobs, masked_logprobs, None if reward is None else reward[row].as_py())

    def _list(self, name: str, row: int, num_tokens: int) -> NDArray[np.float32] | None:
        column = self._columns.get(name)
        if column is None or not column[row].is_valid:
            return None
        values: NDArray[np.float32] = column[row].values.to_numpy(zero_copy_only=False)
        if len(values) != num_tokens:
            raise InvalidInputError(f"{name}: got {len(values)} for {num_tokens} output_ids")
        return values.copy()
