"""The names of the request fields that ask for candidate sets, and of the keys that carry the sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "AT_END",
    "BASE64",
    "DISTRIBUTION",
    "FIELDS",
    "KEY",
    "NUCLEUS",
    "SAMPLER",
    "SETS",
    "SOURCE",
    "THRESHOLD",
    "asking_field",
    "custom_params",
    "from_sampler",
]

THRESHOLD = "top_logprobs_p"
SOURCE = "top_logprobs_source"
BASE64 = "return_logprobs_in_base64"
NUCLEUS = "return_top_p_token_ids"
"""The request field of slime that asks for each token's nucleus at the request's own `top_p`.

The answer to a request with `return_top_p_token_ids` holds the sets in slime's two arrays
(`http.slime_fields`)."""

FIELDS = (THRESHOLD, SOURCE, BASE64, NUCLEUS)
"""The request fields that the patch set adds to SGLang's `POST /generate`.

A caller may also put each of these request fields into `sampling_params.custom_params`."""

DISTRIBUTION, SAMPLER = "distribution", "sampler"
"""The values of the request field `top_logprobs_source`.

With `DISTRIBUTION`, the default, `top_logprobs_p` is the threshold p of each set. With `SAMPLER`, each set
holds the tokens that the sampler could draw."""


def asking_field(get: Callable[[str], Any]) -> str:
    """Return the name of the request field that asks for sets, or an empty string if there is none.

    Args:
        get: returns the value of the request field with a given name, or None if the request lacks the field.
    """
    # Check NUCLEUS before THRESHOLD, because the HTTP process adds THRESHOLD to a request with NUCLEUS.
    if get(NUCLEUS):
        return NUCLEUS
    if get(THRESHOLD):
        return THRESHOLD
    return SOURCE if get(SOURCE) not in (None, DISTRIBUTION) else ""


def from_sampler(get: Callable[[str], Any]) -> bool:
    """Return whether a request asks for the tokens that the sampler could draw."""
    return bool(get(SOURCE) == SAMPLER)


def custom_params(req: Any) -> dict[str, Any]:
    """Return the `custom_params` of SGLang's `Req`, or an empty dictionary if they are not a dictionary."""
    custom = req.sampling_params.custom_params
    return custom if isinstance(custom, dict) else {}


KEY = "sglang_topp"
"""The key of `customized_info` under which a request has its `SetBuffer` (`set_buffer`)."""

AT_END = "sglang_topp_at_end"
"""The attribute that the HTTP process sets on requests to OpenAI routes.

If a request has this attribute, the HTTP process writes all of the request's sets at the end of the answer,
even in a stream."""

SETS = "sglang_topp_sets"
"""The key of `meta_info` for the sets and tokens of a request that has the attribute `AT_END`.

The value of this `meta_info` key is None if the request did not ask for sets."""
