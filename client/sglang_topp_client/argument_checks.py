"""Validate individual arguments of the client: numbers, seconds, text, JSON, token ids, and request ids."""

from __future__ import annotations

import json
import math
import uuid
from numbers import Integral, Real
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError, describe

__all__ = [
    "MAX_BODY_CHARS",
    "MAX_MESSAGE_CHARS",
    "MAX_REQUEST_ID",
    "as_array",
    "as_token_ids",
    "check_bool",
    "check_choice",
    "check_request_id",
    "find_json_problem",
    "fresh_id",
    "is_text",
    "seconds",
    "truncate",
    "whole_number",
]

MAX_MESSAGE_CHARS = 10_000
"""A server's message is cut to this many characters when an exception quotes it."""

MAX_BODY_CHARS = 2_000
"""A server's answer is cut to this many characters in `ResponseError.body`."""

MAX_REQUEST_ID = 512
"""The maximum length, in characters, of a request id, in the client and in the sidecar."""

# Python's JSON encoder and decoder fail at about 900 nested levels, depending on the caller's stack depth.
_MAX_NESTING = 100
_MAX_TOKEN_ID = int(np.iinfo(np.int32).max)


def truncate(value: object, max_chars: int) -> str:
    """Return `value` as text for an error message. Text of more than `max_chars` characters is cut.

    A `value` that is not a string is converted with `repr`, or with `describe` if `repr` fails.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):
        text = describe(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


def is_text(value: str) -> bool:
    """Return whether `value` can be encoded as UTF-8. Text with a lone surrogate cannot be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_json_problem(value: Any) -> str | None:
    """Return why `value` cannot be sent to a server as JSON, or None if `value` can be sent."""
    level: list[Any] = [value]
    for _ in range(_MAX_NESTING):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += one
                below += one.values()
            elif isinstance(one, list | tuple):
                below += one
            elif isinstance(one, str):
                if not is_text(one):
                    return f"got text with a lone surrogate, which is no Unicode text: {describe(one)}"
            elif isinstance(one, int) and not -(1 << 63) <= one < 1 << 63:
                return f"got the integer {describe(one)}, expected integers of 64 bits"
        if not below:
            break
        level = below
    else:
        return f"got values nested in more than {_MAX_NESTING} levels"
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return f"cannot be sent as JSON: {error}"
    return None


def check_choice(name: str, value: Any, choices: Any, note: str = "") -> None:
    """Raise InvalidInputError, whose message ends with `note`, unless `value` is in the Literal `choices`."""
    *first, last = map(repr, get_args(choices))
    if not isinstance(value, str) or value not in get_args(choices):
        listed = f"{', '.join(first)}{',' * (len(first) > 1)} or {last}"
        raise InvalidInputError(f"{name}: got {describe(value)}, expected {listed}{note}")


def check_bool(name: str, value: Any) -> None:
    """Raise InvalidInputError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise InvalidInputError(f"{name}: got {describe(value)}, expected True or False")


def whole_number(name: str, value: Any, lowest: int) -> int:
    """Return `value` as an `int`. `value` must be an integer of at least `lowest`, and not a boolean.

    Raises:
        InvalidInputError: `value` is not an integer, is a boolean, or is below `lowest`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < lowest:
        raise InvalidInputError(f"{name}: got {describe(value)}, expected a whole number of {lowest} or more")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """Return `value` as a float. `value` must be a finite number above 0, and not a boolean.

    Raises:
        InvalidInputError: `value` is not a number, is a boolean, is not finite, or is not above 0.
    """
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise InvalidInputError(f"{name}: got {describe(value)}, expected seconds above 0, or None")
    return number


def check_request_id(request_id: Any) -> None:
    """Raise InvalidInputError unless `request_id` is printable text of 1 to `MAX_REQUEST_ID` characters.

    Servers write request ids to logs and headers, so an id must not contain line breaks.
    """
    if not isinstance(request_id, str):
        raise InvalidInputError(f"request_id: got {type(request_id).__name__}, expected text")
    if not request_id:
        raise InvalidInputError("request_id: got an empty string")
    if len(request_id) > MAX_REQUEST_ID:
        raise InvalidInputError(
            f"request_id: got {len(request_id)} characters, expected at most {MAX_REQUEST_ID}"
        )
    if not request_id.isprintable():
        wrong = next(character for character in request_id if not character.isprintable())
        raise InvalidInputError(f"request_id: got the character {wrong!a}, expected printable text")


def fresh_id(request_id: str) -> str:
    """Return a unique id for one call: `request_id` and a random suffix.

    If the unique id would exceed `MAX_REQUEST_ID` characters, the function truncates `request_id`.
    """
    unique = f"-{uuid.uuid4().hex}"
    return request_id[: MAX_REQUEST_ID - len(unique)] + unique


def as_token_ids(name: str, values: Any) -> list[int]:
    """Return one or more token ids as a list of Python integers.

    Raises:
        InvalidInputError: `values` is empty, or holds anything other than token ids.
    """
    # Without the next two checks, NumPy would silently convert booleans to 0 and 1, and read the bytes of a
    # buffer as integers.
    if isinstance(values, list | tuple) and not {bool, np.bool_}.isdisjoint(map(type, values)):
        raise InvalidInputError(f"{name}: got a boolean, expected token ids")
    if isinstance(values, bytes | bytearray | memoryview):
        raise InvalidInputError(f"{name}: got {type(values).__name__}, expected text or token ids")
    ids = as_array(name, values)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise InvalidInputError(
            f"{name}: got {ids.dtype} of shape {list(ids.shape)}, expected one or more token ids"
        )
    if ids.min() < 0 or ids.max() > _MAX_TOKEN_ID:
        raise InvalidInputError(
            f"{name}: got ids from {ids.min()} to {ids.max()}, expected 0 to {_MAX_TOKEN_ID}"
        )
    plain: list[int] = ids.tolist()
    return plain


def as_array(name: str, values: Any) -> NDArray[Any]:
    """Convert `values` to a NumPy array. The caller must check the array's dtype, shape, and contents.

    Raises:
        InvalidInputError: NumPy cannot read `values`.
    """
    try:
        return np.asarray(values)
    except ValueError:
        raise InvalidInputError(f"{name}: got a ragged nesting, expected token ids") from None
    except Exception as error:  # for example, NumPy cannot read a tensor on a GPU
        raise InvalidInputError(f"{name}: cannot be read as token ids: {error}") from None
