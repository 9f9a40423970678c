"""The candidate sets that a prefill server hands over: those of a request's prompt and of its first token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from sglang_topp.errors import WireError
from sglang_topp_patches.scheduler_messages import FIELDS, KEY, SOURCE, THRESHOLD, Entry, PackedSet, join

__all__ = ["FirstToken", "differing_names", "first_token_inputs"]

_FIELD = "the first token's set"
_LINE_END = b"\n"


@dataclass(frozen=True)
class FirstToken:
    """A request's first token, the candidate set of the first token, and the candidate sets of the prompt.

    Attributes:
        token_id: the id of the first token.
        inputs: the inputs of the prefill server's request, as `first_token_inputs` returns them.
        entry: the first token's candidate set, or the reason why the set is missing.
        prompt: a tuple that begins with None, and then has one candidate set for each prompt position with a
            log-prob. The tuple is empty if there are no prompt sets.
    """

    token_id: int
    inputs: Mapping[str, str]
    entry: Entry
    prompt: tuple[PackedSet | None, ...] = ()

    @property
    def num_candidates(self) -> int:
        """The total number of candidates in the first generated token's set and the prompt's sets."""
        return sum(len(each[0]) // 4 for each in (self.entry.candidates, *self.prompt) if each)

    def to_bytes(self) -> bytes:
        """Return one JSON line, then all candidates' token ids (int32), then all log-probs (float32).

        The token ids and log-probs are little-endian. Only `from_bytes` of the same package version can read
        the result.
        """
        positions = join((self.entry.candidates, *self.prompt))
        head = {
            "version": version("sglang-topp"),
            "token_id": self.token_id,
            "inputs": dict(self.inputs),
            "problem": self.entry.problem,
            "status": int(self.entry.status),
            "weight_version": self.entry.weight_version,
            "lengths": positions.lengths,
        }
        parts = (
            json.dumps(head).encode(),
            _LINE_END,
            _little_endian(positions.token_ids),
            _little_endian(positions.logprobs),
        )
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, body: bytes) -> FirstToken:
        """Decode the bytes that `to_bytes` returned.

        Raises:
            WireError: another version of this package wrote the bytes, or the bytes are incomplete.
        """
        line, _, arrays = body.partition(_LINE_END)
        try:
            head: dict[str, Any] = json.loads(line)
            theirs, lengths = head["version"], np.array(head["lengths"], np.int64)
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(_FIELD, f"got {body[:60]!r}, expected a line of JSON") from error
        if theirs != version("sglang-topp"):
            ours = version("sglang-topp")
            raise WireError(
                _FIELD, f"the prefill server has sglang-topp {theirs}, this one {ours}; expected the same"
            )
        total = int(lengths.clip(min=0).sum())
        if len(arrays) != 8 * total:
            raise WireError(_FIELD, f"got {len(arrays)} bytes of arrays, expected {8 * total}")
        ids = np.frombuffer(arrays, "<i4", total).astype(np.int32, copy=False)
        logprobs = np.frombuffer(arrays, "<f4", total, 4 * total).astype(np.float32, copy=False)
        ends = lengths.clip(min=0).cumsum()
        packed = [
            (ids[end - length : end].tobytes(), logprobs[end - length : end].tobytes())
            if length >= 0
            else None
            for length, end in zip(lengths.tolist(), ends.tolist(), strict=True)
        ]
        entry = Entry(packed[0], head["problem"], head["status"], head["weight_version"])
        return cls(head["token_id"], head["inputs"], entry, tuple(packed[1:]))


def _little_endian(values: np.ndarray[Any, Any]) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def first_token_inputs(obj: Any) -> dict[str, str]:
    """Return a dict of the inputs that determine the sets of a request's prompt and first token.

    The dict maps each input's name to its value as a string (for the prompt, a SHA-256 hash).
    The dict does not contain `max_new_tokens`, because a router may send different values to the prefill
    server and the decode server. The prefill server draws one token, whatever the value of `max_new_tokens`
    is.

    Args:
        obj: SGLang's `GenerateReqInput`.
    """
    sampling = {**(obj.sampling_params or {})}
    sampling.pop("max_new_tokens", None)
    if isinstance(custom := sampling.get("custom_params"), dict):
        # Remove the patch set's own fields from the copy of `custom_params`. Also remove `KEY`, which the
        # HTTP process adds. The fields `THRESHOLD` and `SOURCE` are instead entries of the returned dict
        # itself.
        others = {name: value for name, value in custom.items() if name not in (*FIELDS, KEY)}
        sampling["custom_params"] = others or None
    if sampling.get("custom_params") is None:
        sampling.pop("custom_params", None)
    prompt = obj.text if obj.input_ids is None else obj.input_ids
    get = vars(obj).get
    return {
        THRESHOLD: repr(float(get(THRESHOLD) or 0)),
        SOURCE: str(get(SOURCE)),
        "logprob_start_len": str(obj.logprob_start_len),
        "sampling_params": json.dumps(sampling, sort_keys=True, default=repr),
        "prompt": hashlib.sha256(repr(prompt).encode()).hexdigest(),
    }


def differing_names(left: Mapping[str, str], right: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sorted names of the inputs whose values differ."""
    return tuple(name for name in sorted({*left, *right}) if left.get(name) != right.get(name))
