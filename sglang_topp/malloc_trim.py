"""Return freed memory to the operating system after a process has handled large candidate sets.

glibc keeps freed blocks for later allocations, so a process stays large after it has freed large sets. A
process that handles large sets needs both parts of this module:

- `return_large_blocks_at_once` sets `M_MMAP_THRESHOLD`, so that glibc returns each block of 1 MiB or more to
  the OS when the block is freed. A sidecar that streamed 16 samples of 200,000 candidates grew by 28 MiB with
  `M_MMAP_THRESHOLD` set, and by 55 to 75 MiB without it.
- `HeapTrimmer` calls `malloc_trim` in a background thread, to return smaller freed blocks to the OS. In one
  measurement, a process started at 33 MiB and then handled answers of 0.4 MB each. Afterwards, the process
  held 122 MiB with only `M_MMAP_THRESHOLD` set, and 34 MiB with both `M_MMAP_THRESHOLD` and `malloc_trim`.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time

LARGE_BYTES = 1 << 24
"""`malloc_trim` is worth its cost only after the process has freed this many bytes of candidate sets."""

_M_MMAP_THRESHOLD = -3

# Trim the heap several times, because SGLang's event loops keep their last message alive until the next
# message arrives.
_DELAYS_S = (1.0, 4.0, 25.0)


def return_large_blocks_at_once() -> None:
    """Make glibc return every freed block of 1 MiB or more to the OS immediately, in the whole process.

    By default, glibc immediately returns freed blocks of 128 KiB or more. glibc raises this minimum size, up
    to 32 MiB, each time the process frees a larger block. On systems without glibc,
    `return_large_blocks_at_once` does nothing.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


class HeapTrimmer:
    """Heap trimmer that runs `malloc_trim` in a background thread. One trimmer serves the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The number of `trim_soon` calls since the trim thread started, or 0 while no trim thread runs.
        self._requests = 0

    def trim_soon(self) -> None:
        """Trim the heap three times in a background thread: 1, 5, and 30 seconds from now.

        If `trim_soon` is called again before the third trim, the background thread repeats all three trims
        afterwards. On systems without glibc, the thread does nothing.
        """
        with self._lock:
            self._requests += 1
            if self._requests > 1:
                return
        threading.Thread(target=self._trim, name="sglang-topp-trim", daemon=True).start()

    def _trim(self) -> None:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
        while True:
            begun = self._requests
            for delay_s in _DELAYS_S:
                time.sleep(delay_s)
                if trim is not None:
                    trim(0)
            with self._lock:
                if self._requests == begun:
                    self._requests = 0
                    return
