"""WeightPusher: give every engine of a fleet new weights, and let them continue only if all have these."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from ssl import SSLContext
from typing import Any, Literal

import pybase64

from sglang_topp.errors import InvalidInputError, SglangToppError, WeightPushError, describe
from sglang_topp_client.transport.server_config import ServerConfig, server_urls
from sglang_topp_client.value_checks import check_choice, seconds
from sglang_topp_client.weight_push.broadcast_push import push_broadcasts
from sglang_topp_client.weight_push.engine_control import (
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

_PAUSED = "The engines stay paused until a push succeeds"


class WeightPusher:
    """Pushes weights to a fleet of engines, pauses the fleet, and continues it.

    Args:
        engine_url: the addresses of all engines.
        api_key: the bearer token, for example SGLang's `--admin-api-key`.
        headers: additional headers for every request.
        ssl: the TLS settings for `https://` addresses.

    Attributes:
        pauses: why engines may be paused, by address, for the warnings of calls that wait for them.

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
        self.pauses: dict[str, str] = {}
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
        """Give every engine new weights: pause, flush the KV caches, update, flush again, and continue.

        The names and shapes of the weights must be those of the checkpoint that the engines were started
        with, because SGLang ignores other names. Generation continues only once every engine has the new
        weights. If a push fails before an engine has loaded any, the engines that it paused continue with
        the old ones. After a later error or a cancellation, all engines stay paused until a push succeeds.
        Do not push weights from several clients at once. In a training job of several processes, push
        weights from one process only.

        Args:
            weights: a transformers model. `"disk"` also accepts the path of a model folder that every engine
                can read. `"tensor"` and `"distributed"` also accept (name, tensor) pairs: the names and
                unsharded tensors of a checkpoint. A background thread reads these pairs, about 128 MiB at a
                time.
            version: the weight version, such as `"8"`; see `Rollout.weight_versions`.
            via: the transport of the weights. `"disk"`: every engine loads the folder. The client saves a
                model to a temporary folder, which only engines on this machine can read. For engines on other
                machines, save the model to a shared folder, and pass the folder's path as `weights`.
                `"tensor"`: HTTP requests carry the values, 128 MiB at a time, to engines on any machine. A
                request contains one copy of its values for each tensor-parallel rank. `"distributed"`: this
                process broadcasts the values over a new torch process group, which it forms with all engines
                for this push. The push does not use existing process groups. CUDA tensors use NCCL (this is
                experimental), and other tensors use gloo. If one engine fails, the client does not know which
                weights the engines have. Engines with `--dp-size` or `--pp-size` above 1 accept only
                `"disk"`.
            pause: how to treat requests in flight. `"retract"`: requests continue with the new weights, and
                the engine recomputes their KV cache. If requests are in flight, `"retract"` fails on SGLang
                before 0.5.21, and on any release with `--pp-size` above 1. `"abort"`: the engine aborts the
                requests, and each request's `on_abort` decides what follows. `"in_place"`: requests continue
                with the KV cache of the old weights, and no cache is flushed.
            partial: whether the weights may be a part of the model. The engines keep the rest as it is.
            timeout_s: the time limit of each step on an engine, such as pausing the engine or sending it one
                bucket of tensors. Steps that may be repeated, such as the pause, are retried within it.

        Raises:
            InvalidInputError: an argument is wrong, a name or a shape does not fit the engines' model,
                tensors are missing, or a URL does not belong to an engine. Nothing was sent.
            WeightPushError: the push failed after the client had begun to send weights, for example because
                an iterator yielded a tensor that does not fit. The error's `weight_versions` and message say
                which weights each engine has, as far as the client knows.
            SglangToppError: an engine did not answer, rejected the API key, could not be paused, failed the
                flush before the update, or could not read the folder. No engine has loaded weights.
        """
        if not isinstance(version, str) or not version or not version.isprintable():
            raise InvalidInputError(f"version: got {describe(version)}, expected printable text")
        check_choice("via", via, Transport)
        check_choice("pause", pause, PauseMode)
        check_choice("partial", partial, Literal[True, False])
        check_weights(weights, is_folder=via == "disk")
        since = time.strftime("%H:%M:%S")
        async with self._engines(timeout_s, via) as engines:
            self._note_pause(f"a push of version {version!r} began at {since}")
            try:
                async with _source(weights, via) as source:
                    _raise_first(await on_each(engines, EngineControl.check))
                    await _check(engines, source, partial)
                    await _push(
                        engines, lambda: _send(engines, source, version, via, timeout_s), version, pause
                    )
            except BaseException as error:
                cause = str(error).partition("\n")[0] or type(error).__name__
                self._note_pause(f"the push of version {version!r} that began at {since} failed: {cause}")
                raise
            self.pauses.clear()

    async def pause(self, mode: PauseMode = "retract", *, timeout_s: float = 600.0) -> None:
        """Pause generation on every engine until `continue_generation` or a successful push.

        Args:
            mode: what becomes of requests in flight; see the argument `pause` of a push.
            timeout_s: the time limit for each engine.

        Raises:
            SglangToppError: an engine could not be paused. The other engines are paused.
        """
        check_choice("pause", mode, PauseMode)
        async with self._engines(timeout_s) as engines:
            self._note_pause(f"this client's pause() was called at {time.strftime('%H:%M:%S')}")
            _raise_first(await on_each(engines, lambda engine: engine.pause(mode)))

    async def continue_generation(self, *, timeout_s: float = 600.0) -> None:
        """Continue generation on every engine.

        After a `WeightPushError`, the engines may have different weights, so push again instead, unless the
        error's `weight_versions` are the same everywhere.

        Raises:
            SglangToppError: an engine could not continue. The other engines continue.
        """
        async with self._engines(timeout_s) as engines:
            _raise_first(await on_each(engines, EngineControl.continue_generation))
        self.pauses.clear()

    def _note_pause(self, reason: str) -> None:
        self.pauses.update({config.base_url: reason for config in self.configs})

    @asynccontextmanager
    async def _engines(
        self, timeout_s: float, via: Transport = "disk"
    ) -> AsyncGenerator[list[EngineControl], None]:
        limit_s = seconds("timeout_s", timeout_s)
        if not self._is_busy.acquire(blocking=False):
            raise InvalidInputError(
                "this client is pushing, pausing, or continuing its engines already; await that call first"
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
    while not all(outcomes) and (body_of := await asyncio.to_thread(next, bodies, None)) is not None:
        healthy = [i for i, outcome in enumerate(outcomes) if outcome is None]
        update = partial(_update_from_tensors, body_of)
        for i, result in zip(healthy, await on_each([engines[i] for i in healthy], update), strict=True):
            outcomes[i] = result
    ends = await on_each(engines, EngineControl.end_update)
    return [first or last for first, last in zip(outcomes, ends, strict=True)]


async def _update_from_tensors(body_of: Mapping[int, bytes], engine: EngineControl) -> None:
    await engine.update("/update_weights_from_tensor", body_of[engine.tp_size])


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
    engines: Sequence[EngineControl], send: Callable[[], Awaitable[Outcomes]], version: str, mode: PauseMode
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
    if any(outcomes):
        count = outcomes.count(None)
        raise _push_error(
            f"version {version!r} reached {count} of {len(engines)} engines. {_PAUSED}. Push again after"
            " fixing the cause. If an engine fails again, restart it, or exclude it",
            engines,
            [version if error is None else None for error in outcomes],
            outcomes,
        )
    steps = {
        f"not every cache was flushed. {_PAUSED}": flush,
        "not every engine continues; call continue_generation()": EngineControl.continue_generation,
    }
    for failure, step in steps.items():
        if step is not None and any(outcomes := await on_each(engines, step)):
            summary = f"version {version!r} is everywhere, but {failure}"
            raise _push_error(summary, engines, [version] * len(engines), outcomes)


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
