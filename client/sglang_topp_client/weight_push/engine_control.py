"""EngineControl: pause one SGLang engine, update its weights, flush its cache, and continue, over HTTP."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from sglang_topp.errors import BadRequestError, InvalidInputError, ServerError, WireError, describe
from sglang_topp_client.transport.http import HttpClient, ServerConfig
from sglang_topp_client.transport.long_message_slots import UNLIMITED

__all__ = ["PAUSE_MODES", "TRANSPORTS", "EngineControl", "PauseMode", "Transport"]

PauseMode: TypeAlias = Literal["retract", "abort", "in_place"]
PAUSE_MODES = ("retract", "abort", "in_place")
Transport: TypeAlias = Literal["disk", "tensor", "distributed"]
TRANSPORTS = ("disk", "tensor", "distributed")

# How many seconds a flush waits for aborted requests to leave the scheduler. Aborted requests leave within a
# few steps of the scheduler.
_ABORTED_LEAVE_S = 30


class EngineControl:
    """A client for one engine's control routes, used from one event loop.

    Args:
        config: the engine's address and key.
        timeout_s: the time limit of each step, such as one pause or one update.
        via: the transport of the weights.

    Attributes:
        tp_size: the number of tensor-parallel ranks. `check` sets this attribute, unless `via` is `"disk"`.
    """

    def __init__(self, config: ServerConfig, timeout_s: float, via: Transport = "disk") -> None:
        self.base_url = config.base_url
        self.tp_size = 1
        self._via = via
        self._is_updating = False
        self._http = HttpClient(config, UNLIMITED)
        self._timeout_s = timeout_s

    async def check(self) -> None:
        """Check that the server is an engine to which the transport `via` can send weights.

        A sidecar or a gateway is not an engine.

        Raises:
            InvalidInputError: the server is not an engine, or the transport cannot reach all of its ranks.
            SglangToppError: the server does not answer, or refuses the key.
        """
        try:
            info = await self._http.request_json("GET", "/server_info", timeout_s=self._timeout_s)
        except BadRequestError as error:
            if error.status not in (404, 405):
                raise
            info = None
        if not isinstance(info, dict) or "model_path" not in info:
            raise InvalidInputError(
                f"engine_url: {self.base_url} has no /server_info of SGLang, expected an engine; sidecars and"
                " gateways pass no weights on, so name the engines behind them"
            )
        if self._via == "disk":
            return
        self.tp_size = _rank_count(info, "tp_size")
        for name in ("dp_size", "pp_size"):
            if (count := _rank_count(info, name)) != 1:
                raise InvalidInputError(
                    f"via: got {self._via!r}, but {self.base_url} has {name} {count}, expected 1; use"
                    " via='disk'"
                )

    async def pause(self, mode: PauseMode) -> None:
        """Stop generation. The mode `"abort"` ends the requests in flight.

        In the other modes, the requests in flight wait until the engine continues.
        """
        await self._post("/pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        """Continue generation."""
        await self._post("/continue_generation", {})

    async def flush_cache(self, mode: PauseMode) -> None:
        """Free the KV cache of a paused engine.

        Raises:
            BadRequestError: requests still hold memory of the KV cache. SGLang before 0.5.21 also refuses a
                flush while retracted requests wait. With --pp-size, every release of SGLang does so.
        """
        # The request has a timeout only in the mode "abort", in which the scheduler keeps running. In the
        # other modes, the scheduler is paused and never checks the timeout.
        path = f"/flush_cache?timeout={_ABORTED_LEAVE_S}" if mode == "abort" else "/flush_cache"
        try:
            await self._http.request("POST", path, timeout_s=self._timeout_s + _ABORTED_LEAVE_S)
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
        """Let the engine load the weights in a folder that it can read.

        Raises:
            SglangToppError: the update failed, and the engine's weights are unknown. SGLang reports a
                rollback to the earlier weights, but the rollback loads the new folder again.
        """
        # The update does not flush the cache, because SGLang before 0.5.22 exits if a flush within an update
        # fails. `push_to_fleet` flushes the cache before and after the update.
        body = {"model_path": path, "weight_version": version, "flush_cache": False}
        await self._update("/update_weights_from_disk", body)

    async def begin_update(self) -> None:
        """Begin an update session, in which the engine accepts tensors.

        SGLang 0.5.21 and later accept tensors only between `/begin_weight_update` and `/end_weight_update`.
        On earlier releases, which lack these routes, this method does nothing.

        Raises:
            SglangToppError: the engine did not begin a session.
        """
        try:
            await self._update("/begin_weight_update", {})
        except BadRequestError as error:
            if error.status in (404, 405):
                return
            # An earlier push that failed may have left its update session open. Ending that session lets a
            # new session begin.
            await self._update("/end_weight_update", {})
            await self._update("/begin_weight_update", {})
        self._is_updating = True

    async def update_from_tensors(self, body: bytes) -> None:
        """Let the engine load one bucket of tensors from the request body.

        `body` is JSON that contains the values of the tensors.

        Raises:
            SglangToppError: the update failed, and the engine's weights are unknown.
        """
        await self._update("/update_weights_from_tensor", body)

    async def join_group(self, body: dict[str, Any]) -> None:
        """Let every rank of the engine join a process group. Return once all members have joined."""
        await self._update("/init_weights_update_group", body)

    async def update_from_broadcast(self, body: dict[str, Any]) -> None:
        """Let the engine load one bucket of tensors, while rank 0 of the process group broadcasts them.

        Raises:
            SglangToppError: the update failed, and the engine's weights are unknown.
        """
        await self._update("/update_weights_from_distributed", body)

    async def leave_group(self, name: str) -> None:
        """Let every rank of the engine leave a process group."""
        await self._update("/destroy_weights_update_group", {"group_name": name})

    async def end_update(self) -> None:
        """End the update session if `begin_update` began one.

        Raises:
            SglangToppError: the engine did not end the update session. Its weights are unknown.
        """
        if self._is_updating:
            self._is_updating = False
            await self._update("/end_weight_update", {})

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _update(self, path: str, body: dict[str, Any] | bytes) -> None:
        answer = await self._post(path, body)
        if not isinstance(answer, dict) or answer.get("success") is not True:
            raise ServerError(f"POST {self.base_url}{path}: got {answer!r}, expected success", status=200)

    async def _post(self, path: str, body: dict[str, Any] | bytes) -> Any:
        return await self._http.request_json("POST", path, body, timeout_s=self._timeout_s)


def _rank_count(info: dict[str, Any], name: str) -> int:
    count = info.get(name)
    if type(count) is not int or count < 1:
        raise WireError(name, f"got {describe(count)} in /server_info, expected a number of ranks")
    return count
