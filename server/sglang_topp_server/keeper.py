"""The process between `sglang-topp serve` and the engine, which leaves nothing of the engine behind.

    python -m sglang_topp_server.keeper <grace_s> <command> ...

SGLang is a tree of processes. `serve` can end them all as long as it lives; killed with SIGKILL, it ends
nothing. So the engine is the child of this small process, which outlives `serve` by design: it reads a
pipe whose write end only `serve` holds. A byte there means stop; end-of-file without one means that
`serve` was killed, and then too.

To stop: SIGTERM to the engine's first process (SGLang then drains and takes its children down itself);
after `grace_s` seconds, or once that process has gone, SIGKILL to whatever it left. Where `serve` was
killed, a second is the most: nobody waits for an orderly end, and who asked the engine itself must not
wait for an answer that does not come. A SIGTERM to the keeper skips the grace. The keeper's exit status is
the engine's, and it comes when all of them are gone.
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
    """Run the command until it ends, or until standard input says to stop: a byte, or its end.

    Args:
        argv: the grace in seconds, then the command; None reads the process's own.

    Returns:
        The command's exit status; 128 + the signal's number where a signal ended it; 127 where it
        could not be started.
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
            # Should the keeper itself be killed, the engine's first process goes too; SGLang's children
            # ask the kernel for the same.
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
    """Return when the engine's first process has ended, or its time to do so is over."""
    watched = [pipe, woken]
    deadline = None
    # WNOWAIT leaves the zombie, and with it the number of its process group, until the group was killed.
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
    """Kill and reap what the engine left, in whichever session it is: as the subreaper, the keeper has
    become its parent. Linux only; elsewhere the process group was all that could be reached."""
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
