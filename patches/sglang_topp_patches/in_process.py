"""`sglang.Engine` in one's own process: its `generate` and `async_generate` take our fields as keywords.

Their signatures are SGLang's, and the request that they build reaches the tokenizer manager before anything
is awaited: the keywords wait until then, and are put on it there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sglang_topp.errors import PatchError
from sglang_topp_patches.payload import FIELDS

__all__ = ["async_generate", "generate", "hand_over"]

_waiting: ContextVar[dict[str, Any] | None] = ContextVar("sglang_topp_waiting", default=None)


def generate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on `Engine.generate`."""
    with _fields_taken_from(kwargs):
        return original(self, *args, **kwargs)


async def async_generate(
    original: Callable[..., Awaitable[Any]], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook on `Engine.async_generate`."""
    with _fields_taken_from(kwargs):
        return await original(self, *args, **kwargs)


def hand_over(self: Any, obj: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook on `TokenizerManager.generate_request`."""
    fields = _waiting.get() or {}
    while fields:
        name, value = fields.popitem()
        setattr(obj, name, value)


@contextmanager
def _fields_taken_from(kwargs: dict[str, Any]) -> Iterator[None]:
    fields = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
    token = _waiting.set(fields)
    try:
        yield
    finally:
        _waiting.reset(token)
    if fields:
        raise PatchError(f"{', '.join(fields)}: SGLang's engine sent its request by a way that drops them")
