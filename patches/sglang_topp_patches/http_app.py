"""The application that SGLang's HTTP workers import, with the patch set in place.

With `--tokenizer-worker-num` above 1 SGLang spawns workers that load no plugins; what they do is import
their application by name (`SGLANG_HTTP_SERVER_APP_PATH`). `plugin.register`, which runs in the launcher,
has them import this module: it loads the plugins as SGLang does elsewhere, and hands out the application
that they would have imported.
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
    """Have HTTP workers import this module instead of the application that is configured."""
    ours = f"{__name__}:app"
    configured = os.environ.get(_PATH, _DEFAULT)
    if configured != ours:
        os.environ[_ORIGINAL] = configured
        os.environ[_PATH] = ours


def __getattr__(name: str) -> Any:
    """`app`, when a worker asks for it: the launcher imports this module too, and must not start over."""
    if name != "app":
        raise AttributeError(name)
    from sglang.srt.plugins import load_plugins

    from sglang_topp_patches import routes

    load_plugins()
    application = pkgutil.resolve_name(os.environ.get(_ORIGINAL, _DEFAULT))
    routes.guard(application)
    return application
