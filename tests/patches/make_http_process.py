"""Make the state of an HTTP process as `plugin.register` does, with room for some candidates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sglang_topp_patches.http.process_state import HttpProcess
from sglang_topp_patches.memory import InFlight

__all__ = ["http_process"]


def http_process(limit: int = 1 << 20, **server_args: Any) -> HttpProcess:
    """Return the state of an HTTP process that has not served anything."""
    return HttpProcess(InFlight(limit), SimpleNamespace(**server_args) if server_args else None)
