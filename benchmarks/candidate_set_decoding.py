"""Benchmark of decoding candidate sets with full validation, against a loop that validates nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.paired_timing import compare
from sglang_topp import CandidateSets, formats

__all__ = ["run"]

POSITIONS, VOCAB = 32_768, 151_936


def run() -> None:
    rng = np.random.default_rng(0)
    # The skewed set sizes imitate set sizes measured on a model at top_p 0.97: 46 % singletons, median 2,
    # mean about 8, p99 about 82.
    skewed = np.exp(rng.normal(0.85, 1.55, POSITIONS)).astype(np.int64)
    for title, sizes in (
        ("geometric", rng.geometric(1 / 8, POSITIONS)),
        ("skewed", np.clip(skewed, 1, 512)),
    ):
        sets = _sets(rng, sizes)
        fields = formats.encode_top_p("output", sets.token_ids, sets.logprobs, sets.sizes.tolist())
        meta_info, output_ids = json.loads(json.dumps(fields)), sets.sampled_ids.tolist()
        packed = formats.pack(sets)
        if formats.decode_top_p(meta_info, output_ids) != sets:
            raise AssertionError("the decoded sets are not those that were encoded")
        contenders: dict[str, Callable[[], object]] = {
            "loop over positions, nothing validated": partial(loop_decode, meta_info),
            "unpack (packed form)": partial(formats.unpack, packed),
            "from_meta_info": partial(formats.decode_top_p, meta_info, output_ids),
        }
        compare(
            f"decode {POSITIONS} positions, {title} sizes: mean {sizes.mean():.1f},"
            f" median {np.median(sizes):.0f}, p99 {np.quantile(sizes, 0.99):.0f},"
            f" singletons {(sizes == 1).mean():.0%}",
            contenders,
            rounds=30,
            warmup=3,
            picture="candidate_set_decoding",
        )


def loop_decode(meta_info: dict[str, Any]) -> list[tuple[list[int], list[float]]]:
    """Decode the sets with NumPy alone, and validate nothing."""
    logprobs = np.frombuffer(base64.b64decode(meta_info["output_top_p_logprobs_val_base64"]), "<f4")
    token_ids = np.frombuffer(base64.b64decode(meta_info["output_top_p_logprobs_idx_base64"]), "<i4")
    decoded = []
    start = 0
    for length in meta_info["output_top_p_logprobs_lengths"]:
        span = slice(start, start + length)
        decoded.append((token_ids[span].tolist(), logprobs[span].tolist()))
        start += length
    return decoded


def _sets(rng: np.random.Generator, sizes: NDArray[np.int64]) -> CandidateSets:
    """Return sets of the given sizes, with descending log-probs and a random member as the sampled token."""
    offsets = np.concatenate([[0], sizes.cumsum()])
    rows = np.repeat(np.arange(len(sizes)), sizes)
    rank = np.arange(len(rows)) - offsets[rows]
    # The ids of a set are 60,013 apart, modulo the vocabulary size. 60,013 and the vocabulary size are
    # coprime, so no id occurs twice in a set.
    token_ids = (rng.integers(0, VOCAB, len(sizes))[rows] + rank * 60_013) % VOCAB
    logprobs = (-0.1 - rank / 8).astype(np.float32)
    sampled = token_ids[offsets[:-1] + rng.integers(0, sizes)]
    return CandidateSets(token_ids, logprobs, offsets, sampled)
