"""Atomic Parquet file: write rollouts to a file that appears only after it is complete and on disk."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sglang_topp_client.storage.rollout_columns import pyarrow, schema, to_table

if TYPE_CHECKING:
    from sglang_topp_client.types.rollout import Rollout

__all__ = ["AtomicParquetFile", "sync_directory"]

# The text columns that Parquet stores with dictionary encoding. Float columns must not use dictionary
# encoding, because dictionary encoding may replace a value by an equal value with other bits, such as -0.0 by
# 0.0.
_DICTIONARIES = [
    "top_logprobs_source",
    "sampling_params",
    "finish_reason",
    "weight_version",
    "weight_versions.list.element.version",
]
_STATISTICS = ["prompt_index", "sample_index", "finish_reason", "weight_version"]


class AtomicParquetFile:
    """A context manager that writes a Parquet file under a hidden name, and then renames the complete file.

    After an error, the context manager removes the hidden file.

    pyarrow writes to memory, and this class copies the bytes to disk, for two reasons. If pyarrow itself
    wrote to a full disk, pyarrow would append a footer after a partial row group. The damaged file would then
    look complete. Also, pyarrow's errors do not name the path of the file.

    Args:
        path: the final path of the file.
        more_fields: one `pyarrow.Field` for each additional column. The additional columns follow the rollout
            columns.
    """

    def __init__(self, path: Path, more_fields: Sequence[Any] = ()) -> None:
        self._path = path
        self._schema = pyarrow().schema([*schema(), *more_fields])
        self._hidden = path.with_name(f".{path.name}.tmp")
        self._memory = io.BytesIO()
        self._parquet = pyarrow().parquet.ParquetWriter(
            self._memory,
            self._schema,
            compression="zstd",
            use_dictionary=_DICTIONARIES,
            write_statistics=_STATISTICS,
            write_page_checksum=True,
            # A copy of the Arrow schema would only repeat the column types that Parquet stores anyway.
            store_schema=False,
        )
        with self._naming_errors():
            self._file = open(self._hidden, "wb", buffering=0)  # noqa: SIM115  # closed by `__exit__`

    def write(self, rollouts: Sequence[Rollout], more_columns: Sequence[Any] = ()) -> None:
        """Write a row group of rollouts, with one `pyarrow.Array` for each additional column.

        The caller must have checked each rollout with `rollout_columns.check_rollout`.
        """
        if rollouts:
            columns = [*to_table(rollouts).columns, *more_columns]
            table = pyarrow().table(columns, schema=self._schema)
            self._parquet.write_table(table, row_group_size=len(rollouts))
            self._to_disk()

    def __enter__(self) -> AtomicParquetFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._parquet.close()
            if kind is None:
                self._to_disk()
                with self._naming_errors():
                    os.fsync(self._file.fileno())
                    self._file.close()
                    os.replace(self._hidden, self._path)
                    try:
                        sync_directory(self._path.parent)
                    except BaseException:
                        # After an error, remove the new file. The caller may write the same rollouts to
                        # another file, and the directory would then hold these rollouts twice.
                        self._path.unlink()
                        raise
        finally:
            self._file.close()
            with suppress(OSError):
                self._hidden.unlink()

    def _to_disk(self) -> None:
        left = memoryview(self._memory.getvalue())
        self._memory.seek(0)
        self._memory.truncate()
        with self._naming_errors():
            while left:
                left = left[self._file.write(left) :]

    def _naming_errors(self) -> _NamingErrors:
        return _NamingErrors(self._path)


class _NamingErrors:
    """A context manager that adds the path of the file to any OSError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(self._path)) from error


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
