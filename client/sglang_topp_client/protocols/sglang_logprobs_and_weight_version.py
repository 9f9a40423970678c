"""Read the log-probs and the weight version from SGLang's `/generate` answers, and check them.

The answers to generation requests and to scoring requests contain log-probs and a weight version. An
unexpected type or value raises WireError.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import WireError
from sglang_topp_client.codecs.json_fields import parse_token_ids, read_text

__all__ = ["parse_token_logprobs", "read_weight_version"]


def parse_token_logprobs(
    field: str, entries: list[Any], token_ids: NDArray[np.int32], *, of: str
) -> NDArray[np.float32]:
    """Return the log-probs in SGLang's list of `[logprob, token_id, text or null]` items, as float32 [T].

    Args:
        field: the name of the answer's field that holds the list.
        entries: the list, with one `[logprob, token_id, text or null]` for each token.
        token_ids: int32 [T], the expected tokens.
        of: the noun that error messages use for the tokens, such as `"output"`.

    Raises:
        WireError: an item of `entries` is malformed, has no log-prob, or has a token id that differs from
            `token_ids`.
    """
    if len(entries) != len(token_ids):
        raise WireError(field, f"got {len(entries)} entries for {len(token_ids)} {of}_ids")
    try:
        given, reported = [entry[0] for entry in entries], [entry[1] for entry in entries]
        if not set(map(type, given)) <= {float, int, NoneType}:
            raise TypeError("a log-prob is not a number")
        with np.errstate(over="ignore"):
            logprobs = np.array(given, np.float64).astype(np.float32)
    except (TypeError, KeyError, IndexError, OverflowError) as error:
        raise WireError(field, f"expected [logprob, token_id, text] per token: {error}") from None
    ids = parse_token_ids(field, reported)
    if np.isnan(logprobs).any():
        raise WireError(field, f"no log-prob at position {int(np.isnan(logprobs).argmax())}")
    if len(wrong := np.flatnonzero(ids != token_ids)):
        t = int(wrong[0])
        raise WireError(field, f"got token {ids[t]} at position {t}, expected {token_ids[t]}, as in the {of}")
    return logprobs


def read_weight_version(meta_info: Mapping[str, Any]) -> str | None:
    """Return the field `weight_version` as text, or None if the answer has no weight version."""
    version = meta_info.get("weight_version")
    if version is None:
        return None
    # Also accept an integer. A Python program may pass an integer to SGLang's class `ServerArgs`, as the
    # argument `weight_version`, and the class does not convert this integer to text.
    return str(version) if type(version) is int else read_text(meta_info, "weight_version")
