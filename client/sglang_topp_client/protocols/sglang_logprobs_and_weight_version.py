"""Decode SGLang's `/generate` answers, and check their log-probs and weight versions.

The answers to generation requests and to scoring requests have the same form. An unexpected type or value
raises WireError.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import WireError
from sglang_topp_client.codecs.json_fields import parse_token_ids, read_text

__all__ = ["TokenLogprob", "decode_chunk", "parse_token_logprobs", "read_weight_version"]


class TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """An item of SGLang's list of log-probs, `[logprob, token_id, text or null]`.

    There is one for each token, so the garbage collector does not track them.
    """

    logprob: float | None
    token_id: int
    text: str | None = None


class _MetaInfo(TypedDict, total=False):
    id: Any
    finish_reason: Any
    prompt_tokens: Any
    completion_tokens: Any
    cached_tokens: Any
    e2e_latency: Any
    weight_version: Any
    weight_versions: Any
    resumed_tokens: Any
    output_token_logprobs: list[TokenLogprob]
    input_token_logprobs: list[TokenLogprob]
    top_logprobs_source: Any
    output_top_p_logprobs: Any
    output_top_p_logprobs_val_base64: Any
    output_top_p_logprobs_idx_base64: Any
    output_top_p_logprobs_lengths: Any
    input_top_p_logprobs: Any
    input_top_p_logprobs_val_base64: Any
    input_top_p_logprobs_idx_base64: Any
    input_top_p_logprobs_lengths: Any


class _Chunk(TypedDict, total=False):
    """A chunk of a stream. Fields of type `Any` are checked where they are read."""

    index: Any
    text: Any
    output_ids: Any
    prompt_token_ids: Any
    meta_info: _MetaInfo
    error: Any


_CHUNK = msgspec.json.Decoder(_Chunk)
_PROBLEM = re.compile(
    r"Expected (?P<expected>.*?)(?:, got (?P<got>.*?))?(?: - at \$(?:.*\.)?(?P<field>\w+)(?P<at>[^.]*))?"
)


def decode_chunk(text: bytes | memoryview) -> dict[str, Any]:
    """Decode one JSON chunk of an answer. Unknown fields are left out.

    Raises:
        WireError: the text is not a JSON object, or a field has another type.
    """
    try:
        return dict(_CHUNK.decode(text))
    except msgspec.ValidationError as error:
        message = str(error).replace("`", "")
        if (problem := _PROBLEM.fullmatch(message)) is None:
            raise WireError("stream", message) from None
        place = f" at {problem['at']}" if problem["at"] else ""
        raise WireError(
            problem["field"] or "stream", f"got {problem['got']}, expected {problem['expected']}{place}"
        ) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError("stream", f"got {bytes(text[:200])!r}: {error}") from None


def parse_token_logprobs(
    field: str, entries: list[TokenLogprob], token_ids: NDArray[np.int32], *, of: str
) -> NDArray[np.float32]:
    """Return the log-probs in SGLang's list of items, as float32 [T].

    Args:
        field: the name of the answer's field that holds the list.
        entries: the list, with one item for each token.
        token_ids: int32 [T], the expected tokens.
        of: the noun that error messages use for the tokens, such as `"output"`.

    Raises:
        WireError: an item of `entries` has no log-prob, or a token id that differs from `token_ids`.
    """
    if len(entries) != len(token_ids):
        raise WireError(field, f"got {len(entries)} entries for {len(token_ids)} {of}_ids")
    with np.errstate(over="ignore"):
        logprobs = np.array([entry.logprob for entry in entries], np.float64).astype(np.float32)
    ids = parse_token_ids(field, [entry.token_id for entry in entries])
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
