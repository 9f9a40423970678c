"""Fields of SGLang's `/generate` answers, read strictly: what is not what it should be is a WireError."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import WireError
from sglang_topp_client.checks import is_text

__all__ = ["field_of", "text_of", "token_ids_of", "token_logprobs", "weight_version_of"]

_T = TypeVar("_T")


def token_logprobs(
    field: str, entries: list[Any], token_ids: NDArray[np.int32], *, of: str
) -> NDArray[np.float32]:
    """float32 [T] from SGLang's `[[logprob, token_id, text or null], ...]`, checked against the tokens.

    Args:
        field: where the entries come from.
        entries: one for each token.
        token_ids: int32 [T], the tokens that they are of.
        of: what these tokens are, for messages.
    """
    if len(entries) != len(token_ids):
        raise WireError(field, f"got {len(entries)} entries for {len(token_ids)} {of}_ids")
    try:
        given, reported = [entry[0] for entry in entries], [entry[1] for entry in entries]
        if not set(map(type, given)) <= {float, int, NoneType}:
            raise TypeError("a log-prob is no number")
        with np.errstate(over="ignore"):
            logprobs = np.array(given, np.float64).astype(np.float32)
    except (TypeError, KeyError, IndexError, OverflowError) as error:
        raise WireError(field, f"expected [logprob, token_id, text] per token: {error}") from None
    ids = token_ids_of(field, reported)
    if np.isnan(logprobs).any():
        raise WireError(field, f"no log-prob at position {int(np.isnan(logprobs).argmax())}")
    if len(wrong := np.flatnonzero(ids != token_ids)):
        t = int(wrong[0])
        raise WireError(field, f"got token {ids[t]} at position {t}; the {of} is {token_ids[t]}")
    return logprobs


def token_ids_of(name: str, values: list[Any]) -> NDArray[np.int32]:
    """int32 [T] from a list of token ids."""
    if not set(map(type, values)) <= {int}:
        raise WireError(name, "expected integers as token ids")
    try:
        ids = np.array(values, np.int32)
    except OverflowError:
        raise WireError(name, "got an id outside int32") from None
    if len(ids) and ids.min() < 0:
        raise WireError(name, f"got {ids.min()}, expected token ids of 0 or more")
    return ids


def weight_version_of(meta_info: Mapping[str, Any]) -> str:
    """`weight_version`, as text."""
    version = meta_info.get("weight_version")
    # SGLang keeps what it is given with the weights: a number, perhaps.
    return str(version) if version is None or type(version) is int else text_of(meta_info, "weight_version")


def text_of(record: Mapping[str, Any], name: str) -> str:
    """A field that is text, and can be sent on as UTF-8."""
    value = field_of(record, name, str)
    if not is_text(value):
        raise WireError(name, "got text with a lone surrogate, which is no Unicode text")
    return value


def field_of(record: Mapping[str, Any], name: str, kind: type[_T] | tuple[type[_T], ...]) -> _T:
    """A field of this type, or of one of these; a boolean is no integer."""
    value = record.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        got = type(value).__name__ if name in record else "nothing"
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise WireError(name, f"got {got}, expected {expected}")
    return value
