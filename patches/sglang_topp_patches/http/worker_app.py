"""Provide SGLang's HTTP workers with an application in which the plugin is installed.

If `--tokenizer-worker-num` is above 1, SGLang spawns HTTP workers, which do not load plugins. Each worker
imports the application that the environment variable `SGLANG_HTTP_SERVER_APP_PATH` names. In the process that
launches the workers, `install` saves the variable's value, and then sets the variable to the path of this
module's `app`. When a worker imports `app`, this module's `__getattr__` loads the plugins, and returns the
application that the saved value names.
"""

from __future__ import annotations

import os
import pkgutil
from typing import Any

__all__ = ["install"]

_PATH = "SGLANG_HTTP_SERVER_APP_PATH"
_ORIGINAL = "SGLANG_TOPP_HTTP_SERVER_APP_PATH"
_DEFAULT = "sglang.srt.entrypoints.http_server:app"


def install() -> None:
    """Make HTTP workers import `app` from this module instead of the application that the user configured."""
    ours = f"{__name__}:app"
    configured = os.environ.get(_PATH, _DEFAULT)
    if configured != ours:
        os.environ[_ORIGINAL] = configured
        os.environ[_PATH] = ours


def __getattr__(name: str) -> Any:
    """Load the plugins, and return `app` for a worker.

    Importing this module does not load the plugins, because the process that launches the workers also
    imports the module.
    """
    if name != "app":
        raise AttributeError(name)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return pkgutil.resolve_name(os.environ.get(_ORIGINAL, _DEFAULT))
