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

import httpx

from sglang_topp.engine_contract import Model
from sglang_topp.errors import AuthenticationError, BadRequestError, SglangToppError, WireError

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
        base_url: the address of the engine or gateway.
        api_key: the API key of the engine or gateway, or None.
        generate_one: generates one token with its candidate set, or raises an error. The argument of
            `generate_one` is the time limit in seconds.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None, generate_one: Callable[[float], Awaitable[object]]
    ) -> None:
        self._base_url = base_url
        self._generate_one = generate_one
        self._info_path = _INFO
        self._has_given_sets = False
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=_TIMEOUT_S,
            # Ignore the environment's proxy settings: the sidecar connects to the engine directly.
            trust_env=False,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        )

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
            return await self._look(known, is_healthy=is_healthy)
        except Exception as error:
            # On any failure, such as a refused connection, invalid JSON, or an unknown host, report the
            # engine as unreachable. The sidecar keeps probing, so a failure is not final.
            return self._silent(known, f"{type(error).__name__}: {error}")

    async def weight_version(self) -> str | None:
        """Return the version of the engine's weights, or None if the engine doesn't say.

        This is a new request: `/server_info` keeps the version of the engine's start.
        """
        with suppress(httpx.HTTPError, ValueError, AttributeError):
            for path in ("/model_info", "/get_model_info"):
                answer = await self._http.get(path, timeout=_VERSION_TIMEOUT_S)
                if answer.status_code == 200:
                    return _text(answer.json().get("weight_version"))
        return None

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _look(self, known: EngineStatus, *, is_healthy: bool) -> EngineStatus:
        answer = await self._get_info()
        if answer.status_code in (401, 403):
            return self._silent(known, "it refuses the sidecar's key; set SGLANG_TOPP_ENGINE_API_KEY")
        if answer.status_code != 200:
            return self._silent(
                known, f"its {self._info_path} answers HTTP {answer.status_code}: {answer.text[:200]}"
            )
        info = answer.json()
        if not isinstance(info, dict):
            return self._silent(
                known, f"its {self._info_path}: got {type(info).__name__}, expected an object"
            )
        status = _status_of(info)
        seen = [(f"the engine at {self._base_url}", status)]
        if self._info_path == _GATEWAYS_INFO:
            behind = f"behind the gateway at {self._base_url}"
            seen = [(f"the engine at {url} {behind}", worker) for url, worker in await self._workers()]
            seen.append((f"an engine {behind}", status))
        for where, each in seen:
            if not each.is_patched or each.model is None:
                return replace(each, phase="unpatched", reason=_why_unpatched(each, where))
        if not is_healthy:
            health = await self._http.get("/health")
            if health.status_code != 200:
                reason = f"the engine at {self._base_url} is not ready: its /health answers"
                return replace(status, phase="starting", reason=f"{reason} {health.status_code}")
        return status if self._has_given_sets else await self._first_sets(known, status)

    async def _get_info(self) -> httpx.Response:
        """Request `/server_info` or `/get_server_info`, whichever of the two answered last time.

        If the requested route answers 404, request the other of the two routes.
        """
        first = await self._http.get(self._info_path)
        if first.status_code != 404:
            return first
        other = _GATEWAYS_INFO if self._info_path == _INFO else _INFO
        second = await self._http.get(other)
        if second.status_code == 404:
            return first
        self._info_path = other
        return second

    async def _workers(self) -> list[tuple[str, EngineStatus]]:
        """Return the address and status of each worker that the gateway lists and that answers the sidecar.

        The result omits a worker that does not answer the sidecar. Perhaps only the gateway can reach such a
        worker, or only the gateway has the worker's key.
        """
        answer = await self._http.get("/workers")
        listed: Any = answer.json() if answer.status_code == 200 else None
        workers = listed.get("workers") if isinstance(listed, dict) else None
        urls = [
            worker["url"].rstrip("/")
            for worker in (workers if isinstance(workers, list) else [])
            if isinstance(worker, dict)
            and isinstance(worker.get("url"), str)
            and worker.get("is_healthy") is not False
        ]
        found = await asyncio.gather(*map(self._worker, urls))
        return [(url, status) for url, status in zip(urls, found, strict=True) if status is not None]

    async def _worker(self, url: str) -> EngineStatus | None:
        # If a worker has several ranks, the gateway lists each rank separately, as http://host:port@rank.
        with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError):
            answer = await self._http.get(url.partition("@")[0] + _INFO, timeout=_WORKER_TIMEOUT_S)
            if answer.status_code == 200 and isinstance(info := answer.json(), dict):
                return _status_of(info)
        return None

    async def _first_sets(self, known: EngineStatus, status: EngineStatus) -> EngineStatus:
        """Request one token and its set, and return `status` if the engine returns the token and the set.

        If the request fails, return a status with a phase other than `ready`, and with the failure's reason.
        """
        try:
            await self._generate_one(_TIMEOUT_S)
        except AuthenticationError:
            return self._silent(
                known, "its /generate refuses the sidecar's key; set SGLANG_TOPP_ENGINE_API_KEY"
            )
        except (WireError, BadRequestError) as error:
            reason = (
                f"{self._base_url} says that the plugin is active, but it did not return one token with"
                f" its candidate set. Does something between the sidecar and the engine drop fields that"
                f" it does not know, as older gateways do? {error}"
            )
            return replace(status, phase="unpatched", reason=reason, patch={})
        except SglangToppError as error:
            reason = f"the engine at {self._base_url} is not ready: it generated no first token: {error}"
            return replace(status, phase="starting", reason=reason)
        self._has_given_sets = True
        return status

    def _silent(self, known: EngineStatus, cause: str) -> EngineStatus:
        """Return `known` with the phase `unreachable` and a reason that quotes `cause`."""
        return replace(
            known, phase="unreachable", reason=f"the engine at {self._base_url} does not answer: {cause}"
        )


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
