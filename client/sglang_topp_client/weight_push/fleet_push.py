"""Push weights to every engine of a fleet, and let the engines continue only if all have the new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from sglang_topp.errors import SglangToppError, WeightPushError
from sglang_topp_client.weight_push.engine_control import EngineControl, PauseMode

__all__ = ["Outcomes", "on_each", "push_to_fleet"]

Outcomes: TypeAlias = list[SglangToppError | None]
"""The outcome of one step, such as a pause or an update, on each engine, in the order of the engines.

If the step succeeded on an engine, the engine's outcome is None. Otherwise, the outcome is the error.
"""

_PAUSED = "The engines stay paused until a push succeeds"


async def push_to_fleet(
    engines: Sequence[EngineControl],
    send: Callable[[Sequence[EngineControl]], Awaitable[Outcomes]],
    *,
    version: str,
    mode: PauseMode,
) -> None:
    """Pause all engines, send them the weights, flush the KV caches, and let the engines continue.

    After an error or a cancellation, paused engines stay paused, because this push or an earlier push may
    have left different weights on different engines.

    Args:
        engines: the engines.
        send: sends the weights to every engine.
        version: the weight version of this push, for error messages.
        mode: how the engines pause. With every mode except `"in_place"`, this function flushes the KV caches
            before and after the update.

    Raises:
        WeightPushError: the push failed after `send` began. Some engines may have the new weights, and at
            least one engine may still be paused.
        SglangToppError: the push failed before `send`: an engine failed `EngineControl.check`, or could not
            be paused or flushed. No engine has received new weights.
    """
    _raise_first(await on_each(engines, EngineControl.check))
    unsent = f"no weights were sent. {_PAUSED}"
    _raise_first(await on_each(engines, lambda engine: engine.pause(mode)), unsent)
    flush = None if mode == "in_place" else lambda engine: engine.flush_cache(mode)
    if flush is not None:
        # Flush the KV caches before the update, so that no engine has new weights if a flush fails. The
        # update request itself would flush only after the update, and SGLang before 0.5.22 exits if that
        # flush fails.
        _raise_first(await on_each(engines, flush), unsent)
    try:
        outcomes = await send(engines)
    except SglangToppError as error:
        outcomes = [error] * len(engines)
    if any(outcomes):
        count = outcomes.count(None)
        raise _push_error(
            f"version {version!r} reached {count} of {len(engines)} engines. {_PAUSED}. Push again after"
            " fixing the cause. If an engine fails again, restart it, or exclude it",
            engines,
            [version if error is None else None for error in outcomes],
            outcomes,
        )
    everywhere: list[str | None] = [version] * len(engines)
    if flush is not None and any(outcomes := await on_each(engines, flush)):
        raise _push_error(
            f"version {version!r} is everywhere, but not every cache was flushed. {_PAUSED}",
            engines,
            everywhere,
            outcomes,
        )
    if any(outcomes := await on_each(engines, EngineControl.continue_generation)):
        raise _push_error(
            f"version {version!r} is everywhere, but not every engine continues",
            engines,
            everywhere,
            outcomes,
        )


async def on_each(
    engines: Sequence[EngineControl], step: Callable[[EngineControl], Awaitable[None]]
) -> Outcomes:
    """Run `step` on all engines at once, and return the outcome of each engine.

    An outcome is None or the SglangToppError that `step` raised. If `step` raises an exception of another
    class, `on_each` raises the same exception.
    """

    async def outcome(engine: EngineControl) -> SglangToppError | None:
        try:
            await step(engine)
        except SglangToppError as error:
            return error
        return None

    return await asyncio.gather(*map(outcome, engines))


def _raise_first(outcomes: Outcomes, note: str | None = None) -> None:
    for error in outcomes:
        if error is not None:
            if note is not None:
                error.add_note(note)
            raise error


def _push_error(
    summary: str, engines: Sequence[EngineControl], versions: Sequence[str | None], outcomes: Outcomes
) -> WeightPushError:
    lines = [summary]
    for engine, version, error in zip(engines, versions, outcomes, strict=True):
        weights = "weights unknown" if version is None else f"weights {version!r}"
        lines.append(f"  {engine.base_url}: {weights}" + ("" if error is None else f"; {error}"))
    by_url = {engine.base_url: version for engine, version in zip(engines, versions, strict=True)}
    failed = WeightPushError("\n".join(lines), weight_versions=by_url)
    failed.__cause__ = next(error for error in outcomes if error is not None)
    return failed
