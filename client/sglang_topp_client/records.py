"""Rollouts in files: saved as they come, appended to, streamed back. Needs pyarrow (`sglang-topp[data]`).

The files are Parquet; columns are told in `record_columns.py`, the layout in `record_frames.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

from sglang_topp.errors import InvalidInputError, TruncatedFileError, WireError
from sglang_topp_client import record_frames as frames
from sglang_topp_client import record_groups as groups
from sglang_topp_client.checks import whole_number
from sglang_topp_client.record_columns import check_rollout, num_bytes_of, pyarrow, to_rollouts, to_table

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no such locks
    fcntl = None  # type: ignore[assignment]  # a module, or none

if TYPE_CHECKING:
    from sglang_topp_client.rollout import Rollout

__all__ = ["RolloutWriter", "load_rollouts", "save_rollouts"]

_Path: TypeAlias = "str | os.PathLike[str]"
_MAX_GROUP_BYTES = 1 << 26


def save_rollouts(
    path: _Path, rollouts: Iterable[Rollout], *, append: bool = False, row_group_size: int = 256
) -> None:
    """Write rollouts to a file, as they come; see `RolloutWriter` for arguments and errors.

    Where `rollouts` raises, the file holds what had come until then.
    """
    with RolloutWriter(path, append=append, row_group_size=row_group_size) as writer:
        for rollout in rollouts:
            writer.write(rollout)


def load_rollouts(path: _Path) -> Iterator[Rollout]:
    """The rollouts of a file, in the order in which they were written; every bit of every field is as it was.

    One row group at a time is held, and checked before its first rollout is given. A file that was cut, or
    whose writer was killed, gives the rollouts of all its whole row groups before it raises.

    Raises:
        TruncatedFileError: the file was cut; it names the row group. Nothing that it gave is in doubt.
        WireError: a byte was altered, or the file is none of `save_rollouts`; it names the row group.
        OSError: the file cannot be read.
        ModuleNotFoundError: pyarrow is not installed.
    """
    pyarrow()
    # Here, and not at the first `next`: a path that is wrong is known at once.
    with open(path, "rb") as file, suppress(TruncatedFileError):
        frames.check_magic(file)
    return _load(path)


class RolloutWriter:
    """Writes rollouts to a file, a row group at a time; a context manager. Its calls block while they write.

    ::

        with RolloutWriter("rollouts.parquet") as writer:
            for rollout in client.stream(prompts, sampling_params, top_logprobs_p=0.9):
                writer.write(rollout)

    Until the writer is closed, other readers refuse the file; `load_rollouts` gives what is there. A row
    group that was written survives the process.

    Args:
        path: where; there must be no file, so that none is lost.
        append: go on with the file that is there, if there is one. Where its writer was not closed (its
            process was killed), all whole row groups are kept, and what follows them is dropped.
        row_group_size: rollouts of a row group, which is what is held here and in `load_rollouts`; what
            would be more than 64 MiB is written sooner.

    Attributes:
        path: the file.

    Raises:
        InvalidInputError: there is a file and `append` is not set, or another writer has it open.
        WireError: what is to be appended to is no such file, or was altered.
        ModuleNotFoundError: pyarrow is not installed.
    """

    def __init__(self, path: _Path, *, append: bool = False, row_group_size: int = 256) -> None:
        pyarrow()
        self.path = os.fspath(path)
        self._row_group_size = whole_number("row_group_size", row_group_size, 1)
        self._waiting: list[Rollout] = []
        self._waiting_bytes = 0
        self._footer = groups.Footer()
        self._num_groups = self._num_rollouts = self._end = 0
        self._is_whole = False
        self._file = _open(self.path, append)
        try:
            _lock(self._file, self.path)
            if append:
                self._find_end()
            if not self._end:
                self._file.seek(0)
                _write_all(self._file, frames.MAGIC)
                self._end = len(frames.MAGIC)
        except BaseException:
            self._file.close()
            raise

    @property
    def num_rollouts(self) -> int:
        """How many rollouts the file holds, without those that wait for their row group to be full."""
        return self._num_rollouts

    def write(self, rollout: Rollout) -> None:
        """Add a rollout; it is in the file when its row group is full, at `flush` and at `close`.

        Raises:
            InvalidInputError: an array is of another dtype or length than `Rollout` says, or a text is no
                Unicode; the field is named. The writer goes on without it.
            OSError: the row group cannot be written. The file is as it was before.
        """
        self._check_open()
        check_rollout(rollout)
        num_bytes = num_bytes_of(rollout)
        if self._waiting_bytes + num_bytes > _MAX_GROUP_BYTES:
            self.flush()
        self._waiting.append(rollout)
        self._waiting_bytes += num_bytes
        if len(self._waiting) >= self._row_group_size:
            self.flush()

    def flush(self) -> None:
        """Write the rollouts that wait, as a row group of their own: they survive the process then."""
        self._check_open()
        if not self._waiting:
            return
        pages, footer = groups.encode(to_table(self._waiting), self._end + frames.HEAD_BYTES)
        head = frames.head_of(self._num_groups, len(self._waiting), pages, footer)
        self._put(head, pages, footer)
        self._footer.add(f"row group {self._num_groups}", footer)
        self._end += len(head) + len(pages) + len(footer)
        self._num_groups += 1
        self._num_rollouts += len(self._waiting)
        self._waiting, self._waiting_bytes = [], 0

    def close(self) -> None:
        """Write what waits, and the footer; the second call does nothing.

        Raises:
            OSError: it cannot be written. The file is closed, and holds the row groups of before.
        """
        if self._file.closed:
            return
        try:
            self.flush()
            if not self._is_whole:
                footer = self._footer.to_bytes()
                head = frames.head_of(self._num_groups, self._num_rollouts, b"", footer, is_closing=True)
                self._put(head, footer)
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def __enter__(self) -> RolloutWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find_end(self) -> None:
        """Where to go on in the file that is there; its footer's row groups are taken over."""
        last = None
        try:
            for frame in frames.walk(self._file):
                if frame.is_closing:
                    self._is_whole = True
                    break
                last = frame
                self._footer.add(frame.name, frame.footer)
                self._num_groups += 1
                self._num_rollouts += frame.num_rollouts
                self._end = frame.end
        except TruncatedFileError:
            if last is not None:
                # After a power cut, a file may be as long as it was to be and hold less.
                frames.check_pages(self._file, last)
        if self._is_whole:
            self._end = self._end or len(frames.MAGIC)

    def _put(self, *parts: bytes) -> None:
        """Write at the end; where that fails, the end is where it was."""
        try:
            self._is_whole = False
            self._file.truncate(self._end)
            self._file.seek(self._end)
            for part in parts:
                _write_all(self._file, part)
        except BaseException:
            with suppress(OSError):
                self._file.truncate(self._end)
            raise

    def _check_open(self) -> None:
        if self._file.closed:
            raise InvalidInputError(f"{self.path}: this writer is closed")


def _load(path: _Path) -> Iterator[Rollout]:
    with open(path, "rb") as file:
        try:
            for frame in frames.walk(file):
                frames.check_pages(file, frame)
                if not frame.is_closing:
                    # In a generator of its own: a row group is gone before the next is read.
                    yield from _of_group(file, frame)
        except WireError as error:
            error.add_note(f"in {os.fspath(path)}")
            raise


def _of_group(file: BinaryIO, frame: frames.Frame) -> Iterator[Rollout]:
    rollouts = to_rollouts(groups.decode(file, frame))
    for row in range(frame.num_rollouts):
        try:
            yield next(rollouts)
        except InvalidInputError as error:
            raise WireError(frame.name, f"rollout {row}: {error}") from error


def _open(path: str, append: bool) -> BinaryIO:
    # Without a buffer: what a write could not bring to the file is not tried again at close.
    if append:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b", 0)
    try:
        return open(path, "x+b", buffering=0)
    except FileExistsError:
        raise InvalidInputError(
            f"{path}: there is a file already; append=True adds to it, otherwise remove it first"
        ) from None


def _lock(file: BinaryIO, path: str) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidInputError(f"{path}: another writer has it open") from None
    except OSError:
        return  # some network file systems have no locks


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
