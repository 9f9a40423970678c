"""Let SGLang fork its processes instead of spawning them. Each spawned process would import SGLang again.

A Python process with this folder on its PYTHONPATH runs this module when it starts. The module changes only
processes that run an SGLang server, so a test can put the folder on the PYTHONPATH of any command that starts
servers. A server on a GPU still spawns its processes, because CUDA does not survive a fork.
"""

import importlib
import multiprocessing
import os
import sys

_SERVERS = {"sglang.launch_server", "sglang_topp_server.process.sglang_with_env_key"}


def fork_instead_of_spawn() -> None:
    """Make `fork` the start method of this process, for good.

    uvicorn still spawns its HTTP workers: it has chosen its start method once it is imported.
    """
    importlib.import_module("uvicorn")
    multiprocessing.set_start_method("fork", force=True)
    fork = multiprocessing.get_context("fork")
    multiprocessing.set_start_method = lambda *args, **kwargs: None
    multiprocessing.get_context = lambda *args, **kwargs: fork


if os.environ.get("SGLANG_PLATFORM") == "sglang_topp_cpu" and not _SERVERS.isdisjoint(sys.orig_argv[1:3]):
    fork_instead_of_spawn()
