"""Run SGLang so that SIGUSR2 makes each of its processes write down which modules of ours it enters.

usage: python -m tests.engine.launch_followed FILE [ARGUMENT ...]   ARGUMENT: one of `sglang.launch_server`

Each line that a process appends to FILE is the name of a module, when a call first enters it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from types import FrameType
from typing import Any


def follow(number: int, interrupted: FrameType | None) -> None:
    entered: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.split(".")[0].startswith("sglang_topp") and module not in entered:
            entered.add(module)
            os.write(_file, f"{module}\n".encode())

    sys.setprofile(note)


if __name__ == "__main__":
    _file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.set_inheritable(_file, True)
    signal.signal(signal.SIGUSR2, follow)
    sys.argv = ["fork_server", "launch", *sys.argv[2:]]
    runpy.run_module("tests.engine.fork_server", run_name="__main__")
