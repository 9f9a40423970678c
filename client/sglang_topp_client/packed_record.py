"""Packed records: rollouts as the sidecar's frames, both ways. What `record.py` writes as one JSON, in fewer
bytes: its arrays are not text.

Numbers are little-endian, one part follows the other::

    offset  bytes      content
    0       4          b"TPCR"
    4       4          uint32 version: 1
    8       4          uint32 h
    12      h          the record's JSON, without prompt_ids, output_ids, logprobs and candidates
    …       4 P        prompt_ids, int32; P is the JSON's prompt_tokens
    …       4 T        output_ids, int32; T is the JSON's completion_tokens
    …       4 T        logprobs, float32
    …                  the candidate sets, as `sglang_topp.compact` packs them; nothing where there are none
    …       4          uint32, the CRC-32 of all that stands before
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp import compact
from sglang_topp.errors import WireError
from sglang_topp_client.record import check_ids, count_of, rollout_of, to_record
from sglang_topp_client.rollout import Rollout

__all__ = ["MAGIC", "MEDIA_TYPE", "PackedRecord", "from_packed"]

MEDIA_TYPE = "application/vnd.sglang-topp.rollouts.v1"
"""Of an answer of frames (`messages.py`): packed records, and JSON objects for what is no sample. With the
parameter `logprob-bits=16`, the log-probs of candidate sets are rounded (`sglang_topp.compact.Packed`)."""

MAGIC = b"TPCR"
"""A packed record begins with it, and no JSON does."""

_VERSION = 1
_HEADER = struct.Struct("<4sII")
_CRC = struct.Struct("<I")
_INT32, _FLOAT32 = np.dtype("<i4"), np.dtype("<f4")
_PART_BYTES = 1 << 16
_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


class PackedRecord:
    """The bytes of one finished sample, made as they are asked for; their number is known before.

    Args:
        rollout: the sample.
        logprob_bits: of the candidates' log-probs, 32 or 16: see `sglang_topp.compact.Packed`.
    """

    def __init__(self, rollout: Rollout, *, logprob_bits: int = 32) -> None:
        bare = replace(
            rollout, prompt_ids=_NO_IDS, output_ids=_NO_IDS, logprobs=_NO_LOGPROBS, candidates=None
        )
        record = to_record(bare) | {
            "prompt_tokens": len(rollout.prompt_ids),
            "completion_tokens": len(rollout.output_ids),
        }
        for name in ("prompt_ids", "output_ids", "logprobs", "candidates"):
            del record[name]
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
        self._head = _HEADER.pack(MAGIC, _VERSION, len(text)) + text
        self._arrays = (
            rollout.prompt_ids.astype(_INT32, copy=False),
            rollout.output_ids.astype(_INT32, copy=False),
            rollout.logprobs.astype(_FLOAT32, copy=False),
        )
        sets = rollout.candidates
        self._sets = None if sets is None else compact.Packed(sets, logprob_bits=logprob_bits)

    def __len__(self) -> int:
        """Bytes of the whole."""
        num_sets = 0 if self._sets is None else len(self._sets)
        return len(self._head) + sum(array.nbytes for array in self._arrays) + num_sets + _CRC.size

    def __iter__(self) -> Iterator[bytes]:
        """The bytes, in order, in parts of at most 64 KiB (but the JSON is one)."""
        crc = 0
        for part in self._parts():
            crc = zlib.crc32(part, crc)
            yield part
        yield _CRC.pack(crc)

    def _parts(self) -> Iterator[bytes]:
        yield self._head
        for array in self._arrays:
            for start in range(0, len(array), _PART_BYTES // 4):
                yield array[start : start + _PART_BYTES // 4].tobytes()
        if self._sets is not None:
            yield from self._sets


def from_packed(raw: bytes, *, logprob_bits: int = 32, may_be_extended: bool = False) -> Rollout:
    """The sample that `PackedRecord` wrote; unknown fields of its JSON are passed over.

    Args:
        raw: one frame.
        logprob_bits: what was asked for; where it is 32, rounded log-probs are an error.
        may_be_extended: as for `sglang_topp_client.record.from_record`.

    Raises:
        WireError: the frame was cut or altered, is of another version, or holds no valid sample; the field
            at fault is named.
    """
    if len(raw) < _HEADER.size + _CRC.size:
        raise WireError("frame", f"got {len(raw)} bytes, expected at least {_HEADER.size + _CRC.size}")
    magic, version, num_text = _HEADER.unpack_from(raw)
    if (magic, version) != (MAGIC, _VERSION):
        raise WireError("frame", f"got {magic!r} version {version}, expected {MAGIC!r} version {_VERSION}")
    body = memoryview(raw)[: -_CRC.size]
    crc, (expected,) = zlib.crc32(body), _CRC.unpack_from(raw, len(body))
    if crc != expected:
        raise WireError("frame", f"its CRC-32 is {crc:#010x}, expected {expected:#010x}: it was altered")
    at = _HEADER.size + num_text
    if at > len(body):
        raise WireError("frame", f"got {len(body)} bytes, expected {at} and more")
    try:
        record = json.loads(bytes(body[_HEADER.size : at]))
    except (ValueError, RecursionError) as error:
        raise WireError("frame", f"its JSON cannot be read: {error}") from None
    if not isinstance(record, dict):
        raise WireError("frame", f"its JSON is {type(record).__name__}, expected an object")
    num_prompt, num_output = count_of(record, "prompt_tokens"), count_of(record, "completion_tokens")
    if at + 4 * (num_prompt + 2 * num_output) > len(body):
        raise WireError(
            "frame", f"got {len(body)} bytes, too few for {num_prompt} and {num_output} tokens behind {at}"
        )

    def array(dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        nonlocal at
        start, at = at, at + 4 * count
        # Copied: aligned, and without the whole frame behind it.
        values = np.frombuffer(body, dtype, count, start).astype(dtype.newbyteorder("="))
        values.flags.writeable = False  # as what comes as JSON is
        return values

    prompt_ids, output_ids = array(_INT32, num_prompt), array(_INT32, num_output)
    logprobs = array(_FLOAT32, num_output)
    check_ids("prompt_ids", prompt_ids)
    check_ids("output_ids", output_ids)
    packed = body[at:]
    if not packed:
        return rollout_of(record, prompt_ids, output_ids, logprobs, None)
    step = compact.logprob_step(packed)
    if step is not None and logprob_bits != 16:
        raise WireError("candidates", "holds log-probs that are rounded to 16 bits, which nobody asked for")
    sets = compact.unpack(packed, output_ids)
    return rollout_of(
        record,
        prompt_ids,
        output_ids,
        logprobs,
        sets,
        off_by=(step or 0.0) / 2,
        may_be_extended=may_be_extended,
    )
