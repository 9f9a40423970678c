"""Run SGLang with an API key from the environment, so that the process list does not show the key.

    python -m sglang_topp_server.process.sglang_with_env_key ARGUMENTS

First, check that the machine has a device for SGLang, which would otherwise fail late, with a traceback.

SGLang takes its API key as a command-line argument, which every user of the machine can see in the process
list. Only root and the owner of a process can read the environment of the process. This module reads the key
from the environment, and adds the key to `sys.argv` inside the running process. The process list does not
show changes to `sys.argv`.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from importlib.metadata import entry_points

KEY_VARIABLE = "SGLANG_TOPP_ENGINE_API_KEY"
_MODULE = "sglang.launch_server"
_CPU_PLATFORM = "sglang_topp_cpu"


def main() -> None:
    """Run SGLang in this process until SGLang ends, like `python -m sglang.launch_server`."""
    _check_device()
    if key := os.environ.get(KEY_VARIABLE):
        sys.argv += ["--api-key", key]
        _keep_out_of_the_log(key)
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)


def _check_device() -> None:
    """Exit with a message if SGLang would find no accelerator and no platform was chosen."""
    if os.environ.get("SGLANG_PLATFORM") or os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return
    if any(one.name != _CPU_PLATFORM for one in entry_points(group="sglang.srt.platforms")):
        return
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "cpu":
        sys.exit(
            "sglang-topp: error: SGLang finds no accelerator on this machine; to serve on the CPU, slowly,"
            f" set SGLANG_PLATFORM={_CPU_PLATFORM}"
        )


def _keep_out_of_the_log(key: str) -> None:
    """Mask the key in log records, because SGLang logs its arguments at startup."""
    make = logging.getLogRecordFactory()

    def make_without(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if repr(key) in (message := record.getMessage()):
            record.msg, record.args = message.replace(repr(key), "'***'"), None
        return record

    logging.setLogRecordFactory(make_without)


if __name__ == "__main__":
    main()
