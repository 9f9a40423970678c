"""Send the weights of a push in one of three ways: model folder, HTTP requests, or torch process group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import Any, TypeAlias

from sglang_topp_client.weight_push.broadcast_push import push_broadcasts
from sglang_topp_client.weight_push.checkpoint_folder import checkpoint_folder
from sglang_topp_client.weight_push.engine_control import EngineControl, Transport
from sglang_topp_client.weight_push.fleet_push import Outcomes, on_each
from sglang_topp_client.weight_push.http_push import push_tensors
from sglang_topp_client.weight_push.tensors_to_push import buckets, named_tensors

__all__ = ["weight_sender"]

_Send: TypeAlias = Callable[[Sequence[EngineControl]], Awaitable[Outcomes]]


@asynccontextmanager
async def weight_sender(
    weights: Any, version: str, via: Transport, timeout_s: float
) -> AsyncGenerator[_Send, None]:
    """Yield a function that sends the weights to a list of paused engines.

    Args:
        weights: the weights to push. The caller has already checked the weights. For the transport `"disk"`,
            the caller called `check_path_or_model`. For the other transports, the caller called
            `check_model_or_tensors`.
        version: the weight version.
        via: the transport: `"disk"`, `"tensor"`, or `"distributed"`.
        timeout_s: the time limit of each collective operation of the process group. Only the transport
            `"distributed"` uses `timeout_s`.

    Raises:
        InvalidInputError: there are no tensors, or the first bucket has an invalid tensor.
    """
    if via == "disk":
        async with checkpoint_folder(weights) as folder:
            yield lambda engines: on_each(engines, lambda engine: engine.update_from_disk(folder, version))
        return
    rest = buckets(named_tensors(weights))
    # Read the first bucket of tensors now, so that invalid weights raise an error before any engine is
    # paused.
    parts = chain([await asyncio.to_thread(next, rest)], rest)
    if via == "tensor":
        yield lambda engines: push_tensors(engines, parts, version)
    else:
        yield lambda engines: push_broadcasts(engines, parts, version, timeout_s)
