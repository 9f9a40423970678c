"""Benchmark of the sidecar's rollout encodings: time, and size compared with the rollouts' entropy.

The benchmark draws random rollouts. Each token's distribution is a softmax over the whole vocabulary. Token
frequencies follow Zipf's law. The candidate sets are exact top-p sets. The low bits of the float32 log-probs
look random, so no encoding can compress them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.harness.paired_timing import compare, compare_counts
from sglang_topp import CandidateSets, formats
from sglang_topp_client import Rollout
from sglang_topp_client.wire.records import from_frame, from_record, to_frame, to_record

__all__ = ["run"]

POSITIONS, VOCAB, AT_ONCE = 2048, 151_936, 64
BASE64, LISTS, BINARY = "base64 in JSON", "JSON lists", "binary"
ZSTD_LEVEL_3, ENTROPY = "binary, Zstandard level 3", "entropy"
# Each key is an approximate mean set size. Each value holds the arguments of `_rollout` (the sharpness and
# the threshold p) that give this mean size.
SHAPES = {2: (1.5, 0.9), 8: (1.135, 0.95), 64: (0.9, 0.95)}
TARGET_SHARE = 0.6


def run() -> None:
    for sharpness, p in SHAPES.values():
        rollout = _rollout(sharpness, p)
        sets = rollout.candidates
        assert sets is not None
        line, listed, frame = _json(rollout), _json_lists(rollout), to_frame(rollout)
        content = zstandard.decompress(frame)
        decode_frame = partial(from_frame, Rollout, frame, max_bytes=len(content))
        assert decode_frame().candidates == sets == from_record(Rollout, json.loads(line)).candidates
        title = f"{len(sets)} sets, mean {sets.sizes.mean():.1f}, median {np.median(sets.sizes):.0f}"
        num_bytes = {
            BASE64: len(line),
            LISTS: len(listed),
            ENTROPY: _entropy(sets) / 8,
            ZSTD_LEVEL_3: len(zstandard.compress(content, 3)),
            BINARY: len(frame),
        }
        compare_counts(
            f"bytes of a sample: {title}",
            "bytes per token",
            {label: size / len(sets) for label, size in num_bytes.items()},
            target=1 / TARGET_SHARE,
            picture="rollout_encoding",
        )
        encode: dict[str, Callable[[], object]] = {
            BASE64: partial(_json, rollout),
            LISTS: partial(_json_lists, rollout),
            BINARY: partial(to_frame, rollout),
        }
        ids = rollout.output_ids.tolist()
        decode: dict[str, Callable[[], object]] = {
            BASE64: lambda line=line: from_record(Rollout, json.loads(line)),
            LISTS: lambda raw=listed, ids=ids: formats.decode_top_p(json.loads(raw), ids),
            BINARY: decode_frame,
        }
        compare(f"encode: {title}", encode, rounds=15, warmup=2)
        compare(f"decode and check: {title}", decode, rounds=15, warmup=2)
        both: dict[str, Callable[[], object]] = {
            label: lambda label=label, e=encode, d=decode: (e[label](), d[label]())
            for label in (BASE64, BINARY)
        }
        compare(
            f"encode + decode: {title}",
            both,
            rounds=15,
            warmup=2,
            target=1.0,
            picture="rollout_encoding_speed",
        )


def _entropy(sets: CandidateSets) -> float:
    """Return the sets' entropy in bits, as if sizes, ids, log-probs, and sampled tokens were independent.

    The estimate splits an id into a power of two and an offset, and a log-prob into an exponent and the 23
    lower bits. The estimate counts all bits of the offset and all 23 lower bits, as if these bits were
    random. The estimate counts no bits for the order within a set, because sets are sorted by log-prob, then
    id.
    """
    power = np.floor(np.log2(sets.token_ids + 1.0))
    exponents = sets.logprobs.view(np.uint32) >> 23
    ids = len(power) * _bits(power) + power.sum()
    logprobs = len(exponents) * (_bits(exponents) + 23)
    order = sum(math.lgamma(size + 1) for size in sets.sizes.tolist()) / math.log(2)
    sampled = -(sets.sampled_logprobs - sets.log_kept_mass).sum() / math.log(2)
    return float(ids + logprobs - order + len(sets) * _bits(sets.sizes) + sampled)


def _bits(values: NDArray[Any]) -> float:
    """Return the entropy of the values, in bits per value."""
    share = np.unique(values, return_counts=True)[1] / len(values)
    return float(-(share * np.log2(share)).sum())


def _json(rollout: Rollout) -> bytes:
    return msgspec.json.encode(to_record(rollout))


def _json_lists(rollout: Rollout) -> bytes:
    """Encode a rollout's candidate sets as the JSON lists that SGLang returns."""
    assert rollout.candidates is not None
    ids, logprobs = rollout.candidates.to_lists()
    assert logprobs is not None
    rows = [
        [[logprob, token, None] for logprob, token in zip(*row, strict=True)]
        for row in zip(logprobs, ids, strict=True)
    ]
    sampled = zip(rollout.logprobs.tolist(), rollout.output_ids.tolist(), strict=True)
    lists = {"output_top_p_logprobs": rows, "output_token_logprobs": [[*one, None] for one in sampled]}
    return json.dumps(lists, separators=(",", ":")).encode()


def _rollout(sharpness: float, p: float) -> Rollout:
    """Return a random rollout with top-p sets at `p`. A larger `sharpness` makes the sets smaller."""
    rng = np.random.default_rng(0)
    by_rank = -np.log(np.arange(VOCAB) + 2.7).astype(np.float32)
    ids: list[NDArray[np.int32]] = []
    logprobs: list[NDArray[np.float32]] = []
    for _ in range(POSITIONS // AT_ONCE):
        logits = 2 * rng.standard_normal((AT_ONCE, VOCAB), dtype=np.float32) + by_rank
        logits *= np.exp(rng.normal(sharpness, 0.25, (AT_ONCE, 1))).astype(np.float32)
        logits -= logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        for row in logits:
            likely = np.flatnonzero(row > -14)
            likely = likely[np.lexsort((likely, -row[likely]))]
            mass = np.exp(row[likely], dtype=np.float64).cumsum()
            kept = likely[: int((mass < p).sum()) + 1]
            ids.append(kept.astype(np.int32))
            logprobs.append(row[kept])
    offsets = np.cumsum([0, *map(len, ids)])
    sampled = []
    for row_ids, row in zip(ids, logprobs, strict=True):
        weights = np.exp(row, dtype=np.float64)
        sampled.append(rng.choice(row_ids, p=weights / weights.sum()))
    sets = CandidateSets(np.concatenate(ids), np.concatenate(logprobs), offsets, sampled)
    return Rollout(
        prompt_index=0,
        sample_index=0,
        request_id="0",
        prompt_ids=np.zeros(1, np.int32),
        output_ids=sets.sampled_ids,
        text="",
        logprobs=sets.sampled_logprobs,
        candidates=sets,
        finish_reason="length",
        weight_version="0",
        cached_tokens=0,
        latency_s=0.0,
        top_logprobs_source="distribution",
    )
