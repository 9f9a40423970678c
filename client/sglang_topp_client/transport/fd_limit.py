"""File-descriptor limit: how many connections a client may open, and the error if no descriptor is left.

Every connection takes one file descriptor. The soft limit on open descriptors (`ulimit -n`, RLIMIT_NOFILE) is
often 1,024, and 256 on macOS. The client does not raise the soft limit, because other code in the process may
call `select`, which fails on descriptors of 1,024 and above.
"""

from __future__ import annotations

import errno
import os

from sglang_topp.errors import TransportError

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]  # a module, or none

# The number of descriptors to keep free for files that the process opens later, and for attempts to connect.
# One attempt to connect may take several descriptors: resolving the host name opens files and sockets, and
# the client may try two addresses at once.
_RESERVE = 64


class FileLimitError(TransportError):
    """Raised if a connection fails to open because the process or the machine has no free file descriptor."""


def max_connections(wanted: int) -> int:
    """Return how many connections a client may have open at once.

    The returned number is `wanted` or the number of free descriptors, whichever is smaller. The number of
    free descriptors is the process's limit on open files, minus the number of files open now, minus a
    reserve. The reserve is 64 files or an eighth of the limit, whichever is smaller. The returned number is
    at least 1, so that a client without a free descriptor raises an error, and does not wait forever.
    """
    limit = _limit()
    if limit is None:
        return wanted
    return max(1, min(wanted, limit - _num_open() - min(_RESERVE, limit // 8)))


def shortage(error: BaseException) -> str | None:
    """Return a sentence that names a remedy if `error` comes from a lack of file descriptors.

    Return None if `error` has another cause.
    """
    codes = _error_numbers(error, set())
    if errno.ENFILE in codes:
        return "the machine has no file left for a connection (ENFILE, fs.file-max): close some, or raise it"
    if errno.EMFILE not in codes and not _is_none_left():
        return None
    return (
        f"no file is left for a connection: this process may have {_limit()} open (EMFILE); raise that with"
        " `ulimit -n 65536` before it starts or resource.setrlimit(resource.RLIMIT_NOFILE, ...) in it, or"
        " close files"
    )


def _limit() -> int | None:
    """Return the soft limit on open files, or None if there is no limit."""
    if resource is None:
        return None
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _num_open() -> int:
    """Return how many files this process has open, or 0 if the system cannot list them."""
    try:
        return len(os.listdir("/dev/fd"))
    except OSError:
        return 0


def _error_numbers(error: BaseException | None, seen: set[int]) -> set[int]:
    """Return the `errno` values of `error` and, recursively, of its cause, context, and group members."""
    if error is None or id(error) in seen:
        return set()
    seen.add(id(error))
    codes = {error.errno} if isinstance(error, OSError) and error.errno is not None else set()
    grouped = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for each in (error.__cause__, error.__context__, *grouped):
        codes |= _error_numbers(each, seen)
    return codes


def _is_none_left() -> bool:
    """Try to open a file, and return whether the process has no file descriptor left.

    The `errno` of an exception does not always show that no descriptor is left. For example, a host-name
    lookup without a free descriptor raises an error whose `errno` is not EMFILE.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno == errno.EMFILE
    return False
