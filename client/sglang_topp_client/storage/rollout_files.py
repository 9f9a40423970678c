"""Save rollouts to Parquet files and load them. Needs pyarrow (`sglang-topp[data]`).

A file appears under its name only once it is complete and on disk (`parquet_files.py`). Parquet's checksums
cover its pages. `rollout_columns.py` lists the columns.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from sglang_topp.errors import InvalidInputError
from sglang_topp_client.argument_checks import whole_number
from sglang_topp_client.storage.parquet_files import (
    PART_NAME,
    check_new,
    files_of,
    new_parquet_file,
    read_batches,
    reading,
    sync_directory,
)
from sglang_topp_client.storage.rollout_columns import (
    check_rollout,
    num_bytes_of,
    pyarrow,
    schema,
    to_batch,
    to_rollouts,
)

if TYPE_CHECKING:
    from sglang_topp_client.types.rollout import Rollout

__all__ = ["RolloutWriter", "load_rollouts", "save_rollouts"]

_Path: TypeAlias = "str | os.PathLike[str]"
_MAX_GROUP_BYTES = 1 << 26


def save_rollouts(
    path: _Path, rollouts: Iterable[Rollout], *, row_group_size: int = 256, overwrite: bool = False
) -> None:
    """Write rollouts to one Parquet file.

    The file appears under the name `path` only once all rollouts are in the file. If iterating over
    `rollouts` raises an error, no file is written. To keep the rollouts that came before the error, use
    `RolloutWriter`.

    Args:
        path: the file.
        rollouts: any number of rollouts. The iterable is consumed one rollout at a time, after `path` was
            checked: with `save_rollouts(path, client.stream(...))`, a wrong path costs no work.
        row_group_size: the maximum number of rollouts in a Parquet row group. `save_rollouts` holds one row
            group in memory. A row group also ends if the next rollout would increase the row group's size
            beyond 64 MiB.
        overwrite: whether to replace a file that exists. If False, such a `path` raises InvalidInputError.

    Raises:
        InvalidInputError: `path` already exists; an array does not have the dtype or the length that the
            docstring of `Rollout` states; or a text cannot be encoded as UTF-8. The error names the path or
            the field.
        OSError: the file cannot be written; the error names the file.
        ModuleNotFoundError: pyarrow is not installed.
    """
    pyarrow()
    whole_number("row_group_size", row_group_size, 1)
    path = Path(path)
    check_new(path, overwrite=overwrite)
    with new_parquet_file(path, schema()) as write:
        group = _Group(row_group_size)
        for rollout in rollouts:
            check_rollout(rollout)
            if group.is_full or not group.has_room_for(rollout):
                write(to_batch(group.take()))
            group.add(rollout)
        if group.rollouts:
            write(to_batch(group.take()))


def load_rollouts(path: _Path) -> Iterator[Rollout]:
    """Yield the rollouts of a file, or of a directory written by `RolloutWriter`, in the order of writing.

    Every field is restored bit for bit. The returned iterator holds up to 256 rollouts in memory at a time.
    Another process may write to the directory at the same time. The iterator yields only the rollouts of
    files that existed when `load_rollouts` was called.

    A file that another program rewrote, such as DuckDB, pandas, Polars, or `datasets`, may have other columns
    in addition, and may store the same values with other types.

    Raises:
        WireError: a file was altered or truncated, or does not hold rollouts; the error names the file, and
            the first column that cannot be read. The rollouts yielded before the error are valid.
        OSError: the path cannot be read.
        ModuleNotFoundError: pyarrow is not installed.
    """
    # List the files before the generator starts, so that `load_rollouts` itself raises the error for a wrong
    # path. If the generator listed the files, the error would wait until the caller takes the first rollout.
    pyarrow()
    return _load(files_of(path))


def _load(files: Sequence[str]) -> Iterator[Rollout]:
    for path, rows, batch in read_batches(files, schema().names):
        with reading(path):
            yield from to_rollouts(batch, rows)


class RolloutWriter:
    """A context manager that writes rollouts to a directory of Parquet files, called parts.

    ::

        with RolloutWriter("rollouts") as writer:
            for rollout in client.stream(prompts, sampling_params, top_logprobs_p=0.9):
                writer.write(rollout)

    Each part is a complete Parquet file, so other processes may read the directory while a writer adds parts.
    To read all parts, pass the directory's name to `load_rollouts`, pandas, pyarrow, or `datasets`. To read
    all parts with DuckDB or Polars, pass the pattern `rollouts/*.parquet`. A killed process loses only the
    rollouts of the part that is not yet on disk, at most `part_size`. Several writers may add parts to one
    directory at the same time. All methods block.

    Args:
        path: the directory, which the writer creates if it does not exist.
        append: whether to add parts to a directory that already has parts. If False, a directory with
            parts raises InvalidInputError, so that two runs are not mixed by accident.
        part_size: the maximum number of rollouts in a part. The writer holds the rollouts of a part in memory
            until it writes the part's file. The writer also ends a part if the next rollout would increase
            the part's size beyond 64 MiB.

    Attributes:
        path: the directory.

    Raises:
        InvalidInputError: the path is a file, or the directory has parts and `append` is not set.
        OSError: the directory cannot be created.
        ModuleNotFoundError: pyarrow is not installed.
    """

    def __init__(self, path: _Path, *, append: bool = False, part_size: int = 256) -> None:
        pyarrow()
        self.path = os.fspath(path)
        self._group = _Group(whole_number("part_size", part_size, 1))
        self._num_rollouts = 0
        self._is_closed = False
        folder = Path(path)
        if folder.exists() and not folder.is_dir():
            raise InvalidInputError(f"{self.path}: got a file, expected a directory or a new path")
        folder.mkdir(parents=True, exist_ok=True)
        sync_directory(folder.parent)
        numbers = [int(part[1]) for name in os.listdir(folder) if (part := PART_NAME.fullmatch(name))]
        if numbers and not append:
            raise InvalidInputError(
                f"{self.path}: got a directory with {len(numbers)} parts, expected none; append=True adds to"
                " them"
            )
        self._next_number = max(numbers, default=-1) + 1
        # Another writer may use the same part numbers in this directory. The random suffix distinguishes
        # the files of different writers.
        self._suffix = uuid.uuid4().hex[:8]

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts that this writer has written to disk."""
        return self._num_rollouts

    def write(self, rollout: Rollout) -> None:
        """Add a rollout. The rollout is on disk once its part file is full, or after `flush` or `close`.

        Raises:
            InvalidInputError: an array does not have the dtype or the length that the docstring of `Rollout`
                states, or a text cannot be encoded as UTF-8; the error names the field. The writer discards
                the rejected rollout.
            OSError: the part cannot be written; the error names the part. The writer discards the argument
                `rollout`, and keeps the part's earlier rollouts in memory. The caller may call `write` again
                with the same rollout.
        """
        self._check_open()
        check_rollout(rollout)
        if not self._group.has_room_for(rollout):
            self.flush()
        self._group.add(rollout)
        if self._group.is_full:
            try:
                self.flush()
            except BaseException:
                self._group.remove_last()
                raise

    def flush(self) -> None:
        """Write the unfinished part file to disk, so that all rollouts given to `write` are on disk.

        Raises:
            OSError: the part cannot be written; the error names the part. The writer keeps the rollouts of
                the part in memory, so the caller may call `flush` again.
        """
        self._check_open()
        if not self._group.rollouts:
            return
        # If this write fails, the next `flush` reuses the part number and the file name, so that no rollout
        # is stored twice.
        name = f"part-{self._next_number:06}-{self._suffix}.parquet"
        with new_parquet_file(Path(self.path, name), schema()) as write:
            write(to_batch(self._group.rollouts))
        self._num_rollouts += len(self._group.take())
        self._next_number += 1

    def close(self) -> None:
        """Write the unfinished part to disk and close the writer. Closing a closed writer does nothing.

        Raises:
            OSError: the part cannot be written; the error names the part. The writer stays open and keeps the
                rollouts of the part in memory, so the caller may call `close` again.
        """
        if not self._is_closed:
            self.flush()
            self._is_closed = True

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInputError(f"{self.path}: this writer is closed")


class _Group:
    """A buffer of rollouts that will be written together, as one row group or one part."""

    def __init__(self, max_rollouts: int) -> None:
        self._max_rollouts = max_rollouts
        self._num_bytes = 0
        self.rollouts: list[Rollout] = []

    @property
    def is_full(self) -> bool:
        return len(self.rollouts) >= self._max_rollouts

    def has_room_for(self, rollout: Rollout) -> bool:
        return not self.rollouts or self._num_bytes + num_bytes_of(rollout) <= _MAX_GROUP_BYTES

    def add(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)
        self._num_bytes += num_bytes_of(rollout)

    def remove_last(self) -> None:
        self._num_bytes -= num_bytes_of(self.rollouts.pop())

    def take(self) -> list[Rollout]:
        rollouts, self.rollouts, self._num_bytes = self.rollouts, [], 0
        return rollouts
