"""What large sets took goes back to the system.

glibc keeps what is freed in blocks of less than 32 MiB: after a gigabyte of sets each process on their way
stayed a gigabyte larger. It is asked to give back, from a thread of its own, once the sets are gone.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

__all__ = ["LARGE_BYTES", "trim_after_batch", "trim_soon"]

LARGE_BYTES = 1 << 24
"""Sets that take less than this leave nothing worth asking for."""

_DELAY_S = 1.0

_lock = threading.Lock()
_is_planned = False


def trim_soon() -> None:
    """Have free memory given back in a second, once for all who ask until then."""
    global _is_planned
    with _lock:
        if _is_planned:
            return
        _is_planned = True
    timer = threading.Timer(_DELAY_S, _trim)
    timer.daemon = True
    timer.start()


def trim_after_batch(result: Any, self: Any, recv_obj: Any) -> None:
    """AFTER hook on `DetokenizerManager.handle_batch_token_id_out`: what passes through leaves a hole."""
    if len(getattr(recv_obj.customized_info, "data", b"")) >= LARGE_BYTES:
        trim_soon()


def _trim() -> None:
    global _is_planned
    with _lock:
        _is_planned = False
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
