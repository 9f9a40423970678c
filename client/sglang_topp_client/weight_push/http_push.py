"""Send a model's tensors over HTTP to every engine of a fleet, one bucket of tensors per request."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import Iterator, Sequence

import pybase64

from sglang_topp_client.weight_push.engine_control import EngineControl, Outcomes, begin_updates, on_each
from sglang_topp_client.weight_push.tensors_to_push import Bucket

__all__ = ["push_tensors"]


async def push_tensors(engines: Sequence[EngineControl], parts: Iterator[Bucket], version: str) -> Outcomes:
    """Send a model's tensors to paused engines, and return the outcome of each engine.

    An engine that fails gets no further tensors. The push continues with the other engines.

    Args:
        engines: the paused engines. `EngineControl.check` must have set the `tp_size` of each engine.
        parts: the tensors of the whole model, in buckets.
        version: the weight version that the engines report after the push.
    """
    outcomes = await begin_updates(engines)
    if any(outcomes):
        return outcomes
    bodies = _bodies(parts, version, {engine.tp_size for engine in engines})
    while (body_of := await asyncio.to_thread(next, bodies, None)) is not None:
        await _send_to_healthy(engines, outcomes, body_of)
    ends = await on_each(engines, EngineControl.end_update)
    return [first or last for first, last in zip(outcomes, ends, strict=True)]


async def _send_to_healthy(
    engines: Sequence[EngineControl], outcomes: Outcomes, body_of: dict[int, bytes]
) -> None:
    """Send one bucket of tensors to the engines that have not failed, and store new errors in `outcomes`."""
    healthy = [i for i, outcome in enumerate(outcomes) if outcome is None]
    results = await on_each(
        [engines[i] for i in healthy],
        lambda engine: engine.update_from_tensors(body_of[engine.tp_size]),
    )
    for i, result in zip(healthy, results, strict=True):
        outcomes[i] = result


def _bodies(parts: Iterator[Bucket], version: str, tp_sizes: set[int]) -> Iterator[dict[int, bytes]]:
    """Yield, for each bucket, a mapping from tensor-parallel size to JSON request body.

    A request body depends on the engine's tensor-parallel size, so each mapping has one body for each size in
    `tp_sizes`.
    """
    import torch

    for bucket, is_last in parts:
        # If a tensor is a view, pickle writes the whole storage of the base tensor, so copy the tensors.
        values = [
            (name, tensor.to("cpu", copy=True, memory_format=torch.contiguous_format))
            for name, tensor in bucket
        ]
        encoded = pybase64.b64encode(pickle.dumps(values, protocol=4)).decode()
        yield {
            tp_size: json.dumps(
                {
                    "serialized_named_tensors": [encoded] * tp_size,
                    "flush_cache": False,
                    "weight_version": version if is_last else None,
                }
            ).encode()
            for tp_size in tp_sizes
        }
