"""Compare the request inputs that a prefill and a decode server must agree on before they share sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from sglang_topp_patches.request import SAMPLER, SOURCE, THRESHOLD, sets_request

__all__ = ["differing_names", "first_token_inputs"]


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
