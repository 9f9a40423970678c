"""Parse a JSON request body into a Pydantic model, and turn validation errors into one readable message."""

from __future__ import annotations

from itertools import chain, islice
from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from sglang_topp.errors import BadRequestError, describe
from sglang_topp_client.argument_checks import truncate

__all__ = ["num_prompts", "read_body"]

# An error names at most this many unknown fields, because a body may hold millions of unknown fields.
_MAX_UNKNOWN = 4
_MAX_NAME_CHARS = 60

_Body = TypeVar("_Body", bound=BaseModel)


def read_body(body: bytes | bytearray, kind: type[_Body]) -> _Body:
    """Parse a JSON request body into the Pydantic model `kind`, which checks the fields' types.

    Raises:
        BadRequestError: the body is invalid (400). The message names the field, the value, and the accepted
            values.
    """
    try:
        return kind.model_validate(_with_few_unknown(pydantic_core.from_json(body), kind))
    except ValidationError as error:
        raise BadRequestError(_sentence(error, kind), status=400) from None
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}", status=400) from None


def _with_few_unknown(given: Any, kind: type[BaseModel]) -> Any:
    """Return the known fields of a body, and at most `_MAX_UNKNOWN` of its unknown fields."""
    if not isinstance(given, dict):
        return given
    known = kind.model_fields.keys()
    unknown = islice((name for name in given if name not in known), _MAX_UNKNOWN)
    return {name: given[name] for name in chain(known & given.keys(), unknown)}


def num_prompts(prompts: Any) -> int:
    """Return the number of prompts in a body's unchecked `prompts` or `sequences` field."""
    is_one = not isinstance(prompts, list) or (bool(prompts) and isinstance(prompts[0], int | dict))
    return 1 if is_one else len(prompts)


def _sentence(error: ValidationError, kind: type[BaseModel]) -> str:
    """Return an error message that lists every validation error with the name of its field."""
    sentences = []
    for problem in error.errors(include_url=False):
        field = ".".join(truncate(str(part), _MAX_NAME_CHARS) for part in problem["loc"])
        if problem["type"] == "value_error":
            sentences.append(": ".join(filter(None, [field, str(problem["ctx"]["error"])])))
        elif problem["type"] == "missing":
            sentences.append(f"{field}: missing, but required")
        elif problem["type"] == "extra_forbidden":
            known = ", ".join(kind.model_fields)
            sentences.append(f"{field}: no such field, expected one of {known}")
        else:
            message = problem["msg"][:1].lower() + problem["msg"][1:]
            sentences.append(f"{field or 'the body'}: got {describe(problem['input'])}; {message}")
    return "; ".join(dict.fromkeys(sentences))
