"""Packed records: rollouts as the sidecar's frames, both ways. What `record.py` writes as one JSON, in fewer
bytes: its arrays are not text.

A frame (`packed_frame.py`) of the kind b"TPCR", with these arrays::

    prompt_ids      int32 [P], P is the JSON's prompt_tokens
    output_ids      int32 [T], T is the JSON's completion_tokens
    logprobs        float32 [T]

and the sets of the output tokens.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_topp_client.packed_frame import FLOAT32, INT32, OpenFrame, PackedFrame
from sglang_topp_client.record import check_ids, count_of, rollout_of, to_record
from sglang_topp_client.rollout import Rollout

__all__ = ["MAGIC", "MEDIA_TYPE", "PackedRecord", "from_packed"]

MEDIA_TYPE = "application/vnd.sglang-topp.rollouts.v1"
"""Of an answer of frames (`messages.py`): packed records, and JSON objects for what is no sample. With the
parameter `logprob-bits=16`, the log-probs of candidate sets are rounded (`sglang_topp.compact.Packed`)."""

MAGIC = b"TPCR"
"""A packed record begins with it, and no JSON does."""

_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


class PackedRecord(PackedFrame):
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
        arrays = (
            rollout.prompt_ids.astype(INT32, copy=False),
            rollout.output_ids.astype(INT32, copy=False),
            rollout.logprobs.astype(FLOAT32, copy=False),
        )
        super().__init__(MAGIC, record, arrays, rollout.candidates, logprob_bits=logprob_bits)


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
    frame = OpenFrame(raw, MAGIC)
    record = frame.record
    num_prompt, num_output = count_of(record, "prompt_tokens"), count_of(record, "completion_tokens")
    frame.require(num_prompt + 2 * num_output, f"{num_prompt} and {num_output} tokens")
    prompt_ids, output_ids = frame.array(INT32, num_prompt), frame.array(INT32, num_output)
    logprobs = frame.array(FLOAT32, num_output)
    check_ids("prompt_ids", prompt_ids)
    check_ids("output_ids", output_ids)
    sets, off_by = frame.sets(output_ids, logprob_bits=logprob_bits)
    return rollout_of(
        record, prompt_ids, output_ids, logprobs, sets, off_by=off_by, may_be_extended=may_be_extended
    )
