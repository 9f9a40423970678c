"""WeightPusher: give every engine of a fleet new weights, and let them continue only if all have these."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from ssl import SSLContext
from typing import Any

import pybase64

from sglang_topp.errors import InvalidInputError, SglangToppError, WeightPushError, describe
from sglang_topp_client.argument_checks import seconds
from sglang_topp_client.transport.server_config import ServerConfig, server_urls
from sglang_topp_client.weight_push.broadcast_push import push_broadcasts
from sglang_topp_client.weight_push.engine_control import (
    PAUSE_MODES,
    TRANSPORTS,
    EngineControl,
    NotLoadedError,
    Outcomes,
    PauseMode,
    Transport,
    begin_updates,
    on_each,
)
from sglang_topp_client.weight_push.tensors_to_push import (
    Bucket,
    TensorCheck,
    TensorsToPush,
    check_weights,
    checkpoint_folder,
)

__all__ = ["WeightPusher"]

_PAUSED = "The engines stay paused until a push succeeds"


class WeightPusher:
    """Pushes weights to a fleet of engines, pauses the fleet, and continues it.

    Args:
        engine_url: the addresses of all engines.
        api_key: the bearer token, for example SGLang's `--admin-api-key`.
        headers: additional headers for every request.
        ssl: the TLS settings for `https://` addresses.

    Raises:
        InvalidInputError: an argument is wrong.
    """

    def __init__(
        self,
        engine_url: str | Sequence[str],
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        ssl: SSLContext | None = None,
    ) -> None:
        self.configs = [
            ServerConfig(url, api_key=api_key, headers=headers or {}, ssl=ssl)
            for url in server_urls("engine_url", engine_url)
        ]
        self._is_busy = threading.Lock()

    async def push(
        self,
        weights: Any,
        *,
        version: str,
        via: Transport = "disk",
        pause: PauseMode = "retract",
        partial: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        """Give every engine new weights; see `AsyncRolloutClient.push_weights`."""
        if not isinstance(version, str) or not version or not version.isprintable():
            raise InvalidInputError(f"version: got {describe(version)}, expected printable text")
        if not isinstance(via, str) or via not in TRANSPORTS:
            raise InvalidInputError(f"via: got {describe(via)}, expected one of {', '.join(TRANSPORTS)}")
        _check_mode(pause)
        if not isinstance(partial, bool):
            raise InvalidInputError(f"partial: got {describe(partial)}, expected True or False")
        check_weights(weights, is_folder=via == "disk")
        async with self._engines(timeout_s, via) as engines, _source(weights, via) as source:
            _raise_first(await on_each(engines, EngineControl.check))
            await _check(engines, source, partial)
            await _push(engines, lambda: _send(engines, source, version, via, timeout_s), version, pause)

    async def pause(self, mode: PauseMode = "retract", *, timeout_s: float = 600.0) -> None:
        """Pause every engine; see `AsyncRolloutClient.pause`."""
        _check_mode(mode)
        async with self._engines(timeout_s) as engines:
            _raise_first(await on_each(engines, lambda engine: engine.pause(mode)))

    async def continue_generation(self, *, timeout_s: float = 600.0) -> None:
        """Continue generation on every engine; see `AsyncRolloutClient.continue_generation`."""
        async with self._engines(timeout_s) as engines:
            _raise_first(await on_each(engines, EngineControl.continue_generation))

    @asynccontextmanager
    async def _engines(
        self, timeout_s: float, via: Transport = "disk"
    ) -> AsyncGenerator[list[EngineControl], None]:
        limit_s = seconds("timeout_s", timeout_s)
        if not self._is_busy.acquire(blocking=False):
            raise InvalidInputError(
                "push_weights: this client is pushing, pausing, or continuing already; await that call first"
            )
        engines = [EngineControl(config, limit_s, via) for config in self.configs]
        try:
            yield engines
        finally:
            self._is_busy.release()
            for engine in engines:
                await engine.close()


@asynccontextmanager
async def _source(weights: Any, via: Transport) -> AsyncGenerator[str | TensorsToPush, None]:
    """Yield what to push: the name of a folder, or tensors."""
    if via == "disk":
        async with checkpoint_folder(weights) as folder:
            yield folder
    else:
        yield await asyncio.to_thread(TensorsToPush, weights)


async def _check(engines: Sequence[EngineControl], source: str | TensorsToPush, is_partial: bool) -> None:
    """Compare the known part of the weights with the tensors that the engines load.

    Raises:
        InvalidInputError: the weights do not fit.
    """

    async def check_folder(engine: EngineControl) -> None:
        pushed = await engine.checkpoint_tensors(str(source))
        TensorCheck({engine.base_url: engine.tensors}, is_partial=is_partial).add(pushed.shapes.items(), True)

    if isinstance(source, str):
        _raise_first(await on_each(engines, check_folder))
    else:
        known = {engine.base_url: engine.tensors for engine in engines}
        source.check(TensorCheck(known, is_partial=is_partial))


async def _send(
    engines: Sequence[EngineControl],
    source: str | TensorsToPush,
    version: str,
    via: Transport,
    timeout_s: float,
) -> Outcomes:
    """Send the weights to paused engines, and return the outcome of each engine."""
    if isinstance(source, str):
        return await on_each(engines, lambda engine: engine.update_from_disk(source, version))
    outcomes = await begin_updates(engines)
    if any(outcomes):
        return outcomes
    if via == "distributed":
        return await push_broadcasts(engines, source.parts(), version, timeout_s)
    return await _push_over_http(engines, source.parts(), version, outcomes)


async def _push_over_http(
    engines: Sequence[EngineControl], parts: Iterator[Bucket], version: str, outcomes: Outcomes
) -> Outcomes:
    """Send one bucket of tensors per request. An engine that fails gets no more; the others go on."""
    bodies = _http_bodies(parts, version, {engine.tp_size for engine in engines})
    while (body_of := await asyncio.to_thread(next, bodies, None)) is not None:
        healthy = [i for i, outcome in enumerate(outcomes) if outcome is None]
        update = functools.partial(_update_from_tensors, body_of)
        for i, result in zip(healthy, await on_each([engines[i] for i in healthy], update), strict=True):
            outcomes[i] = result
    ends = await on_each(engines, EngineControl.end_update)
    return [first or last for first, last in zip(outcomes, ends, strict=True)]


async def _update_from_tensors(body_of: Mapping[int, bytes], engine: EngineControl) -> None:
    await engine.update_from_tensors(body_of[engine.tp_size])


def _http_bodies(parts: Iterator[Bucket], version: str, tp_sizes: set[int]) -> Iterator[dict[int, bytes]]:
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


async def _push(
    engines: Sequence[EngineControl],
    send: Callable[[], Awaitable[Outcomes]],
    version: str,
    mode: PauseMode,
) -> None:
    """Pause and flush all engines, send the weights, flush again, and let the engines continue.

    If no engine has loaded a tensor, the engines that this push paused continue. Otherwise, all engines stay
    paused after an error or a cancellation, because they may have different weights.

    Raises:
        WeightPushError: the push failed after an engine had loaded tensors.
        SglangToppError: the push failed before.
    """
    flush = None if mode == "in_place" else lambda engine: engine.flush_cache(mode)
    try:
        _raise_first(await on_each(engines, lambda engine: engine.pause(mode)))
        if flush is not None:
            # Flush the KV caches before the update, so that no engine has new weights if a flush fails. The
            # update request itself would flush only after the update, and SGLang before 0.5.22 exits if that
            # flush fails.
            _raise_first(await on_each(engines, flush))
    except BaseException as error:
        await asyncio.shield(_undo_pause(engines, error))
        raise
    try:
        outcomes = await send()
    except SglangToppError as error:
        outcomes = [error] * len(engines)
    if all(isinstance(outcome, NotLoadedError) for outcome in outcomes):
        cause = next(outcome.cause for outcome in outcomes if isinstance(outcome, NotLoadedError))
        await asyncio.shield(_undo_pause(engines, cause))
        raise cause
    everywhere: list[str | None] = [version] * len(engines)
    if any(outcomes):
        count = outcomes.count(None)
        raise _push_error(
            f"version {version!r} reached {count} of {len(engines)} engines. {_PAUSED}. Push again after"
            " fixing the cause. If an engine fails again, restart it, or exclude it",
            engines,
            [version if error is None else None for error in outcomes],
            outcomes,
        )
    if flush is not None and any(outcomes := await on_each(engines, flush)):
        raise _push_error(
            f"version {version!r} is everywhere, but not every cache was flushed. {_PAUSED}",
            engines,
            everywhere,
            outcomes,
        )
    if any(outcomes := await on_each(engines, EngineControl.continue_generation)):
        raise _push_error(
            f"version {version!r} is everywhere, but not every engine continues; call continue_generation()",
            engines,
            everywhere,
            outcomes,
        )


async def _undo_pause(engines: Sequence[EngineControl], error: BaseException) -> None:
    """Let the engines continue that this push paused, and note in `error` which engines stay paused.

    An engine that was paused before may have other weights than the rest, for example after a failed push.
    """
    ours = [engine for engine in engines if not engine.was_paused]
    outcomes = await on_each(ours, EngineControl.continue_generation)
    failed = {engine.base_url for engine, outcome in zip(ours, outcomes, strict=True) if outcome is not None}
    paused = [engine.base_url for engine in engines if engine.was_paused or engine.base_url in failed]
    rest = f"these stay paused: {', '.join(paused)}" if paused else "all engines continue"
    error.add_note(f"no weights were loaded; {rest}")


def _check_mode(mode: Any) -> None:
    if not isinstance(mode, str) or mode not in PAUSE_MODES:
        raise InvalidInputError(f"pause: got {describe(mode)}, expected one of {', '.join(PAUSE_MODES)}")


def _raise_first(outcomes: Outcomes) -> None:
    for error in outcomes:
        if error is not None:
            raise error


def _push_error(
    summary: str, engines: Sequence[EngineControl], versions: Sequence[str | None], outcomes: Outcomes
) -> WeightPushError:
    lines = [summary]
    for engine, version, error in zip(engines, versions, outcomes, strict=True):
        weights = "weights unknown" if version is None else f"weights {version!r}"
        if isinstance(error, NotLoadedError):
            weights = "old weights"
        lines.append(f"  {engine.base_url}: {weights}" + ("" if error is None else f"; {error}"))
    by_url = {engine.base_url: version for engine, version in zip(engines, versions, strict=True)}
    failed = WeightPushError("\n".join(lines), weight_versions=by_url)
    first = next(error for error in outcomes if error is not None)
    failed.__cause__ = first.cause if isinstance(first, NotLoadedError) else first
    return failed
