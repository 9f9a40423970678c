"""Join the candidate sets and top-k log-probs of consecutive stream chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pybase64

from sglang_topp.formats.field_parsing import b64bytes
from sglang_topp.formats.sglang_top_k_logprobs import merge_top_k

__all__ = ["merge_stream_chunks"]


def merge_stream_chunks(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the output fields of consecutive stream chunks into the fields of one chunk.

    Args:
        parts: the `meta_info` of each chunk, in stream order. Each chunk's `meta_info` holds only the
            positions since the previous chunk.

    Returns:
        The joined `meta_info` fields: candidate sets in base64 or list form, and top-k log-probs as
        `encode_top_k` writes them. If any chunk lacks a field, the result lacks that field too, and the
        decoder then reports an incomplete answer.
    """
    sets = "output_top_p_logprobs"
    shared = {key for key in parts[0] if all(key in part for part in parts)}
    merged: dict[str, Any] = {}
    for key in shared.intersection((sets, f"{sets}_lengths")):
        merged[key] = list(chain.from_iterable(part[key] for part in parts))
    for key in shared.intersection((f"{sets}_val_base64", f"{sets}_idx_base64")):
        raw = b"".join(b64bytes(key, part[key]) for part in parts)
        merged[key] = pybase64.b64encode(raw).decode("ascii")
    if "output_top_logprobs_none_positions" in shared:
        merged |= merge_top_k(parts)
    return merged
