"""OpenAPI schemas with the docstrings of the fields that a class declares."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

import msgspec

__all__ = ["body_schema", "field_docstrings"]


def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class and of its bases in the same module."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one.__module__ != kind.__module__:
            continue
        (tree,) = ast.parse(inspect.getsource(one)).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in pairwise(tree.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the OpenAPI description of a request body."""
    schema: dict[str, Any] = msgspec.json.schema(kind)["$defs"][kind.__name__]
    for name, text in field_docstrings(kind).items():
        schema["properties"][name]["description"] = text
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
