"""Return freed memory to the OS in SGLang's detokenizer process, after messages with large candidate sets."""

from __future__ import annotations

from typing import Any

from sglang_topp.malloc_trim import LARGE_BYTES, HeapTrimmer
from sglang_topp_patches.hooks import after

__all__ = ["trim_after_batch"]

_trimmer = HeapTrimmer()


@after("sglang.srt.managers.detokenizer_manager.DetokenizerManager.handle_batch_token_id_out", since="0.5.22")
def trim_after_batch(result: Any, self: Any, recv_obj: Any) -> None:
    """Trim this process's heap.

    SGLang's field `customized_info` holds the candidate sets. The hook trims the heap only if the message's
    `customized_info` has at least `LARGE_BYTES` bytes.
    """
    if len(getattr(recv_obj.customized_info, "data", b"")) >= LARGE_BYTES:
        _trimmer.trim_soon()
