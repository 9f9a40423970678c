"""Engine supervisor: run the engine so that none of its processes outlives `sglang-topp serve`.

    python -m sglang_topp_server.process.engine_supervisor <grace_s> <command> ...

SGLang runs as a tree of processes, and `serve` cannot stop them if SIGKILL ends `serve`. So the engine is the
child of this small supervisor process, which outlives `serve` by design. The supervisor reads a pipe, and
only `serve` holds the pipe's write end. A byte on the pipe means stop. End-of-file without a byte means that
`serve` was killed.

To stop the engine, the supervisor sends SIGTERM to the engine's first process, which drains requests and ends
its children. After `grace_s` seconds, or once the first process has ended, the supervisor kills all remaining
processes. If `serve` was killed, the grace period is at most one second. A SIGTERM to the supervisor skips
the grace period. The supervisor exits with the engine's status, after all of the engine's processes have
ended.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORPHANED_GRACE_S = 1.0
_HURRY = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command until it ends. Stop it when standard input delivers a byte or is closed.

    Args:
        argv: the grace period in seconds, then the command; None uses the process's own arguments.

    Returns:
        The command's exit status; 128 + the signal's number if a signal ended it; 127 if it could not start.
    """
    grace_text, *command = sys.argv[1:] if argv is None else argv
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (*_HURRY, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        engine = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            # With this option, the kernel kills the engine's first process if the supervisor is killed.
            # SGLang's child processes set the same option.
            preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return 127
    _wait(engine.pid, sys.stdin.fileno(), woken, float(grace_text))
    with suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    status = engine.wait()
    _end_orphans()
    return status if status >= 0 else 128 - status


def _wait(engine_pid: int, pipe: int, woken: int, grace_s: float) -> None:
    """Return when the engine's first process has ended, or its grace period is over."""
    watched = [pipe, woken]
    deadline = None
    # WNOWAIT keeps the ended process as a zombie, so that the kernel does not reuse its process group's id
    # before the group is killed.
    while os.waitid(os.P_PID, engine_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return
        ready, _, _ = select.select(watched, [], [], left_s)
        if woken in ready and _HURRY.intersection(os.read(woken, 64)):
            return
        if pipe in ready:
            is_in_order = bool(os.read(pipe, 1))
            grace_s = grace_s if is_in_order else min(grace_s, _ORPHANED_GRACE_S)
            watched, deadline = [woken], time.monotonic() + grace_s
            os.kill(engine_pid, signal.SIGTERM)


def _end_orphans() -> None:
    """Kill and reap all processes that the engine left behind, in any session (Linux only).

    The supervisor is a subreaper, so the kernel has made it the parent of these processes. On other systems,
    only the engine's process group is killed.
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.exists() and (pids := children.read_text().split()):
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


if __name__ == "__main__":
    sys.exit(main())
