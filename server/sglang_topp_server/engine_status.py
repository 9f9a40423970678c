"""EngineStatus: what is known of the engine, and the look that finds it.

A look asks `/server_info`, where the patch set reports of itself. A gateway before several engines has no
such route: it passes `/get_server_info`, its old name, to one of its workers, lists them all at `/workers`,
and answers `/health` for itself. So each worker is asked where the list says it is, and no gateway that
drops the request's fields on the way (some do, without an error) passes the last part of a first look:
one token with its candidate set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import httpx

from sglang_topp.engine_request import Model
from sglang_topp.errors import AuthenticationError, BadRequestError, SglangToppError, WireError

__all__ = ["EngineProbe", "EngineStatus", "Phase"]

Phase: TypeAlias = Literal["unreachable", "starting", "unpatched", "ready"]
"""See `EngineStatus`."""

# SGLang's /health waits 20 s for its token.
_TIMEOUT_S = 30.0
# The list may name workers that this machine does not reach: the others need not wait for those.
_WORKER_TIMEOUT_S = 10.0
_INFO, _GATEWAYS_INFO = "/server_info", "/get_server_info"


@dataclass(frozen=True)
class EngineStatus:
    """What one look at the engine found.

    Attributes:
        phase: `unreachable`: no answer, or one that is an error; `starting`: it answers and does not
            serve yet; `unpatched`: it answers, and candidate sets cannot be had from it; `ready`.
        reason: a sentence for people wherever `phase` is not `ready`.
        model_path, sglang_version, weight_version: as the engine reports them; behind a gateway, one of
            its workers.
        patch: what the patch set reports of itself; empty where it reports nothing.
        model: what requests are checked against; None where it was never reported.
    """

    phase: Phase
    reason: str = ""
    model_path: str | None = None
    sglang_version: str | None = None
    weight_version: str | None = None
    patch: dict[str, Any] = field(default_factory=dict)
    model: Model | None = None

    @property
    def is_patched(self) -> bool:
        """Whether the engine, when last heard, said that the patch set is in force."""
        return self.patch.get("active") is True

    @property
    def takes_grammars(self) -> bool:
        """Whether the engine, when last heard, survives a grammar that leaves no token to draw."""
        return self.patch.get("sanitizes_logits") is True

    @property
    def problems(self) -> list[str]:
        """Why the patch set is not in force, in its own words."""
        problems = self.patch.get("problems")
        return [str(problem) for problem in problems] if isinstance(problems, list) else []


class EngineProbe:
    """Looks at one engine, or at the gateway that stands there.

    Args:
        base_url: where it is.
        api_key: its key, or None.
        generate_one: generates one token with its candidate set, within so many seconds, and raises what
            is wrong with the answer.
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
            # The engine is beside the sidecar, or in its cluster: no proxy of the environment stands between.
            trust_env=False,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        )

    async def look(self, known: EngineStatus, *, is_healthy: bool) -> EngineStatus:
        """What is found now.

        Args:
            known: what was found before; where there is no usable answer, that stays known.
            is_healthy: whether to spare it `/health`, which makes a token.
        """
        if known.phase in ("unreachable", "unpatched"):
            # What comes back may be another.
            self._has_given_sets = False
        try:
            return await self._look(known, is_healthy=is_healthy)
        except Exception as error:
            # Whatever it is (no answer, no JSON, no such host), the next look may find better.
            return self._silent(known, f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _look(self, known: EngineStatus, *, is_healthy: bool) -> EngineStatus:
        answer = await self._get_info()
        if answer.status_code in (401, 403):
            return self._silent(known, "it refuses the sidecar's key; set SGLANG_TOPP_ENGINE_API_KEY")
        if answer.status_code != 200:
            return self._silent(
                known, f"its {self._info_path} answers {answer.status_code}: {answer.text[:200]}"
            )
        info = answer.json()
        if not isinstance(info, dict):
            return self._silent(known, f"its {self._info_path} is no object but {type(info).__name__}")
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
        """The answer of the route that answered last, or, where it is not there, of the other one."""
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
        """Every worker that the gateway sends requests to, and what it says of itself; without those that
        do not answer here: the gateway may be the only one that reaches them, or have their keys."""
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
        # A worker of several ranks is listed once for each: http://host:port@rank.
        with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError):
            answer = await self._http.get(url.partition("@")[0] + _INFO, timeout=_WORKER_TIMEOUT_S)
            if answer.status_code == 200 and isinstance(info := answer.json(), dict):
                return _status_of(info)
        return None

    async def _first_sets(self, known: EngineStatus, status: EngineStatus) -> EngineStatus:
        """Whether what is asked for arrives there, and what is answered arrives here."""
        try:
            await self._generate_one(_TIMEOUT_S)
        except AuthenticationError:
            return self._silent(
                known, "its /generate refuses the sidecar's key; set SGLANG_TOPP_ENGINE_API_KEY"
            )
        except (WireError, BadRequestError) as error:
            reason = (
                f"{self._base_url} says that the patch set is active, but one token with its candidate set"
                f" could not be had from it. Does something between here and the engine drop what it does"
                f" not know, as older gateways do? {error}"
            )
            return replace(status, phase="unpatched", reason=reason, patch={})
        except SglangToppError as error:
            reason = f"the engine at {self._base_url} is not ready: it gave no first token: {error}"
            return replace(status, phase="starting", reason=reason)
        self._has_given_sets = True
        return status

    def _silent(self, known: EngineStatus, cause: str) -> EngineStatus:
        """No usable answer; what was known stays known until there is one."""
        return replace(
            known, phase="unreachable", reason=f"the engine at {self._base_url} does not answer: {cause}"
        )


def _status_of(info: dict[str, Any]) -> EngineStatus:
    """Ready, as far as `/server_info` can tell."""
    patch = info.get("sglang_topp")
    patch = patch if isinstance(patch, dict) else {}
    return EngineStatus(
        "ready",
        model_path=_text(info.get("model_path")),
        sglang_version=_text(info.get("version")),
        weight_version=_text(info.get("weight_version")),
        patch=patch,
        model=Model.from_record(patch.get("model")),
    )


def _why_unpatched(status: EngineStatus, where: str) -> str:
    version = f"SGLang {status.sglang_version}" if status.sglang_version else "no SGLang that says so"
    if not status.patch:
        return (
            f"{where} ({version}) runs without the sglang-topp patch set: its"
            " /server_info does not mention it. Install sglang-topp in the engine's environment, leave it"
            " in SGLANG_PLUGINS if that is set, and see `sglang-topp doctor`"
        )
    if status.is_patched:
        return (
            f"the patch set in {where} ({version}) reports no sizes of its model, which requests are checked"
            " against; install the same sglang-topp there and here"
        )
    causes = "; ".join(status.problems) or "it gives no reason"
    return f"the patch set is not active in {where} ({version}): {causes}"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
