"""Add the prompt's token ids to answers of SGLang 0.5.12, which lacks `return_prompt_token_ids`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from sglang_topp_patches.hooks import after, before

__all__ = ["FIELD", "get_item", "note", "note_batch", "write"]

FIELD = "return_prompt_token_ids"
_IDS = "_sglang_topp_prompt_ids"


@after("sglang.srt.managers.io_struct.GenerateReqInput.__getitem__", until="0.5.13")
def get_item(item: Any, self: Any, i: int) -> Any:
    """Copy the field `return_prompt_token_ids`.

    `self` is a request with a list of prompts. `__getitem__` returns `item`, a request with one of the
    prompts. The hook copies the field from `self` to `item`.
    """
    setattr(item, FIELD, getattr(self, FIELD))
    return item


@before("sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request", until="0.5.13")
def note(self: Any, tokenized_obj: Any, *args: Any, **kwargs: Any) -> None:
    """Store one prompt's token ids."""
    state = self.rid_to_state[tokenized_obj.rid]
    if getattr(state.obj, FIELD, False):  # an embedding request lacks this field
        setattr(state, _IDS, list(tokenized_obj.input_ids))


@before("sglang.srt.managers.tokenizer_manager.TokenizerManager._send_batch_request", until="0.5.13")
def note_batch(self: Any, tokenized_objs: Sequence[Any], *args: Any, **kwargs: Any) -> None:
    """Store each prompt's token ids."""
    for tokenized_obj in tokenized_objs:
        note(self, tokenized_obj)


@after("sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response", until="0.5.13")
def write(
    chunks: AsyncGenerator[dict[str, Any], None], self: Any, obj: Any, *args: Any, **kwargs: Any
) -> AsyncGenerator[dict[str, Any], None]:
    """Add the prompt's token ids to each chunk."""
    ids = getattr(self.rid_to_state[obj.rid], _IDS, None)
    return chunks if ids is None else _with_ids(chunks, ids)


async def _with_ids(
    chunks: AsyncGenerator[dict[str, Any], None], ids: list[int]
) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(chunks):
        async for out in chunks:
            out["prompt_token_ids"] = ids
            yield out
