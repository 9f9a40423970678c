"""Read saved rollouts, and the columns that a trainer added, from Parquet files, one row group at a time."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client.storage.rollout_columns import check_rollout, pyarrow, to_rollouts
from sglang_topp_client.storage.trainer_score_columns import TrainerRows, TrainerScores, has_rollout_columns

if TYPE_CHECKING:
    from sglang_topp_client.types.rollout import Rollout

__all__ = ["PART_NAME", "files_of", "load_rows", "num_rows_of"]

PART_NAME = re.compile(r"part-(\d{6,})-[0-9a-f]{8}\.parquet")
"""Matches the file name of a finished part written by `RolloutWriter`, and captures the part's number."""


def files_of(path: str | os.PathLike[str]) -> list[str]:
    """Return the files to read: a directory's finished parts in the order of writing, or the one file `path`.

    Raises:
        OSError: the path cannot be read.
    """
    if os.path.isdir(path):
        return sorted(os.path.join(path, name) for name in os.listdir(path) if PART_NAME.fullmatch(name))
    with open(path, "rb"):
        return [os.fspath(path)]


def num_rows_of(path: str) -> int:
    """Return the number of rollouts in one file, read from the file's footer."""
    with open(path, "rb") as file:
        return int(pyarrow().parquet.read_metadata(file).num_rows)


def load_rows(
    path: str, wanted: Collection[int] | None = None
) -> Iterator[tuple[int, Rollout, TrainerScores]]:
    """Yield three values for each row in a file: the row number, the rollout, and the trainer's scores.

    Args:
        path: the file.
        wanted: the row numbers to read, from 0, or None to read all rows. Row groups without a wanted row are
            skipped.
    """
    pa = pyarrow()
    with open(path, "rb") as file:
        try:
            parquet = pa.parquet.ParquetFile(file, page_checksum_verification=True, pre_buffer=False)
            if not has_rollout_columns(parquet.schema_arrow):
                raise WireError(
                    path,
                    f"got the columns {', '.join(parquet.schema_arrow.names)}, expected those that this"
                    " version of sglang-topp writes",
                )
            start = 0
            for number in range(parquet.num_row_groups):
                num_rows = parquet.metadata.row_group(number).num_rows
                rows = [row for row in range(num_rows) if wanted is None or start + row in wanted]
                # Each call of `_load_group` makes a generator that reads one row group. When the generator
                # ends, the memory of its row group is freed. Only then does the outer loop read the next row
                # group.
                for row, rollout, scores in _load_group(path, parquet, number, rows) if rows else ():
                    yield start + row, rollout, scores
                start += num_rows
        except (pa.ArrowException, ValueError, OSError) as error:
            if isinstance(error, WireError) or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise WireError(path, f"cannot be read, so it was cut or altered: {error}") from error


def _load_group(
    path: str, parquet: Any, number: int, rows: Sequence[int]
) -> Iterator[tuple[int, Rollout, TrainerScores]]:
    table = parquet.read_row_group(number)
    if len(table) != (expected := parquet.metadata.row_group(number).num_rows):
        raise WireError(path, f"row group {number}: got {len(table)} rollouts, expected {expected}")
    if len(rows) < expected:
        table = table.take(pyarrow().array(rows))
    trainer_rows = TrainerRows(table)
    rollouts = to_rollouts(table)
    del table
    for index, row in enumerate(rows):
        try:
            rollout = next(rollouts)
            check_rollout(rollout)
            scores = trainer_rows.read(index, len(rollout.output_ids))
        except InvalidInputError as error:
            raise WireError(path, f"row group {number}, rollout {row}: {error}") from error
        yield row, rollout, scores
