"""Binary codec of rollouts: one Zstandard frame (`binary_frame.py`) holds a rollout's JSON and arrays.

The frame's JSON has the fields that `rollout_json.py` lists, except for the arrays. The arrays follow::

    prompt_ids          int32 [P], P is the JSON's prompt_tokens
    output_ids          int32 [T], T is the JSON's completion_tokens
    logprobs            float32 [T]
    the candidate sets  as `binary_frame.py` encodes them
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_topp_client.codecs.binary_frame import FrameReader, encode_frame
from sglang_topp_client.codecs.json_fields import check_ids, read_count
from sglang_topp_client.codecs.rollout_json import build_rollout, rollout_to_json
from sglang_topp_client.types.rollout import Rollout

__all__ = ["MEDIA_TYPE", "rollout_from_bytes", "rollout_to_bytes"]

MEDIA_TYPE = "application/vnd.sglang-topp.rollouts.v1"
"""The media type of an answer whose messages begin with their length (`framing.py`).

Each message holds a rollout as a Zstandard frame, or a JSON object.
"""

_NO_IDS, _NO_LOGPROBS = np.empty(0, np.int32), np.empty(0, np.float32)


def rollout_to_bytes(rollout: Rollout) -> bytes:
    """Encode one finished sample as a frame."""
    bare = replace(rollout, prompt_ids=_NO_IDS, output_ids=_NO_IDS, logprobs=_NO_LOGPROBS, candidates=None)
    record = rollout_to_json(bare) | {
        "prompt_tokens": len(rollout.prompt_ids),
        "completion_tokens": len(rollout.output_ids),
    }
    for name in ("prompt_ids", "output_ids", "logprobs", "candidates"):
        del record[name]
    arrays = (rollout.prompt_ids, rollout.output_ids, rollout.logprobs)
    return encode_frame(record, arrays, rollout.candidates)


def rollout_from_bytes(raw: bytes, *, max_bytes: int) -> Rollout:
    """Decode a frame that `rollout_to_bytes` encoded. Unknown fields in the frame's JSON are ignored.

    Args:
        raw: one frame.
        max_bytes: the maximum length of the decompressed content.

    Raises:
        WireError: the frame was cut or altered, is too long, or does not hold a valid sample; the error names
            the field.
    """
    frame = FrameReader(raw, max_bytes=max_bytes)
    num_prompt, num_output = (
        read_count(frame.record, name) for name in ("prompt_tokens", "completion_tokens")
    )
    prompt_ids = frame.int32(num_prompt, f"{num_prompt} prompt_ids")
    output_ids = frame.int32(num_output, f"{num_output} output_ids")
    logprobs = frame.float32(num_output, f"{num_output} logprobs")
    check_ids("prompt_ids", prompt_ids)
    check_ids("output_ids", output_ids)
    return build_rollout(frame.record, prompt_ids, output_ids, logprobs, frame.sets(output_ids))
