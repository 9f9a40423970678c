"""Checks of single values, and how a value is shown in an error."""

from __future__ import annotations

import math
import uuid
from numbers import Integral, Real
from typing import Any

from sglang_topp.errors import InvalidInputError

__all__ = [
    "MAX_BODY_CHARS",
    "MAX_MESSAGE_CHARS",
    "MAX_REQUEST_ID",
    "check_request_id",
    "fresh_id",
    "is_text",
    "seconds",
    "shown",
    "whole_number",
]

MAX_MESSAGE_CHARS = 10_000
"""Of a server's own words in a message."""

MAX_BODY_CHARS = 2_000
"""Of an answer in `ResponseError.body`."""

MAX_REQUEST_ID = 512
"""Characters; the sidecar takes no more either."""

_MAX_SHOWN = 200


def shown(value: object, max_chars: int = _MAX_SHOWN) -> str:
    """A value in an error, whatever it is: text as it is, anything else as Python writes it, cut short.

    Written out, an integer of thousands of digits is an error, and so is deep nesting.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):
        return f"a value of type {type(value).__name__} that is too large to show"
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


def is_text(value: str) -> bool:
    """Whether it can be sent as UTF-8: a lone surrogate cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def whole_number(name: str, value: Any, lowest: int) -> int:
    """`value`, where it is an integer of `lowest` or more, and no boolean.

    Raises:
        InvalidInputError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < lowest:
        raise InvalidInputError(f"{name}: got {shown(value)}, expected a whole number of {lowest} or more")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """`value` as a float, where it is a finite number above 0, and no boolean.

    Raises:
        InvalidInputError: it is not.
    """
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise InvalidInputError(f"{name}: got {shown(value)}, expected seconds above 0, or None")
    return number


def check_request_id(request_id: Any) -> None:
    """Raise InvalidInputError unless it can name a request: it stands in logs and in headers, where a line
    end would begin something else."""
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
    """An id for one call that begins as the caller's name for the request, within `MAX_REQUEST_ID`."""
    unique = f"-{uuid.uuid4().hex}"
    return request_id[: MAX_REQUEST_ID - len(unique)] + unique
