"""Read and check the fields of a JSON object, and check candidate sets against tokens and log-probs.

For a missing field or a wrong value, every function raises a WireError that names the field.
"""

from __future__ import annotations

import binascii
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import pybase64
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import MissingCandidateSetsError, WireError, describe
from sglang_topp.formats.field_parsing import FLOAT32, renaming_errors
from sglang_topp_client.argument_checks import is_text

__all__ = [
    "check_ids",
    "check_kept_mass",
    "check_seconds",
    "check_sets",
    "parse_token_ids",
    "read_count",
    "read_field",
    "read_float32",
    "read_optional_text",
    "read_text",
    "read_token_ids",
]

_MAX_COUNT = (1 << 63) - 1
_MAX_SECONDS = 1e12
_T = TypeVar("_T")


def read_field(record: Mapping[str, Any], name: str, kind: type[_T] | tuple[type[_T], ...]) -> _T:
    """Return `record[name]`, which must be of type `kind`. A boolean does not count as an integer."""
    value = record.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        got = type(value).__name__ if name in record else "nothing"
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise WireError(name, f"got {got}, expected {expected}")
    return value


def read_count(record: Mapping[str, Any], name: str) -> int:
    """Return `record[name]`, which must be an integer from 0 to 2^63 - 1."""
    value = read_field(record, name, int)
    if not 0 <= value <= _MAX_COUNT:
        raise WireError(name, f"got {describe(value)}, expected a 64-bit integer of 0 or more")
    return value


def read_text(record: Mapping[str, Any], name: str) -> str:
    """Return `record[name]`, which must be text."""
    value = read_field(record, name, str)
    if not is_text(value):
        raise WireError(name, "got text with a lone surrogate, which is no Unicode text")
    return value


def read_optional_text(record: Mapping[str, Any], name: str) -> str | None:
    """Return `record[name]`, which must be text or null."""
    return None if name in record and record[name] is None else read_text(record, name)


def read_token_ids(record: Mapping[str, Any], name: str) -> NDArray[np.int32]:
    """Return the list of token ids in `record[name]` as int32 [T]."""
    return parse_token_ids(name, read_field(record, name, list))


def parse_token_ids(name: str, values: list[Any]) -> NDArray[np.int32]:
    """Return a list of token ids as int32 [T]. `name` is the name of the list in errors."""
    if not set(map(type, values)) <= {int}:
        raise WireError(name, "expected a list of integers as token ids")
    try:
        ids = np.array(values, np.int32)
    except OverflowError:
        raise WireError(name, "got an id outside int32") from None
    check_ids(name, ids)
    return ids


def read_float32(record: Mapping[str, Any], name: str) -> NDArray[np.float32]:
    """Decode the little-endian float32 values in `record[name]` from base64, and return float32 [T]."""
    text = read_field(record, name, str)
    try:
        raw = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(name, f"not base64: {error}") from None
    if len(raw) % FLOAT32.itemsize:
        raise WireError(name, f"got {len(raw)} bytes, expected a multiple of {FLOAT32.itemsize}")
    return np.frombuffer(raw, FLOAT32).astype(np.float32, copy=False)


def check_ids(field: str, ids: NDArray[np.int32]) -> None:
    """Raise WireError if one of the token ids is negative."""
    if len(ids) and ids.min() < 0:
        raise WireError(field, f"got {ids.min()}, expected token ids of 0 or more")


def check_seconds(field: str, value: float) -> float:
    """Return `value` as a float. Raise WireError if `value` is not between 0 and 1e12 seconds."""
    # Check `value` before the conversion to float, because an integer with hundreds of digits does not fit
    # into a float.
    if not 0 <= value <= _MAX_SECONDS:
        raise WireError(field, f"got {describe(value)}, expected seconds")
    return float(value)


def check_sets(
    candidates: CandidateSets,
    output_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    *,
    field: str,
    may_be_extended: bool = False,
) -> None:
    """Raise WireError unless each set holds its sampled token, with exactly the reported log-prob.

    The engine computes the sets and the tokens' log-probs from the same float32 numbers, so the check
    compares the log-probs for equality. The check therefore also rejects sets of another position or request,
    and log-probs that were computed at another temperature.

    Args:
        candidates: the candidate sets of T positions.
        output_ids: int32 [T].
        logprobs: float32 [T], the log-probs of the sampled tokens as the engine reports them.
        field: the name of the sets in error messages.
        may_be_extended: whether empty sets are accepted. Tokens that `Rollout.extend` appended have empty
            sets, and the log-prob 0.
    """
    if len(candidates) != len(output_ids):
        raise WireError(field, f"got {len(candidates)} positions for {len(output_ids)} output_ids")
    if len(wrong := np.flatnonzero(candidates.sampled_ids != output_ids)):
        t = int(wrong[0])
        raise WireError(
            field,
            f"got sampled token {candidates.sampled_ids[t]} at position {t}, expected {output_ids[t]}",
        )
    if not may_be_extended and len(empty := np.flatnonzero(candidates.sizes == 0)):
        raise MissingCandidateSetsError(field, f"no candidate set at position {int(empty[0])}")
    if not candidates.has_logprobs:
        raise WireError(field, "got sets without log-probs")
    if len(wrong := np.flatnonzero(candidates.sampled_logprobs != logprobs)):
        t = int(wrong[0])
        raise WireError(
            field,
            f"got log-prob {candidates.sampled_logprobs[t]} of the sampled token at position {t}, expected"
            f" {logprobs[t]}, as the engine reports ({len(wrong)} of {len(logprobs)} positions differ)",
        )


def check_kept_mass(candidates: CandidateSets, p: float, *, field: str) -> None:
    """Raise WireError if a set's total probability is too low or too high for the threshold `p`.

    `CandidateSets.check_kept_mass` defines the limits.

    Args:
        candidates: the candidate sets of T positions.
        p: the requested threshold, in (0, 1].
        field: the name of the sets in error messages.
    """
    with renaming_errors({"logprobs": field}):
        candidates.check_kept_mass(p)
