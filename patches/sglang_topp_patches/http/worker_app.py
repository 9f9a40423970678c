"""Provide the application that SGLang's HTTP workers import, with the patch set installed.

If `--tokenizer-worker-num` is above 1, SGLang spawns HTTP workers that load no plugins. The workers import
their application by the name in `SGLANG_HTTP_SERVER_APP_PATH`. In the launcher, `plugin.register` points this
variable to the present module, which loads the plugins and returns the configured application.
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
    """Make HTTP workers import this module instead of the configured application."""
    ours = f"{__name__}:app"
    configured = os.environ.get(_PATH, _DEFAULT)
    if configured != ours:
        os.environ[_ORIGINAL] = configured
        os.environ[_PATH] = ours


def __getattr__(name: str) -> Any:
    """Return `app` for a worker.

    The application is made on demand, because the launcher imports this module too.
    """
    if name != "app":
        raise AttributeError(name)
    from sglang.srt.plugins import load_plugins

    from sglang_topp_patches.http import route_policy

    load_plugins()
    application = pkgutil.resolve_name(os.environ.get(_ORIGINAL, _DEFAULT))
    route_policy.guard(application)
    return application
