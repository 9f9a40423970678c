"""Accept the plugin's request fields as keyword arguments of the offline engine, `sglang.Engine`.

The hooks on `Engine.generate` and `Engine.async_generate` put the keyword arguments into a context variable.
The hook on `TokenizerManager.generate_request` copies these keyword arguments to the request object.
SGLang calls `generate_request` before `Engine.generate` or `Engine.async_generate` returns. The hooks reset
the context variable only after the return, so `generate_request` finds the arguments of its own request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sglang_topp.errors import PatchError
from sglang_topp_patches.hooks import around, before
from sglang_topp_patches.request import FIELDS

__all__ = ["async_generate", "generate", "set_fields"]

_keywords: ContextVar[dict[str, Any] | None] = ContextVar("sglang_topp_keywords", default=None)


@around("sglang.srt.entrypoints.engine.Engine.generate")
def generate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Accept the plugin's fields as keyword arguments."""
    with _fields_taken_from(kwargs):
        return original(self, *args, **kwargs)


@around("sglang.srt.entrypoints.engine.Engine.async_generate")
async def async_generate(
    original: Callable[..., Awaitable[Any]], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Accept the plugin's fields as keyword arguments."""
    with _fields_taken_from(kwargs):
        return await original(self, *args, **kwargs)


@before("sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request")
def set_fields(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """Copy the plugin's fields to the request."""
    fields = _keywords.get() or {}
    while fields:
        name, value = fields.popitem()
        setattr(obj, name, value)


@contextmanager
def _fields_taken_from(kwargs: dict[str, Any]) -> Iterator[None]:
    fields = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
    token = _keywords.set(fields)
    try:
        yield
    finally:
        _keywords.reset(token)
    if fields:
        raise PatchError(f"{', '.join(fields)}: SGLang's engine did not pass its request to generate_request")
