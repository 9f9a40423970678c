"""What large sets took goes back to the system.

glibc keeps what is freed in blocks of less than 32 MiB: after a gigabyte of sets each process on their way
stayed a gigabyte larger. It is asked to give back, from a thread of its own, once the sets are gone.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

__all__ = ["LARGE_BYTES", "trim_after_batch", "trim_soon"]

LARGE_BYTES = 1 << 24
"""Sets that take less than this leave nothing worth asking for."""

# SGLang's loops hold what they received last until there is something else.
_DELAYS_S = (1.0, 4.0, 25.0)

_lock = threading.Lock()
_generation = 0


def trim_soon() -> None:
    """Have free memory given back soon, and some times more; who asks again begins anew."""
    global _generation
    with _lock:
        _generation += 1
        if _generation > 1:
            return
    threading.Thread(target=_trim, name="sglang-topp-trim", daemon=True).start()


def trim_after_batch(result: Any, self: Any, recv_obj: Any) -> None:
    """AFTER hook on `DetokenizerManager.handle_batch_token_id_out`: what passes through leaves a hole."""
    if len(getattr(recv_obj.customized_info, "data", b"")) >= LARGE_BYTES:
        trim_soon()


def _trim() -> None:
    global _generation
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    while True:
        begun = _generation
        for delay_s in _DELAYS_S:
            time.sleep(delay_s)
            if trim is not None:
                trim(0)
        with _lock:
            if _generation == begun:
                _generation = 0
                return
