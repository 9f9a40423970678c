"""EngineProbe: find out whether the engine, or a gateway in front of several engines, is ready and patched.

A probe requests `/server_info` from the engine. In the answer, the plugin reports its state. A gateway
does not serve `/server_info`. A gateway forwards the older `/get_server_info` to one worker, and lists all
workers at `/workers`. If `/server_info` answers 404, the probe therefore requests `/get_server_info`. If that
route answers, the probe assumes a gateway, and also requests `/server_info` directly from each worker that
the gateway lists, except from unhealthy workers.

A probe ends with a test request for one token and its candidate set. Once a test request has succeeded, later
probes omit it. If a probe finds the engine unreachable or unpatched, later probes send a test request again.
The test request fails if a gateway silently drops sglang-topp's request fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from sglang_topp.engine_contract import Model
from sglang_topp.errors import (
    AuthenticationError,
    BadRequestError,
    ResponseError,
    SglangToppError,
    WireError,
)
from sglang_topp_client.transport.http import HttpClient
from sglang_topp_client.transport.server_config import ServerConfig

__all__ = ["EngineProbe", "EngineStatus", "Phase"]

Phase: TypeAlias = Literal["unreachable", "starting", "unpatched", "ready"]
"""Whether an engine answers, can generate, and returns candidate sets.

`EngineStatus.phase` explains each value.
"""

# The timeout of a request to the engine. SGLang's `/health` generates a token and waits up to 20 s for the
# token, so this timeout must be longer than 20 s.
_TIMEOUT_S = 30.0
# The timeout of a request to a gateway's worker. A gateway may list workers that this machine cannot reach,
# so this timeout is shorter than `_TIMEOUT_S`.
_WORKER_TIMEOUT_S = 10.0
# `GET /info` waits this long for the version of the weights.
_VERSION_TIMEOUT_S = 5.0
_INFO, _GATEWAYS_INFO = "/server_info", "/get_server_info"


@dataclass(frozen=True)
class EngineStatus:
    """The result of one probe of the engine.

    Attributes:
        phase: one of four words. `unreachable`: the engine does not answer, or answers with an error.
            `starting`: the engine answers but cannot generate yet. `unpatched`: the engine answers but
            returns no candidate sets. `ready`: the engine returns candidate sets.
        reason: a sentence that says why the engine is not `ready`; empty if it is ready.
        model_path, sglang_version: the values that the engine reported. A gateway reports the values of one
            of its workers.
        patch: the plugin's report of its state; empty if the engine sent no report, or returned no
            candidate set for the probe's test request.
        model: the sizes of the engine's model, such as its vocabulary size; None if the engine did not report
            the sizes. The sidecar checks requests against these sizes.
    """

    phase: Phase
    reason: str = ""
    model_path: str | None = None
    sglang_version: str | None = None
    patch: dict[str, Any] = field(default_factory=dict)
    model: Model | None = None

    @property
    def is_patched(self) -> bool:
        """Return whether the plugin is active, according to the engine's last report."""
        return self.patch.get("active") is True

    @property
    def survives_grammars(self) -> bool:
        """Return whether the engine reported that it survives a grammar that forbids every next token."""
        return self.patch.get("sanitizes_logits") is True

    @property
    def problems(self) -> list[str]:
        """Return the plugin's reasons for being inactive."""
        problems = self.patch.get("problems")
        return [str(problem) for problem in problems] if isinstance(problems, list) else []


class EngineProbe:
    """A probe of one engine, or of a gateway.

    Args:
        config: the connection settings of the engine or gateway.
        generate_one: generates one token with its candidate set, or raises an error. The argument of
            `generate_one` is the time limit in seconds.
    """

    def __init__(self, config: ServerConfig, *, generate_one: Callable[[float], Awaitable[object]]) -> None:
        self._config = config
        self._generate_one = generate_one
        self._is_gateway = self._has_given_sets = False
        self._http = HttpClient(config)

    async def look(self, known: EngineStatus, *, is_healthy: bool) -> EngineStatus:
        """Probe the engine once, and return its status.

        Args:
            known: the previous status. If the engine does not answer the probe, the new status is the
                previous one with the phase `unreachable` and a new reason.
            is_healthy: if True, skip the request to `/health`, which would make the engine generate a token.
        """
        if known.phase in ("unreachable", "unpatched"):
            # Another engine may have started at this address, so check again that the engine returns
            # candidate sets.
            self._has_given_sets = False
        try:
            return await self._look(is_healthy=is_healthy)
        except AuthenticationError as error:
            cause = f"it refuses the sidecar's key; set SGLANG_TOPP_ENGINE_API_KEY: {error}"
        except Exception as error:
            # The sidecar keeps probing, so no failure is final.
            cause = f"{type(error).__name__}: {error}"
        reason = f"the engine at {self._config.base_url} does not answer: {cause}"
        return replace(known, phase="unreachable", reason=reason)

    async def weight_version(self) -> str | None:
        """Return the version of the engine's weights, or None if the engine doesn't say.

        This is a new request: `/server_info` keeps the version of the engine's start.
        """
        with suppress(SglangToppError):
            try:
                info = await _get_object(self._http, "/model_info", _VERSION_TIMEOUT_S)
            except BadRequestError:
                info = await _get_object(self._http, "/get_model_info", _VERSION_TIMEOUT_S)
            return _text(info.get("weight_version"))
        return None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _look(self, *, is_healthy: bool) -> EngineStatus:
        status = _status_of(await self._info())
        url = self._config.base_url
        seen = [(f"the engine at {url}", status)]
        if self._is_gateway:
            behind = f"behind the gateway at {url}"
            seen = [(f"the engine at {one} {behind}", worker) for one, worker in await self._workers()]
            seen.append((f"an engine {behind}", status))
        for where, each in seen:
            if not each.is_patched or each.model is None:
                return replace(each, phase="unpatched", reason=_why_unpatched(each, where))
        if not is_healthy and (health := await self._http.probe("/health", timeout_s=_TIMEOUT_S)) != 200:
            reason = f"the engine at {url} is not ready: its /health answers {health or 'nothing'}"
            return replace(status, phase="starting", reason=reason)
        try:
            if not self._has_given_sets:
                await self._generate_one(_TIMEOUT_S)
        except AuthenticationError:
            raise
        except (WireError, BadRequestError) as error:
            reason = (
                f"{url} says that the plugin is active, but it did not return one token with"
                f" its candidate set. Does something between the sidecar and the engine drop fields that"
                f" it does not know, as older gateways do? {error}"
            )
            return replace(status, phase="unpatched", reason=reason, patch={})
        except SglangToppError as error:
            reason = f"the engine at {url} is not ready: it generated no first token: {error}"
            return replace(status, phase="starting", reason=reason)
        self._has_given_sets = True
        return status

    async def _info(self) -> dict[str, Any]:
        """Request `/server_info` or `/get_server_info`, whichever of the two answered last time."""
        missing: BadRequestError | None = None
        for _ in range(2):
            path = _GATEWAYS_INFO if self._is_gateway else _INFO
            try:
                return await _get_object(self._http, path, _TIMEOUT_S)
            except BadRequestError as error:
                if error.status != 404:
                    raise
                missing = missing or error
                self._is_gateway = not self._is_gateway
        assert missing is not None
        raise missing

    async def _workers(self) -> list[tuple[str, EngineStatus]]:
        """Return the address and status of each worker that the gateway lists and that answers the sidecar.

        The result omits a worker that does not answer the sidecar. Perhaps only the gateway can reach such a
        worker, or only the gateway has the worker's key.
        """
        listed: Any = None
        with suppress(ResponseError, WireError):
            listed = (await _get_object(self._http, "/workers", _TIMEOUT_S)).get("workers")
        # If a worker has several ranks, the gateway lists each rank separately, as http://host:port@rank.
        urls = [
            str(worker.get("url")).rstrip("/").partition("@")[0]
            for worker in (listed if isinstance(listed, list) else [])
            if isinstance(worker, dict) and worker.get("is_healthy") is not False
        ]
        found = await asyncio.gather(*map(self._worker, urls))
        return [(url, status) for url, status in zip(urls, found, strict=True) if status is not None]

    async def _worker(self, url: str) -> EngineStatus | None:
        with suppress(SglangToppError):
            http = HttpClient(replace(self._config, base_url=url))
            try:
                return _status_of(await _get_object(http, _INFO, _WORKER_TIMEOUT_S))
            finally:
                await http.aclose()
        return None


async def _get_object(http: HttpClient, path: str, timeout_s: float) -> dict[str, Any]:
    answer = await http.request_json("GET", path, timeout_s=timeout_s)
    if not isinstance(answer, dict):
        raise WireError(path, f"got {type(answer).__name__}, expected an object")
    return answer


def _status_of(info: dict[str, Any]) -> EngineStatus:
    """Build a status from an engine's `/server_info` answer, and set its phase to `ready`."""
    patch = info.get("sglang_topp")
    patch = patch if isinstance(patch, dict) else {}
    return EngineStatus(
        "ready",
        model_path=_text(info.get("model_path")),
        sglang_version=_text(info.get("version")),
        patch=patch,
        model=Model.from_record(patch.get("model")),
    )


def _why_unpatched(status: EngineStatus, where: str) -> str:
    version = f"SGLang {status.sglang_version}" if status.sglang_version else "unknown SGLang version"
    if not status.patch:
        return (
            f"{where} ({version}) runs without the sglang-topp plugin: its"
            " /server_info does not mention it. Install sglang-topp in the engine's environment, leave it"
            " in SGLANG_PLUGINS if that is set, and see `sglang-topp doctor`"
        )
    if status.is_patched:
        return (
            f"the plugin in {where} ({version}) does not report its model's sizes, which request checks"
            " need; install the same sglang-topp there and here"
        )
    causes = "; ".join(status.problems) or "it gives no reason"
    return f"the plugin is not active in {where} ({version}): {causes}"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
