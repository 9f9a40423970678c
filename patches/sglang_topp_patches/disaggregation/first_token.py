"""The candidate sets that a prefill server hands over: those of a request's prompt and of its first token."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from sglang_topp.errors import WireError
from sglang_topp_patches.request import SAMPLER, SOURCE, THRESHOLD, sets_request
from sglang_topp_patches.set_buffer import PackedSets, Problem, SetBuffer

__all__ = ["FirstToken", "differing_names", "first_token_inputs"]

_FIELD = "the first token's set"
_LINE_END = b"\n"


@dataclass(frozen=True)
class FirstToken:
    """A request's first token, the candidate set of the first token, and the candidate sets of the prompt.

    Attributes:
        token_id: the id of the first token.
        inputs: the inputs of the prefill server's request, as `first_token_inputs` returns them.
        sets: the first token's set and those of the prompt, or the problem why they are missing.
    """

    token_id: int
    inputs: Mapping[str, str]
    sets: SetBuffer

    def to_bytes(self) -> bytes:
        """Return one JSON line, then all candidates' token ids (int32), then all log-probs (float32).

        The token ids and log-probs are little-endian. Only `from_bytes` of the same package version can read
        the result.
        """
        sets, problem = self.sets, self.sets.problem
        head = {
            "version": version("sglang-topp"),
            "token_id": self.token_id,
            "inputs": dict(self.inputs),
            "problem": problem and [problem.text, int(problem.status)],
            "weight_version": sets.spans[0][0] if sets.spans else "",
            "prompt_version": sets.prompt_version,
            "sizes": [sets.generated.sizes.tolist(), sets.prompt.sizes.tolist()],
        }
        arrays = [sets.generated.ids, sets.prompt.ids, sets.generated.logprobs, sets.prompt.logprobs]
        return b"".join([json.dumps(head).encode(), _LINE_END, *map(_swapped, arrays)])

    @classmethod
    def from_bytes(cls, body: bytes) -> FirstToken:
        """Decode the bytes that `to_bytes` returned.

        Raises:
            WireError: another version of this package wrote the bytes, or the bytes are incomplete.
        """
        line, _, arrays = body.partition(_LINE_END)
        try:
            head: dict[str, Any] = json.loads(line)
            theirs, sizes = head["version"], head["sizes"]
            counts = [sum(max(size, 0) for size in each) for each in sizes]
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(_FIELD, f"got {body[:60]!r}, expected a line of JSON") from error
        if theirs != version("sglang-topp"):
            ours = version("sglang-topp")
            raise WireError(
                _FIELD, f"the prefill server has sglang-topp {theirs}, this one {ours}; expected the same"
            )
        total = sum(counts)
        if len(arrays) != 8 * total:
            raise WireError(_FIELD, f"got {len(arrays)} bytes of arrays, expected {8 * total}")
        ids, logprobs, at = _swapped(arrays[: 4 * total]), _swapped(arrays[4 * total :]), 4 * counts[0]
        sets = SetBuffer()
        if head["problem"]:
            sets.fail(Problem(*head["problem"]))
        else:
            sets.generated = PackedSets(ids[:at], logprobs[:at], sizes[0])
            sets.spans = [(head["weight_version"], 1)]
            sets.prompt = PackedSets(ids[at:], logprobs[at:], sizes[1])
            sets.prompt_version = head["prompt_version"]
        return cls(head["token_id"], head["inputs"], sets)


def _swapped(values: bytes | bytearray) -> bytes:
    """Convert between this machine's byte order and little-endian."""
    return bytes(values) if sys.byteorder == "little" else np.frombuffer(values, "<i4").byteswap().tobytes()


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
    if not sampling.get("custom_params"):
        sampling.pop("custom_params", None)
    prompt = obj.text if obj.input_ids is None else obj.input_ids
    wanted = sets_request(obj)
    return {
        THRESHOLD: repr(wanted.threshold),
        SOURCE: str(SAMPLER if wanted.is_from_sampler else None),
        "logprob_start_len": str(obj.logprob_start_len),
        "sampling_params": json.dumps(sampling, sort_keys=True, default=repr),
        "prompt": hashlib.sha256(repr(prompt).encode()).hexdigest(),
    }


def differing_names(left: Mapping[str, str], right: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sorted names of the inputs whose values differ."""
    return tuple(name for name in sorted({*left, *right}) if left.get(name) != right.get(name))
