"""Save rollouts to Parquet files, load them, and add a trainer's log-probs and rewards.

A file appears under its name only once it is complete and on disk, and an altered file is an error: Parquet's
checksums cover its pages. `parquet_columns.py` lists the columns. Needs pyarrow (`sglang-topp[data]`).
"""

from __future__ import annotations

import io
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from sglang_topp.errors import InvalidInputError, WireError, describe
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.storage.parquet_columns import (
    TrainerScores,
    check_rollout,
    num_bytes_of,
    pyarrow,
    read_columns,
    schema,
    to_batch,
    to_rollouts,
    trainer_fields,
    trainer_scores,
)
from sglang_topp_client.value_checks import whole_number

PART_NAME = re.compile(r"part-(\d{6,})-[0-9a-f]{8}\.parquet")
"""Matches the file name of a finished part written by `RolloutWriter`, and captures the part's number."""

_Path: TypeAlias = "str | os.PathLike[str]"
_MAX_GROUP_BYTES = 1 << 26
_MAX_ROWS = 256
# The text columns that Parquet stores with dictionary encoding. Float columns must not use it, because it may
# replace a value by an equal value with other bits, such as -0.0 by 0.0.
_DICTIONARIES = [
    *("top_logprobs_source", "sampling_params", "finish_reason", "weight_version"),
    "weight_versions.list.element.version",
]
_STATISTICS = ["prompt_index", "sample_index", "finish_reason", "weight_version"]


def check_new(path: Path, *, overwrite: bool) -> None:
    """Raise InvalidInputError if `path` exists, unless it is a file and `overwrite` is set."""
    if path.exists() and not (overwrite and path.is_file()):
        hint = "" if path.is_dir() else "; overwrite=True replaces it"
        raise InvalidInputError(f"{path}: got a path that exists, expected a new file{hint}")


@contextmanager
def new_parquet_file(path: Path, columns: Any) -> Iterator[Callable[[Any], None]]:
    """Yield a function that writes a `pyarrow.RecordBatch` as a row group of a new file.

    The file appears under the name `path` only after the `with` block, once it is complete and on disk. After
    an error, nothing of it is left.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    hidden = path.with_name(f".{path.name}.tmp")
    # pyarrow writes to memory: on a full disk, it would append a footer to a cut row group, and its errors
    # would not name the file.
    memory = io.BytesIO()

    def to_disk() -> None:
        file.write(memory.getvalue())
        file.flush()
        memory.seek(0)
        memory.truncate()

    def write(batch: Any) -> None:
        parquet.write_batch(batch, row_group_size=len(batch))
        with _naming_errors(path):
            to_disk()

    with _naming_errors(path):
        file = open(hidden, "wb")  # noqa: SIM115  # closed below
    try:
        with pyarrow().parquet.ParquetWriter(
            memory,
            columns,
            compression="zstd",
            use_dictionary=_DICTIONARIES,
            write_statistics=_STATISTICS,
            write_page_checksum=True,
            # Parquet stores the types of our columns itself, but not every Arrow type.
            store_schema=len(columns) > len(schema()),
        ) as parquet:
            yield write
        with _naming_errors(path):
            to_disk()
            os.fsync(file.fileno())
            file.close()
            os.replace(hidden, path)
            try:
                sync_directory(path.parent)
            except BaseException:
                # The caller may write the same rollouts again, and the directory would then hold them twice.
                path.unlink()
                raise
    finally:
        with suppress(OSError):
            file.close()
        with suppress(OSError):
            hidden.unlink()


@contextmanager
def _naming_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_directory(path: Path) -> None:
    """Sync a directory to disk, so that a renamed file in it survives a crash of the machine.

    Do nothing on systems that cannot sync a directory.
    """
    if hasattr(os, "O_DIRECTORY"):
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def files_of(path: str | os.PathLike[str]) -> list[str]:
    """Return the files to read: a directory's finished parts in the order of writing, or the one file `path`.

    Raises:
        OSError: the path cannot be read.
        ModuleNotFoundError: pyarrow is not installed.
    """
    pyarrow()
    if os.path.isdir(path):
        return sorted(os.path.join(path, name) for name in os.listdir(path) if PART_NAME.fullmatch(name))
    with open(path, "rb"):
        return [os.fspath(path)]


def read_batches(
    files: Sequence[str], columns: Sequence[str] | None = None, wanted: Collection[int] | None = None
) -> Iterator[tuple[str, Sequence[int], Any]]:
    """Yield the rows of the files in batches: a file, the row numbers, and a `pyarrow.RecordBatch`.

    Args:
        files: the files, whose rows are counted from 0 over all of them.
        columns: the names of the columns to read, or None to read all. A file may lack some of them.
        wanted: the row numbers to read, or None to read all rows. Row groups without one are skipped.

    Raises:
        WireError: a file was altered or truncated; the error names the file.
        OSError: a file cannot be read.
    """
    pa = pyarrow()
    start = 0
    for path in files:
        with open(path, "rb") as file, reading(path):
            parquet = pa.parquet.ParquetFile(file, page_checksum_verification=True, pre_buffer=False)
            counts = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
            if sum(counts) != parquet.metadata.num_rows:  # Parquet's footer has no checksum
                raise WireError(path, f"got {sum(counts)} rollouts, expected {parquet.metadata.num_rows}")
            for group, count in enumerate(counts):
                end = start + count
                if wanted is None or any(start <= row < end for row in wanted):
                    at = start
                    for batch in parquet.iter_batches(_MAX_ROWS, row_groups=[group], columns=columns):
                        rows: Sequence[int] = range(at, at + len(batch))
                        first, at = at, at + len(batch)
                        if wanted is not None:
                            rows = [row for row in rows if row in wanted]
                            batch = batch.take(pa.array([row - first for row in rows], pa.int64()))
                        yield path, rows, batch
                    if at != end:
                        raise WireError(
                            path, f"row group {group}: got {at - start} rollouts, expected {end - start}"
                        )
                start = end


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn an error about what a file holds into a WireError that names the file."""
    try:
        yield
    except InvalidInputError as error:
        raise WireError(path, str(error)) from error
    except (pyarrow().ArrowException, ValueError, OSError) as error:
        if isinstance(error, WireError) or (isinstance(error, OSError) and error.errno is not None):
            raise
        raise WireError(path, f"cannot be read, so it was cut or altered: {error}") from error


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
        group: list[Rollout] = []
        num_bytes = 0
        for rollout in rollouts:
            check_rollout(rollout)
            size = num_bytes_of(rollout)
            if group and (len(group) >= row_group_size or num_bytes + size > _MAX_GROUP_BYTES):
                write(to_batch(group))
                group, num_bytes = [], 0
            group.append(rollout)
            num_bytes += size
        if group:
            write(to_batch(group))


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
    return (one.rollout for _, one in _load(files_of(path), None, {}))


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
        self._part_size = whole_number("part_size", part_size, 1)
        self._part: list[Rollout] = []
        self._num_bytes = self._num_rollouts = 0
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
        size = num_bytes_of(rollout)
        if self._num_bytes + size > _MAX_GROUP_BYTES:
            self.flush()
        self._part.append(rollout)
        self._num_bytes += size
        if len(self._part) >= self._part_size:
            try:
                self.flush()
            except BaseException:
                self._part.pop()
                self._num_bytes -= size
                raise

    def flush(self) -> None:
        """Write the unfinished part file to disk, so that all rollouts given to `write` are on disk.

        Raises:
            OSError: the part cannot be written; the error names the part. The writer keeps the rollouts of
                the part in memory, so the caller may call `flush` again.
        """
        self._check_open()
        if not self._part:
            return
        # If this write fails, the next `flush` reuses the part number and the file name, so that no rollout
        # is stored twice.
        name = f"part-{self._next_number:06}-{self._suffix}.parquet"
        with new_parquet_file(Path(self.path, name), schema()) as write:
            write(to_batch(self._part))
        self._num_rollouts += len(self._part)
        self._part, self._num_bytes = [], 0
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InvalidInputError(f"{self.path}: this writer is closed")


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
    return _load(files_of(path), wanted, trainer_fields())


def _load(
    files: Sequence[str], wanted: Collection[int] | None, fields: Mapping[str, Any]
) -> Iterator[tuple[int, ScoredRollout]]:
    for path, rows, batch in read_batches(files, [*schema().names, *fields], wanted):
        with reading(path):
            known = [field for name, field in fields.items() if name in batch.schema.names]
            columns = read_columns(batch, known)
            for at, rollout in enumerate(to_rollouts(batch, rows)):
                row, values = rows[at], {name: column[at] for name, column in columns.items()}
                yield row, ScoredRollout(rollout, trainer_scores(values, len(rollout.output_ids), row))


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
    added = {name: iter(values) for name, values in given.items() if values is not None}
    if not added:
        raise InvalidInputError(
            "got no column, expected trainer_logprobs, trainer_masked_logprobs, or rewards"
        )
    pa = pyarrow()
    check_new(Path(target), overwrite=overwrite)
    files = files_of(path)
    fields = [*schema(), *_others(files, without=added), *(trainer_fields()[name] for name in added)]
    with new_parquet_file(Path(target), pa.schema(fields)) as write:
        num_rows = 0
        for file, _, batch in read_batches(files):
            with reading(file):
                columns = read_columns(batch, fields[: -len(added)])
            lengths = pa.compute.list_value_length(columns["output_ids"]).to_pylist()
            for name, values in added.items():
                columns[name] = _next_column(name, values, lengths, num_rows)
            write(pa.record_batch(list(columns.values()), schema=pa.schema(fields)))
            num_rows += len(batch)
        for name, values in added.items():
            if next(values, write) is not write:
                raise InvalidInputError(f"{name}: got more values than the {num_rows} rollouts")


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


def _next_column(name: str, values: Iterator[Any], lengths: Sequence[int], start: int) -> Any:
    """Return the Arrow column of the next rollouts, after a check of each value.

    Args:
        name: the column's name.
        values: the values of the remaining rollouts.
        lengths: the number of output tokens of each of the next rollouts.
        start: the row of the first of them.
    """
    column: list[Any] = []
    for row, (length, value) in enumerate(zip(lengths, values, strict=False), start):
        is_reward = name == "reward"
        try:
            number = None if value is None else np.asarray(value, np.float64 if is_reward else np.float32)
        except (TypeError, ValueError):
            got = describe(value)
        else:
            if number is None or number.shape == (() if is_reward else (length,)):
                column.append(None if number is None else number[()])
                continue
            got = f"shape {list(number.shape)}"
        expected = "a number" if is_reward else f"a list or an array of {length} numbers"
        raise InvalidInputError(f"{name}: rollout {row}: got {got}, expected {expected}")
    if len(column) < len(lengths):
        raise InvalidInputError(f"{name}: got {start + len(column)} values, expected one for each rollout")
    return pyarrow().array(column, trainer_fields()[name].type)
