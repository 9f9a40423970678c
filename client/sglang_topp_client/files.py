"""How many connections this process may open: every one is a file, and their number is limited.

The soft limit (`ulimit -n`, RLIMIT_NOFILE) counts; 1,024 is common, 256 on macOS. It is not raised here:
code elsewhere in the process may use `select`, which breaks on files beyond 1,024. Everything that the
process has open counts, so it is looked at, and all the clients of a process share what is left.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref

try:
    import resource
except ImportError:  # pragma: no cover - Windows has no such limit
    resource = None  # type: ignore[assignment]  # a module, or none

__all__ = ["Share", "limit", "shortage"]

_LOOK_EVERY_S = 0.1
# For the rest of the process, and for what a connection takes while it is made (names are looked up in
# threads, two addresses may be tried at once).
_RESERVE = 64


def limit() -> int | None:
    """How many files this process may have open; None where there is no limit."""
    if resource is None:
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def shortage(error: BaseException) -> str | None:
    """A sentence that says what to do, where `error` comes of too few files; else None."""
    codes = _codes(error, set())
    if errno.ENFILE in codes:
        return "the machine has no file left for a connection (ENFILE, fs.file-max): close some, or raise it"
    if errno.EMFILE not in codes and not _is_none_left():
        return None
    return (
        f"no file is left for a connection: this process may have {limit()} open (EMFILE); raise that with"
        " `ulimit -n 65536` before it starts or resource.setrlimit(resource.RLIMIT_NOFILE, ...) in it, or"
        " close files"
    )


def _codes(error: BaseException | None, seen: set[int]) -> set[int]:
    """The error numbers of an error, of its causes, and of the errors that it groups."""
    if error is None or id(error) in seen:
        return set()
    seen.add(id(error))
    codes = {error.errno} if isinstance(error, OSError) and error.errno is not None else set()
    grouped = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for each in (error.__cause__, error.__context__, *grouped):
        codes |= _codes(each, seen)
    return codes


def _is_none_left() -> bool:
    """A name that cannot be looked up for want of a file fails with no such number."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno == errno.EMFILE
    return False


class Share:
    """One pool's part of the connections that this process may open. To be used from one thread.

    Attributes:
        held: how many connections the pool has, those that are being opened included.
        is_waiting: whether somebody waits in it for one more.
    """

    def __init__(self) -> None:
        self.held = 0
        self.is_waiting = False
        _process.add(self)

    def may_open(self, *, is_urgent: bool = False) -> bool:
        """Whether the pool may open one more connection now.

        A pool without one may always: a try that fails by name is better than waiting for what may never
        come. Where files are short a pool leaves what is above its even share to others that wait.

        Args:
            is_urgent: for a short question, which may use half of the reserve.
        """
        return self.held == 0 or _process.has_room(self, is_urgent=is_urgent)

    @property
    def must_yield(self) -> bool:
        """Whether a connection that nobody uses should be closed, for another pool to open one."""
        return _process.is_claimed(self)

    def begin(self) -> None:
        """A connection is going to be opened."""
        self.held += 1
        _process.count_opening(1)

    def opened(self) -> None:
        """Its opening is over, whether it succeeded or not."""
        _process.count_opening(-1)

    def end(self) -> None:
        """It is closed."""
        self.held -= 1


class _Process:
    """What is known of this process's files. Looking takes a millisecond where there are thousands, so it
    looks again when a tenth of a second has passed or half of what was free has been taken."""

    def __init__(self) -> None:
        # The collector may end what asks again while this thread holds it.
        self._lock = threading.RLock()
        self._shares: weakref.WeakSet[Share] = weakref.WeakSet()
        self._opening = 0
        self._looked_at = -_LOOK_EVERY_S
        self._free = 0
        self._begun_since = 0

    def add(self, share: Share) -> None:
        with self._lock:
            self._shares.add(share)

    def count_opening(self, change: int) -> None:
        with self._lock:
            self._opening += change
            self._begun_since += max(change, 0)

    def has_room(self, share: Share, *, is_urgent: bool) -> bool:
        allowed = limit()
        if allowed is None:
            return True
        reserve = min(_RESERVE, allowed // 8)
        with self._lock:
            room = self._look(allowed) - (reserve // 2 if is_urgent else reserve)
            return room > 0 and (is_urgent or not self._is_claimed(share, share.held + 1, room))

    def is_claimed(self, share: Share) -> bool:
        allowed = limit()
        if allowed is None:
            return False
        with self._lock:
            room = self._look(allowed) - min(_RESERVE, allowed // 8)
            return self._is_claimed(share, share.held, room)

    def _is_claimed(self, share: Share, held: int, room: int) -> bool:
        """Whether `held` connections are more than this pool's even share, while another one waits for its
        own."""
        active = [each for each in self._shares if each is share or each.held or each.is_waiting]
        even = max(1, (max(room, 0) + sum(each.held for each in active)) // len(active))
        return held > even and any(
            each.is_waiting and each.held < even for each in active if each is not share
        )

    def _look(self, allowed: int) -> int:
        """How many files may still be opened, without the reserve."""
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_EVERY_S or self._begun_since > max(self._free, 0) // 2:
            self._looked_at = now
            # What is being opened may have its file already: counted twice for a moment, never forgotten.
            self._free = allowed - _num_open(allowed) - self._opening
            self._begun_since = 0
        return self._free - self._begun_since


def _num_open(allowed: int) -> int:
    """How many files this process has open."""
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError as error:
            if error.errno == errno.EMFILE:
                return allowed
    # Not to be known here: a quarter is left to the rest of the process.
    return allowed // 4


_process = _Process()


def _start_anew() -> None:
    """A forked child has none of its parent's threads, and must not wait for a lock that one of them held."""
    global _process
    _process = _Process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
