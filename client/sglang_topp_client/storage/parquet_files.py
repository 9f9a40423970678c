"""Read and write Parquet files of rollouts: whole files appear at once, and altered files are errors."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client.storage.rollout_columns import pyarrow
from sglang_topp_client.storage.rollout_columns import schema as rollout_schema

__all__ = [
    "PART_NAME",
    "check_new",
    "files_of",
    "new_parquet_file",
    "read_batches",
    "reading",
    "sync_directory",
]

PART_NAME = re.compile(r"part-(\d{6,})-[0-9a-f]{8}\.parquet")
"""Matches the file name of a finished part written by `RolloutWriter`, and captures the part's number."""

_MAX_ROWS = 256
# The text columns that Parquet stores with dictionary encoding. Float columns must not use it, because it may
# replace a value by an equal value with other bits, such as -0.0 by 0.0.
_DICTIONARIES = [
    "top_logprobs_source",
    "sampling_params",
    "finish_reason",
    "weight_version",
    "weight_versions.list.element.version",
]
_STATISTICS = ["prompt_index", "sample_index", "finish_reason", "weight_version"]


def check_new(path: Path, *, overwrite: bool) -> None:
    """Raise InvalidInputError if `path` exists, unless it is a file and `overwrite` is set."""
    if path.exists() and not (overwrite and path.is_file()):
        hint = "" if path.is_dir() else "; overwrite=True replaces it"
        raise InvalidInputError(f"{path}: got a path that exists, expected a new file{hint}")


@contextmanager
def new_parquet_file(path: Path, schema: Any) -> Iterator[Callable[[Any], None]]:
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
            schema,
            compression="zstd",
            use_dictionary=_DICTIONARIES,
            write_statistics=_STATISTICS,
            write_page_checksum=True,
            # Parquet stores the types of our columns itself, but not every Arrow type.
            store_schema=len(schema) > len(rollout_schema()),
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
    """
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
            for group in range(parquet.num_row_groups):
                end = start + parquet.metadata.row_group(group).num_rows
                if wanted is None or any(start <= row < end for row in wanted):
                    at = start
                    for batch in parquet.iter_batches(_MAX_ROWS, row_groups=[group], columns=columns):
                        rows: Sequence[int] = range(at, at + len(batch))
                        if wanted is not None:
                            rows = [row for row in rows if row in wanted]
                        yield path, rows, batch if len(rows) == len(batch) else _take(batch, rows, at)
                        at += len(batch)
                    if at != end:
                        raise WireError(
                            path, f"row group {group}: got {at - start} rollouts, expected {end - start}"
                        )
                start = end


def _take(batch: Any, rows: Sequence[int], first: int) -> Any:
    return batch.take(pyarrow().array([row - first for row in rows], pyarrow().int64()))


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
