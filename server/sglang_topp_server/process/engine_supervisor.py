"""Engine supervisor: run SGLang, and end its processes when `sglang-topp serve` ends.

    python -m sglang_topp_server.process.engine_supervisor <grace_s> <command> ...

SGLang runs as several processes. If SIGKILL ends `serve`, then `serve` cannot stop the engine's processes.
Therefore, `serve` starts a small supervisor process, which starts the engine and outlives `serve`. The
supervisor reads a pipe, and only `serve` holds the pipe's write end. A byte on the pipe tells the supervisor
to stop the engine. End-of-file without a byte means that `serve` was killed.

To stop the engine, the supervisor sends SIGTERM to the engine's first process, which drains requests and ends
its children. Once the engine's first process has ended, or after `grace_s` seconds, the supervisor kills all
of the engine's remaining processes. If `serve` was killed, the grace period is at most one second. A SIGTERM
to the supervisor skips the grace period. After all of the engine's processes have ended, the supervisor exits
with the engine's exit status.
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

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORPHANED_GRACE_S = 1.0
_HURRY = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine, and stop the engine when standard input delivers a byte or is closed.

    Args:
        argv: the grace period in seconds, then the command that starts the engine. The default is
            `sys.argv[1:]`.

    Returns:
        The engine's exit status. If a signal ended the engine, the status is 128 + the signal's number. If
        the engine could not start, the status is 127.
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
            # PR_SET_PDEATHSIG makes the kernel kill the engine's first process if the supervisor is killed.
            # SGLang sets PR_SET_PDEATHSIG for its own child processes.
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
    """Wait until the engine's first process has ended, or until `main` must kill it.

    `main` must kill the engine's first process if the grace period has passed, or if the supervisor has
    received SIGTERM, SIGINT, or SIGHUP.
    """
    watched = [pipe, woken]
    deadline = None
    # WNOWAIT leaves the engine's first process as a zombie after its end, so the kernel cannot reuse the
    # process's id. If the system reused the id, `main` might kill an unrelated process group.
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
    """Kill and reap the engine's remaining processes, including those in other sessions (Linux only).

    On Linux, the supervisor is a subreaper, so the kernel makes the supervisor the parent of the engine's
    orphaned processes. On other systems, `main` kills only the engine's process group.
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
