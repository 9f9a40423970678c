"""`python -m sglang_topp_server.start_sglang ARGUMENTS`: SGLang, with its key from the environment.

SGLang takes its key as an argument, and every user of a machine reads every process's arguments in its
list of processes. The environment of a process is its owner's alone. So the key comes in there, and joins
the arguments inside of the process, where the list does not show them.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys

__all__ = ["KEY_VARIABLE", "main"]

KEY_VARIABLE = "SGLANG_TOPP_ENGINE_API_KEY"
_MODULE = "sglang.launch_server"


def main() -> None:
    """Run SGLang in this process as `python -m sglang.launch_server` would; returns when it ends."""
    if key := os.environ.get(KEY_VARIABLE):
        sys.argv += ["--api-key", key]
        _keep_out_of_the_log(key)
    runpy.run_module(_MODULE, run_name="__main__", alter_sys=True)


def _keep_out_of_the_log(key: str) -> None:
    """SGLang logs its arguments when it starts, this one among them."""
    make = logging.getLogRecordFactory()

    def make_without(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        if repr(key) in (message := record.getMessage()):
            record.msg, record.args = message.replace(repr(key), "'***'"), None
        return record

    logging.setLogRecordFactory(make_without)


if __name__ == "__main__":
    main()
