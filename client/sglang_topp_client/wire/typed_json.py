"""Decode JSON into declared types. An error names the field, its value, and what is expected."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
import numpy as np

from sglang_topp.errors import WireError, describe
from sglang_topp_client.argument_checks import truncate
from sglang_topp_client.rollout import TokenIds

__all__ = ["check_ids", "convert", "decode_json", "parse_token_ids"]

_MAX_FIELD_CHARS = 60
_T = TypeVar("_T")


def decode_json(text: bytes | bytearray | memoryview, kind: type[_T], *, field: str) -> _T:
    """Decode a JSON text into `kind`. Fields that `kind` does not have are left out.

    Args:
        text: the JSON text.
        kind: a type that msgspec decodes.
        field: the name of the whole text in errors.

    Raises:
        WireError: the text is not JSON, or a value has another type; the error names the field.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as error:
        try:
            value = msgspec.json.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            value = bytes(text[:200])
        raise _wire_error(error, value, kind, field) from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(field, f"got {bytes(text[:200])!r}, which is not JSON: {error}") from None


def convert(value: Any, kind: type[_T], *, field: str) -> _T:
    """Convert a decoded JSON value to `kind`; see `decode_json`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _wire_error(error, value, kind, field) from None
    except (UnicodeEncodeError, RecursionError) as error:
        raise WireError(field, f"got {describe(value)}: {error}") from None


def _wire_error(error: msgspec.ValidationError, value: Any, kind: Any, field: str) -> WireError:
    """Return msgspec's error, with the path and the value of the field at fault."""
    problem, _, path = str(error).replace("`", "").partition(" - at $")
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        try:
            value = value[name or int(index)]
        except (TypeError, LookupError):
            break
    field = path.removeprefix(".") or field
    if named := re.fullmatch(r"Object (missing required|contains unknown) field (.*)", problem, re.DOTALL):
        inner = truncate(f"{path}.{named[2]}".removeprefix("."), _MAX_FIELD_CHARS)
        if named[1] == "missing required":
            return WireError(inner, "missing, but required")
        return WireError(inner, f"no such field, expected one of {', '.join(kind.__struct_fields__)}")
    expected = "a finite number" if problem == "Number out of range" else problem.removeprefix("Expected ")
    return WireError(field, f"got {describe(value)}, expected {re.sub(', got .*$', '', expected)}")


def parse_token_ids(field: str, values: list[int]) -> TokenIds:
    """Return a list of token ids as int32 [T], or raise WireError."""
    try:
        ids = np.array(values, np.int32)
    except OverflowError:
        raise WireError(field, "got an id outside int32") from None
    check_ids(field, ids)
    return ids


def check_ids(field: str, ids: TokenIds) -> None:
    """Raise WireError if one of the token ids is negative."""
    if len(ids) and ids.min() < 0:
        raise WireError(field, f"got {ids.min()}, expected token ids of 0 or more")
