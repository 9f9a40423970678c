"""The agent of `nixl_cu13`, with host memory in place of device memory.

SGLang registers its KV cache as device memory, even on a CPU, where the cache is in host memory.
"""

from __future__ import annotations

from typing import Any

from nixl_cu13._api import nixl_agent as _nixl_agent
from nixl_cu13._api import nixl_agent_config, nixl_thread_sync_t

__all__ = ["nixl_agent", "nixl_agent_config", "nixl_thread_sync_t"]


class nixl_agent(_nixl_agent):
    """An agent that treats device memory as host memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nixl_mems["VRAM"] = self.nixl_mems["DRAM"]
