"""Check values of callers and of servers: numbers, text, token ids, request ids, and decoded JSON.

A wrong argument of a caller is an InvalidInputError, and a wrong answer of a server is a WireError. Both name
the field, its value, and what is expected.
"""

from __future__ import annotations

import importlib
import json
import re
import uuid
from numbers import Integral, Real
from typing import Any, TypeVar, get_args

import msgspec
import msgspec.inspect
import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError, WireError, describe

MAX_BODY_CHARS = 2_000
"""A server's answer is cut to this many characters in `ResponseError.body`."""

# The maximum length of a request id, in the client and in the sidecar.
_MAX_REQUEST_ID = 512
# Python's JSON encoder and decoder fail at about 900 nested levels, depending on the caller's stack depth.
_MAX_NESTING = 100
_MAX_FIELD_CHARS = 60
_MAX_TOKEN_ID = int(np.iinfo(np.int32).max)
_T = TypeVar("_T")


def truncate(value: object, max_chars: int = 10_000) -> str:
    """Return a server's message as text for an error message, cut to `max_chars` characters.

    A `value` that is not a string is converted with `repr`, or with `describe` if `repr` fails.
    """
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):
        text = describe(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}… ({len(text)} characters)"


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
            elif isinstance(one, int) and not -(1 << 63) <= one < 1 << 63:
                return f"got the integer {describe(one)}, expected integers of 64 bits"
        if not below:
            break
        level = below
    else:
        return f"got values nested in more than {_MAX_NESTING} levels"
    try:
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"got text with a lone surrogate, which is no Unicode text: {describe(error.object)}"
    except (TypeError, ValueError, RecursionError) as error:
        return f"cannot be sent as JSON: {error}"
    return None


def check_choice(name: str, value: Any, choices: Any, note: str = "") -> Any:
    """Return `value`, or raise InvalidInputError, ending in `note`, if the Literal `choices` lacks it."""
    values = get_args(choices)
    if not isinstance(value, tuple(map(type, values))) or value not in values:
        *first, last = map(repr, values)
        listed = f"{', '.join(first)}{',' * (len(first) > 1)} or {last}"
        raise InvalidInputError(f"{name}: got {describe(value)}, expected {listed}{note}")
    return value


def whole_number(name: str, value: Any, lowest: int) -> int:
    """Return `value` as an `int`. `value` must be an integer of at least `lowest`, and not a boolean.

    Raises:
        InvalidInputError: `value` is not an integer, is a boolean, or is below `lowest`.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < lowest:
        raise InvalidInputError(f"{name}: got {describe(value)}, expected a whole number of {lowest} or more")
    return int(value)


def seconds(name: str, value: Any) -> float:
    """Return `value` as a float. `value` must be a number above 0 and at most 1e12, and not a boolean.

    Raises:
        InvalidInputError: `value` is something else.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value <= 1e12:
        raise InvalidInputError(f"{name}: got {describe(value)}, expected 0 < seconds <= 1e12, or None")
    return float(value)


def check_request_id(request_id: Any) -> None:
    """Raise InvalidInputError unless `request_id` is printable text of 1 to `_MAX_REQUEST_ID` characters.

    Servers write request ids to logs and headers, so an id must not contain line breaks.
    """
    if not isinstance(request_id, str):
        raise InvalidInputError(f"request_id: got {type(request_id).__name__}, expected text")
    if not request_id:
        raise InvalidInputError("request_id: got an empty string")
    if len(request_id) > _MAX_REQUEST_ID:
        raise InvalidInputError(
            f"request_id: got {len(request_id)} characters, expected at most {_MAX_REQUEST_ID}"
        )
    if not request_id.isprintable():
        wrong = next(character for character in request_id if not character.isprintable())
        raise InvalidInputError(f"request_id: got the character {wrong!a}, expected printable text")


def fresh_id(request_id: str) -> str:
    """Return a unique id for one call: `request_id` and a random suffix.

    If the unique id would exceed `_MAX_REQUEST_ID` characters, the function truncates `request_id`.
    """
    unique = f"-{uuid.uuid4().hex}"
    return request_id[: _MAX_REQUEST_ID - len(unique)] + unique


def is_fresh_id(request_id: str) -> bool:
    """Return whether the id ends as those of `fresh_id` and SGLang's own do."""
    return re.search(r"[0-9a-f]{32}\Z", request_id) is not None


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
    steps = re.findall(r"\.(\w+)|\[(\d+|\.\.\.)\]", path)
    for name, index in steps:
        try:
            value = value[name or int(index)]
        except (TypeError, LookupError, ValueError):  # "..." is any value of a dict
            break
    field = path.removeprefix(".") or field
    if named := re.fullmatch(r"Object (missing required|contains unknown) field (.*)", problem, re.DOTALL):
        inner = truncate(f"{path}.{named[2]}".removeprefix("."), _MAX_FIELD_CHARS)
        if named[1] == "missing required":
            return WireError(inner, "missing, but required")
        return WireError(inner, f"no such field, expected one of {', '.join(kind.__struct_fields__)}")
    expected = "a finite number" if problem == "Number out of range" else problem.removeprefix("Expected ")
    if problem.startswith("Invalid enum value"):
        expected = f"one of {_choices(msgspec.inspect.type_info(kind), [name for name, _ in steps])}"
    return WireError(field, f"got {describe(value)}, expected {re.sub(', got .*$', '', expected)}")


def _choices(kind: msgspec.inspect.Type, path: list[str]) -> str:
    """List the values of the Literal at a path, in which "" stands for the elements of a list or dict."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return "".join(_choices(each, path) for each in kind.types)
    if isinstance(kind, msgspec.inspect.LiteralType):
        return ", ".join(map(repr, kind.values))
    if not path:
        return ""
    if isinstance(kind, msgspec.inspect.StructType | msgspec.inspect.DataclassType):
        return "".join(_choices(one.type, path[1:]) for one in kind.fields if one.encode_name == path[0])
    inner = getattr(kind, "item_type", getattr(kind, "value_type", None))
    return "" if inner is None else _choices(inner, path[1:])


def import_optional(name: str, *, extra: str, use: str) -> Any:
    """Import and return a module of an optional dependency.

    Raises:
        ModuleNotFoundError: the dependency is not installed; the error names the extra to install.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        message = f"{package} is not installed; {use}: pip install 'sglang-topp[{extra}]'"
        raise ModuleNotFoundError(message, name=package) from None
