"""Provide the folder from which engines load the weights of a push.

If the caller gives a path, engines load from that path. If the caller gives a model in memory,
`checkpoint_folder` saves the model to a temporary folder.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from sglang_topp.errors import InvalidInputError, describe

__all__ = ["check_model", "check_path_or_model", "checkpoint_folder"]


def check_path_or_model(weights: Any) -> None:
    """Raise InvalidInputError unless `weights` is a path, or a model without PEFT adapters."""
    if isinstance(weights, str | os.PathLike):
        if not isinstance(os.fspath(weights), str) or not os.fspath(weights):
            raise InvalidInputError(f"weights: got {describe(weights)}, expected a path as text")
        return
    if not callable(getattr(weights, "save_pretrained", None)):
        raise InvalidInputError(
            f"weights: got {type(weights).__name__}, expected a path, or a transformers model with"
            " save_pretrained; a wrapper (DDP, FSDP, torch.compile) holds the model as an attribute"
        )
    check_model(weights)


def check_model(model: Any) -> None:
    """Raise InvalidInputError if the model has PEFT adapters, which a push would not include."""
    if getattr(model, "peft_config", None):
        raise InvalidInputError(
            "weights: got a model with PEFT adapters, expected merged weights: the engine would load the"
            " base model, or ignore the adapters. Call merge_and_unload() on a copy and push that"
        )


@asynccontextmanager
async def checkpoint_folder(weights: Any) -> AsyncGenerator[str, None]:
    """Yield the name of a folder that contains the weights to push.

    If `weights` is a model, this function saves the model to a temporary folder, and removes the temporary
    folder when the context ends.

    Args:
        weights: a path or a model, checked by `check_path_or_model`. If the path is a directory on this
            machine, the function yields the directory's absolute path. The function yields any other path
            unchanged, because the path may exist only on the engine's machine.
    """
    if isinstance(weights, str | os.PathLike):
        path = os.fspath(weights)
        yield os.path.abspath(path) if os.path.isdir(path) else path
        return
    folder = await asyncio.to_thread(tempfile.TemporaryDirectory, prefix="sglang-topp-weights-")
    try:
        await asyncio.to_thread(weights.save_pretrained, folder.name)
        yield folder.name
    finally:
        await asyncio.to_thread(folder.cleanup)
