"""EngineControl: pause and continue one SGLang engine, update its weights, and flush its cache, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from sglang_topp.errors import (
    BadRequestError,
    InvalidInputError,
    ServerError,
    SglangToppError,
    WireError,
    describe,
)
from sglang_topp_client.retry_policy import retrying
from sglang_topp_client.transport.http import HttpClient
from sglang_topp_client.transport.server_config import ServerConfig
from sglang_topp_client.value_checks import decode_json
from sglang_topp_client.weight_push.tensors_to_push import CheckpointTensors

PauseMode: TypeAlias = Literal["retract", "abort", "in_place"]
Transport: TypeAlias = Literal["disk", "tensor", "distributed"]

# How many seconds a flush of the KV cache waits for aborted requests to leave SGLang's scheduler. The
# scheduler removes an aborted request within a few scheduling steps.
_ABORTED_LEAVE_S = 30

# How often a step that may be repeated is retried.
_MAX_RETRIES = 3

_CHECKPOINT_TENSORS = "/sglang_topp/checkpoint_tensors"

# SGLang's messages for an update from a folder that failed before SGLang loaded a tensor.
_NOT_LOADED = ("Failed to get weights iterator", "Failed to get model loader")

Outcomes: TypeAlias = list[SglangToppError | None]
"""The outcome of one step, such as a pause or an update, on each engine, in the order of the engines.

If the step succeeded on an engine, the engine's outcome is None. Otherwise, the outcome is the error.
"""


class NotLoadedError(SglangToppError):
    """An engine failed an update before it loaded a tensor, so it still has all of its old weights."""

    def __init__(self, cause: SglangToppError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class EngineControl:
    """A client for one engine's control routes, used from one event loop.

    Args:
        config: the engine's address and key.
        timeout_s: the time limit of each step, such as one pause or one update.
        via: the transport of the weights.

    Attributes:
        tp_size: the engine's number of tensor-parallel ranks; 1 until `check` has read the number from the
            server. With the transport `"disk"`, `check` does not read this number, and `tp_size` stays 1.
        was_paused: whether the engine was paused when `check` asked it.
        tensors: the tensors that the engine loads, which `check` reads.
    """

    tensors: CheckpointTensors

    def __init__(self, config: ServerConfig, timeout_s: float, via: Transport = "disk") -> None:
        self.base_url = config.base_url
        self.tp_size = 1
        self.was_paused = True
        self._has_draft = False
        self._via = via
        self._is_updating = False
        self._http = HttpClient(config)
        self._timeout_s = timeout_s

    async def check(self) -> None:
        """Check that the server is an engine to which the transport `via` can send weights.

        A sidecar or a gateway is not an engine.

        Raises:
            InvalidInputError: the server is not an engine with sglang-topp, its checkpoint cannot be read, or
                the transport cannot send weights to all ranks of the engine.
            SglangToppError: the server does not answer, or rejects the client's API key.
        """
        try:
            raw = await self._repeat("GET", "/server_info")
            info = decode_json(raw, dict[str, Any], field="/server_info")
        except BadRequestError as error:
            if error.status not in (404, 405):
                raise
            info = {}
        if "model_path" not in info:
            raise InvalidInputError(
                f"engine_url: {self.base_url} has no /server_info of SGLang, expected an engine; sidecars and"
                " gateways pass no weights on, so name the engines behind them"
            )
        if not isinstance(plugin := info.get("sglang_topp"), dict):
            raise InvalidInputError(
                f"engine_url: {self.base_url} runs SGLang without sglang-topp, expected an engine with it; it"
                " says which tensors the engine loads"
            )
        # An engine that does not say whether it is paused counts as paused, so that nothing continues it.
        self.was_paused = plugin.get("is_paused") is not False
        self._has_draft = info.get("speculative_algorithm") is not None
        self.tensors = await self.checkpoint_tensors()
        if self._via == "disk":
            return
        for name in ("tp_size", "dp_size", "pp_size"):
            count = info.get(name)
            if type(count) is not int or count < 1:
                raise WireError(name, f"got {describe(count)} in /server_info, expected a number of ranks")
            if name == "tp_size":
                self.tp_size = count
            elif count != 1:
                raise InvalidInputError(
                    f"via: got {self._via!r}, but {self.base_url} has {name} {count}, expected 1; use"
                    " via='disk'"
                )

    async def checkpoint_tensors(self, path: str | None = None) -> CheckpointTensors:
        """Return the tensors of the checkpoint at `path`, or of the one that the engine was started with.

        Raises:
            InvalidInputError: the engine cannot read the checkpoint.
            SglangToppError: the request failed.
        """
        query = "" if path is None else f"?model_path={quote(path, safe='')}"
        try:
            raw = await self._repeat("GET", _CHECKPOINT_TENSORS + query)
            return decode_json(raw, CheckpointTensors, field=_CHECKPOINT_TENSORS)
        except BadRequestError as error:
            raise InvalidInputError(
                f"{'engine_url' if path is None else 'weights'}: {self.base_url}: {error}"
            ) from error

    async def pause(self, mode: PauseMode) -> None:
        """Stop generation. The mode `"abort"` ends the requests in flight.

        In the modes `"retract"` and `"in_place"`, the requests in flight wait until the engine continues.
        """
        await self._repeat("POST", "/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Continue generation."""
        await self._repeat("POST", "/continue_generation", {})

    async def flush_cache(self, mode: PauseMode) -> None:
        """Free the KV cache of a paused engine.

        Raises:
            BadRequestError: SGLang refused the flush, because requests still hold memory of the KV cache, or
                because retracted requests wait to run again. Retracted requests block a flush only if SGLang
                is older than 0.5.21 or runs with `--pp-size`.
        """
        # The flush request has a timeout only in the mode "abort", in which SGLang's scheduler keeps running.
        # In the mode "retract", the scheduler is paused and never checks the timeout.
        path = f"/flush_cache?timeout={_ABORTED_LEAVE_S}" if mode == "abort" else "/flush_cache"
        try:
            await self._repeat("POST", path, timeout_s=self._timeout_s + _ABORTED_LEAVE_S)
        except BadRequestError as error:
            raise BadRequestError(
                f"pause: got {mode!r}, but {self.base_url} cannot flush its KV cache, because requests"
                " still hold or wait for it; SGLang before 0.5.21, and SGLang with --pp-size, flush only"
                " without requests. Push between the"
                ' rollouts, or use pause="abort" and generate with on_abort="resume"',
                status=error.status,
                body=error.body,
            ) from error

    async def update_from_disk(self, path: str, version: str) -> None:
        """Tell the engine to load the weights from the folder `path`, which the engine must be able to read.

        Raises:
            NotLoadedError: the engine could not read the folder, and has its old weights.
            SglangToppError: the update failed, and the engine's weights are unknown. SGLang's error message
                claims a rollback to the original weights. In fact, SGLang loads the new folder again.
        """
        # The update request must not ask SGLang to flush the KV cache, because SGLang before 0.5.22 exits if
        # a flush within an update fails. `WeightPusher` flushes the cache in separate requests, before and
        # after the update.
        body = {"model_path": path, "weight_version": version, "flush_cache": False}
        try:
            await self.update("/update_weights_from_disk", body)
        except BadRequestError as error:
            # SGLang joins the messages of data-parallel ranks. It loads a draft model after the target.
            messages = str(error).partition(f"HTTP {error.status}: ")[2].split(" | ")
            if not self._has_draft and all(each.startswith(_NOT_LOADED) for each in messages):
                raise NotLoadedError(error) from error
            raise

    async def begin_update(self) -> None:
        """Begin an update session, which lasts from `/begin_weight_update` to `/end_weight_update`.

        SGLang 0.5.21 and later accept tensors only in an update session. On SGLang before 0.5.21, which has
        no update sessions, this method does nothing.

        Raises:
            SglangToppError: the engine did not begin an update session.
        """
        try:
            await self.update("/begin_weight_update", {})
        except BadRequestError as error:
            if error.status in (404, 405):
                return
            # An earlier push may have failed and left its update session open. End the old update session, so
            # that a new one can begin.
            await self.update("/end_weight_update", {})
            await self.update("/begin_weight_update", {})
        self._is_updating = True

    async def end_update(self) -> None:
        """End the engine's update session if `begin_update` began one.

        Raises:
            SglangToppError: the engine did not end the update session, and the engine's weights are unknown.
        """
        if self._is_updating:
            self._is_updating = False
            await self.update("/end_weight_update", {})

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def update(self, path: str, body: dict[str, Any] | bytes) -> None:
        """Send one step of an update: a bucket of tensors, or an order to a torch process group.

        Raises:
            SglangToppError: the step failed. If it sent weights, the engine's weights are unknown.
        """
        answer = await self._http.request_json("POST", path, body, timeout_s=self._timeout_s)
        if answer.get("success") is not True:
            raise ServerError(f"POST {self.base_url}{path}: got {answer!r}, expected success", status=200)

    async def _repeat(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> bytes:
        """Send a request that may be repeated, and repeat it after a failure that may pass."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + (timeout_s or self._timeout_s)
        return await retrying(
            lambda: self._http.request(method, path, body, timeout_s=max(deadline - clock(), 0.001)),
            _MAX_RETRIES,
            deadline=deadline,
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


async def begin_updates(engines: Sequence[EngineControl]) -> Outcomes:
    """Begin an update session on every engine, or on none, and return the outcome of each engine."""
    outcomes = await on_each(engines, EngineControl.begin_update)
    if (first := next((error for error in outcomes if error is not None), None)) is None:
        return outcomes
    ends = await on_each(engines, EngineControl.end_update)
    return [end or NotLoadedError(error or first) for error, end in zip(outcomes, ends, strict=True)]
