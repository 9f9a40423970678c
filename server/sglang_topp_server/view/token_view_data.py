"""Encode one rollout's tokens for the page of `sglang-topp view`.

The page decodes a rollout only when the user views this rollout. An encoded rollout is a gzip stream of three
parts: the length of a JSON header (uint32), the JSON header, and arrays. Each array is aligned to four bytes.
All numbers are little-endian. The header's field `arrays` lists the `[name, dtype, length]` of each array.

For each candidate set, the arrays hold the first `MAX_LISTED` candidates, the sampled token, and the size and
the kept mass (the total probability) of the whole set.
"""

from __future__ import annotations

import gzip
import json
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp_client import Rollout, ScoredRollout
from sglang_topp_server.view.token_metrics import TokenMetrics, token_metrics

__all__ = ["MAX_LISTED", "encode_detail", "ids_of_detail", "listed_candidates"]

MAX_LISTED = 48
MAX_PROMPT_TOKENS = 1024
_DTYPES = {"i": "int32", "f": "float32"}


def encode_detail(scored: ScoredRollout) -> bytes:
    """Encode one rollout in the format that the module's docstring describes."""
    rollout, metrics = scored.rollout, token_metrics(scored)
    arrays = _arrays(rollout, metrics)
    header = {
        "text": rollout.text,
        "request_id": rollout.request_id,
        "prompt_tokens": len(rollout.prompt_ids),
        "source": rollout.top_logprobs_source,
        "p": rollout.top_logprobs_p,
        "sampling_params": None if rollout.sampling_params is None else dict(rollout.sampling_params),
        "latency_s": rollout.latency_s,
        "cached_tokens": rollout.cached_tokens,
        "appended": [list(span) for span in rollout.appended_spans],
        "weights": None if rollout.weight_spans is None else [list(span) for span in rollout.weight_spans],
        "arrays": [[name, _DTYPES[array.dtype.kind], len(array)] for name, array in arrays.items()],
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 4)
    body = b"".join(array.tobytes() for array in arrays.values())
    return gzip.compress(struct.pack("<I", len(head)) + head + body, compresslevel=6, mtime=0)


def _arrays(rollout: Rollout, metrics: TokenMetrics) -> dict[str, NDArray[Any]]:
    arrays: dict[str, Any] = {
        "prompt_ids": rollout.prompt_ids[-MAX_PROMPT_TOKENS:],
        "ids": rollout.output_ids,
        "logprobs": rollout.logprobs,
        "sizes": metrics.sizes,
        "mass": metrics.mass,
        "entropy": metrics.entropy,
    }
    for name, values in (("ratio", metrics.log_ratio), ("replayed", metrics.log_replayed_ratio)):
        if not np.isnan(values).all():
            arrays[name] = values
    if (sets := rollout.candidates) is not None:
        kept = listed_candidates(rollout)
        ends = np.concatenate([[0], np.cumsum(kept)])[sets.offsets]
        arrays["listed"] = np.diff(ends)
        arrays["candidates"] = sets.token_ids[kept]
        if sets.has_logprobs:
            arrays["candidate_logprobs"] = sets.logprobs[kept]
    return {
        name: np.ascontiguousarray(array, "<i4" if array.dtype.kind in "iu" else "<f4")
        for name, array in arrays.items()
    }


def listed_candidates(rollout: Rollout) -> NDArray[np.bool_]:
    """Return bool [n]: for each of the n candidates of a rollout, whether the page lists the candidate."""
    sets = rollout.candidates
    assert sets is not None
    ranks = np.arange(len(sets.token_ids)) - np.repeat(sets.offsets[:-1], sets.sizes)
    is_sampled = sets.token_ids == np.repeat(sets.sampled_ids, sets.sizes)
    is_listed: NDArray[np.bool_] = (ranks < MAX_LISTED) | is_sampled
    return is_listed


def ids_of_detail(rollout: Rollout) -> NDArray[np.int32]:
    """Return the distinct token ids that `encode_detail` writes, int32."""
    parts = [rollout.prompt_ids[-MAX_PROMPT_TOKENS:], rollout.output_ids]
    if rollout.candidates is not None:
        parts.append(rollout.candidates.token_ids[listed_candidates(rollout)])
    return np.unique(np.concatenate(parts))
