"""What a sample costs between sidecar and client: bytes, beside the entropy of what they say, and time.

Distributions are softmaxes over the whole vocabulary, token ids as frequent as their ranks say (Zipf), and
the sets are those of a threshold. The float32 log-probs have no pattern in their low bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from benchmarks.harness import compare, compare_counts
from sglang_topp import CandidateSets
from sglang_topp_client import Rollout
from sglang_topp_client.packed_record import PackedRecord, from_packed
from sglang_topp_client.record import from_record
from sglang_topp_server.pieces import Record

__all__ = ["run"]

POSITIONS, VOCAB, AT_ONCE = 2048, 151_936, 64
BASE64, EXACT, ROUNDED = "base64 in JSON", "packed", "packed, 16-bit log-probs"
LISTS, ZSTD, ENTROPY = "JSON lists", "byte planes + zstd", "entropy"
# Sharpness and threshold that give sets of these sizes: mean about 2, 8 and 64.
SHAPES = {2: (1.5, 0.9), 8: (1.135, 0.95), 64: (0.9, 0.95)}
TARGET_SHARE = 0.6


def run() -> None:
    for sharpness, p in SHAPES.values():
        rollout = _rollout(sharpness, p)
        sets = rollout.candidates
        assert sets is not None
        line, frame = b"".join(Record(rollout)), b"".join(PackedRecord(rollout))
        rounded, listed = b"".join(PackedRecord(rollout, logprob_bits=16)), _listed(rollout)
        planes = _with_zstd(sets)
        assert from_packed(frame).candidates == sets == from_record(json.loads(line)).candidates
        title = f"{len(sets)} sets, mean {sets.sizes.mean():.1f}, median {np.median(sets.sizes):.0f}"
        num_bytes = {
            BASE64: len(line),
            LISTS: len(listed),
            ZSTD: len(planes) + 8 * len(sets),
            ENTROPY: _entropy(sets) / 8,
            ROUNDED: len(rounded),
            EXACT: len(frame),
        }
        compare_counts(
            f"bytes of a sample: {title}",
            "bytes per token",
            {label: size / len(sets) for label, size in num_bytes.items()},
            target=1 / TARGET_SHARE,
            picture="compact",
        )
        encode: dict[str, Callable[[], object]] = {
            BASE64: lambda rollout=rollout: b"".join(Record(rollout)),
            LISTS: partial(_listed, rollout),
            ZSTD: partial(_with_zstd, sets),
            ROUNDED: lambda rollout=rollout: b"".join(PackedRecord(rollout, logprob_bits=16)),
            EXACT: lambda rollout=rollout: b"".join(PackedRecord(rollout)),
        }
        ids = rollout.output_ids.tolist()
        decode: dict[str, Callable[[], object]] = {
            BASE64: lambda line=line: from_record(json.loads(line)),
            LISTS: lambda raw=listed, ids=ids: CandidateSets.from_meta_info(json.loads(raw), ids),
            ZSTD: partial(_without_zstd, planes, sets),
            ROUNDED: partial(from_packed, rounded, logprob_bits=16),
            EXACT: partial(from_packed, frame),
        }
        compare(f"encode: {title}", encode, rounds=15, warmup=2)
        compare(f"decode and check: {title}", decode, rounds=15, warmup=2)
        both: dict[str, Callable[[], object]] = {
            label: lambda label=label, e=encode, d=decode: (e[label](), d[label]())
            for label in (BASE64, EXACT)
        }
        compare(f"encode + decode: {title}", both, rounds=15, warmup=2, target=1.0, picture="compact_speed")


def _entropy(sets: CandidateSets) -> float:
    """Bits that sizes, ids, log-probs and which of them was sampled take at least, each by itself.

    An id is its power of two and its place within; a log-prob its exponent and 23 bits. A set is in order,
    and so says nothing by its order.
    """
    power = np.floor(np.log2(sets.token_ids + 1.0))
    exponents = sets.logprobs.view(np.uint32) >> 23
    ids = len(power) * _bits(power) + power.sum()
    logprobs = len(exponents) * (_bits(exponents) + 23)
    order = sum(math.lgamma(size + 1) for size in sets.sizes.tolist()) / math.log(2)
    sampled = -(sets.sampled_logprobs - sets.logprob_sum).sum() / math.log(2)
    return float(ids + logprobs - order + len(sets) * _bits(sets.sizes) + sampled)


def _bits(values: NDArray[Any]) -> float:
    share = np.unique(values, return_counts=True)[1] / len(values)
    return float(-(share * np.log2(share)).sum())


def _listed(rollout: Rollout) -> bytes:
    """As SGLang lists log-probs."""
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


def _with_zstd(sets: CandidateSets) -> bytes:
    """What an entropy coder makes of it: sizes, and every byte of ids and log-probs beside its like."""
    ids = sets.token_ids.view(np.uint8).reshape(-1, 4).T[:3]
    logprobs = sets.logprobs.view(np.uint8).reshape(-1, 4).T
    planes = np.concatenate([sets.sizes.astype(np.uint16).view(np.uint8), ids.ravel(), logprobs.ravel()])
    return zstandard.ZstdCompressor(1).compress(planes.data)


def _without_zstd(raw: bytes, sets: CandidateSets) -> CandidateSets:
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(raw), np.uint8)
    num_positions, n = len(sets), len(sets.token_ids)
    sizes = planes[: 2 * num_positions].view(np.uint16)
    ids = np.zeros((n, 4), np.uint8)
    ids[:, :3] = planes[2 * num_positions : 2 * num_positions + 3 * n].reshape(3, n).T
    logprobs = np.ascontiguousarray(planes[2 * num_positions + 3 * n :].reshape(4, n).T)
    offsets = np.concatenate([[0], sizes.cumsum(dtype=np.int64)])
    return CandidateSets(ids.view("<i4").ravel(), logprobs.view("<f4").ravel(), offsets, sets.sampled_ids)


def _rollout(sharpness: float, p: float) -> Rollout:
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
