"""Engine: the patched SGLang behind the sidecar, what is known of it, and the samples that it makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import httpx

from sglang_topp.engine_request import Model
from sglang_topp.errors import (
    MissingCandidateSetsError,
    PatchError,
    ServerError,
    SglangToppError,
    TransportError,
)
from sglang_topp_client import AsyncRolloutClient, Rollout
from sglang_topp_client.request import SampleRequest
from sglang_topp_server.held import Share
from sglang_topp_server.problems import as_known_error, upstream_error
from sglang_topp_server.schema import RolloutRequest

__all__ = ["Engine", "EngineStatus", "FailedPrompt"]

# SGLang's /health waits 20 s for its token.
_PROBE_TIMEOUT_S = 30.0
_POLL_READY_S = 10.0
_POLL_OTHERWISE_S = 0.5


@dataclass(frozen=True)
class EngineStatus:
    """What one look at the engine found.

    Attributes:
        phase: `unreachable`: no answer, or one that is an error; `starting`: it answers and does not
            serve yet; `unpatched`: it answers, and candidate sets cannot be had from it; `ready`.
        reason: a sentence for people wherever `phase` is not `ready`.
        model_path, sglang_version, weight_version: as the engine reports them.
        patch: what the patch set reports of itself; empty where it reports nothing.
        model: what requests are checked against; None where it was never reported.
    """

    phase: Literal["unreachable", "starting", "unpatched", "ready"]
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


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that failed: no more of its samples will come."""

    prompt_index: int
    error: SglangToppError


class _Client(AsyncRolloutClient):
    # Of all callers: what several of these hold while they are taken apart is all that is held beyond
    # finished samples.
    _LONG_LINES_AT_ONCE = 4


class Engine:
    """One engine. To be used within one event loop, and closed there.

    Args:
        base_url: where SGLang's HTTP server is.
        api_key: the engine's own key, or None.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.status = EngineStatus("unreachable", f"the engine at {self.base_url} was not asked yet")
        self._has_been_ready = False
        self._looked = asyncio.Event()
        self._in_doubt = asyncio.Event()
        # One retry: a connection that the engine dropped while idle. Waiting out a longer outage is the
        # caller's choice, and retries on both sides would multiply.
        self._client = _Client(
            self.base_url, kind="sglang", api_key=api_key, max_connections=4096, max_retries=1
        )
        self._probes = httpx.AsyncClient(
            base_url=self.base_url,
            timeout=_PROBE_TIMEOUT_S,
            # The engine is beside the sidecar, or in its cluster: no proxy of the environment stands between.
            trust_env=False,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
        )

    # -- what is known of it -----------------------------------------------------------------------

    async def watch(self) -> None:
        """Look at the engine again and again, and at once when a request cast doubt on it; never returns."""
        while True:
            in_doubt = self._in_doubt.is_set()
            self._in_doubt.clear()
            try:
                self.status = await self._look(is_healthy=self.status.phase == "ready" and not in_doubt)
            except Exception as error:
                # Whatever it is (no answer, no JSON, no such host), the next look may find better.
                self.status = self._silent(f"{type(error).__name__}: {error}")
            if self.status.phase in ("ready", "unpatched"):
                self._has_been_ready = self.status.phase == "ready"
            self._looked.set()
            await asyncio.sleep(_POLL_OTHERWISE_S)
            if self.status.phase == "ready":
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._in_doubt.wait(), _POLL_READY_S)

    async def require_ready(self) -> Model:
        """The engine's model, where the engine has been seen ready, and not unpatched since.

        An engine that is silent now is asked all the same: it may only be busy, and if it is gone the
        request itself tells how.

        Raises:
            PatchError: it is not patched.
            ServerError: 503, it has not been ready yet.
        """
        await self._looked.wait()
        if self.status.phase == "unpatched":
            raise PatchError(self.status.reason)
        if not self._has_been_ready or self.status.model is None:
            raise ServerError(self.status.reason, status=503)
        return self.status.model

    async def _look(self, *, is_healthy: bool) -> EngineStatus:
        """Ask `/server_info`, which SGLang answers from its scheduler, and `/health`, which has it make a
        token, unless the engine is known to be healthy."""
        answer = await self._probes.get("/server_info")
        if answer.status_code in (401, 403):
            return self._silent("it refuses the sidecar's key; set SGLANG_TOPP_ENGINE_API_KEY")
        if answer.status_code != 200:
            return self._silent(f"its /server_info answers {answer.status_code}: {answer.text[:200]}")
        info = answer.json()
        if not isinstance(info, dict):
            return self._silent(f"its /server_info is no object but {type(info).__name__}")
        patch = info.get("sglang_topp")
        patch = patch if isinstance(patch, dict) else {}
        status = EngineStatus(
            "ready",
            model_path=_text(info.get("model_path")),
            sglang_version=_text(info.get("version")),
            weight_version=_text(info.get("weight_version")),
            patch=patch,
            model=Model.from_record(patch.get("model")),
        )
        if not status.is_patched or status.model is None:
            return replace(status, phase="unpatched", reason=self._why_unpatched(status))
        if is_healthy:
            return status
        health = await self._probes.get("/health")
        if health.status_code != 200:
            reason = f"the engine at {self.base_url} is not ready: its /health answers {health.status_code}"
            return replace(status, phase="starting", reason=reason)
        return status

    def _silent(self, cause: str) -> EngineStatus:
        """No usable answer; what was known stays known until there is one."""
        return replace(
            self.status,
            phase="unreachable",
            reason=f"the engine at {self.base_url} does not answer: {cause}",
        )

    def _why_unpatched(self, status: EngineStatus) -> str:
        version = f"SGLang {status.sglang_version}" if status.sglang_version else "no SGLang that says so"
        if not status.patch:
            return (
                f"the engine at {self.base_url} ({version}) runs without the sglang-topp patch set: its"
                " /server_info does not mention it. Install sglang-topp in the engine's environment, leave it"
                " in SGLANG_PLUGINS if that is set, and see `sglang-topp doctor`"
            )
        if status.is_patched:
            return (
                f"the patch set in the engine at {self.base_url} ({version}) reports no sizes of its model,"
                " which requests are checked against; install the same sglang-topp there and here"
            )
        causes = "; ".join(status.problems) or "it gives no reason"
        return f"the patch set is not active in the engine at {self.base_url} ({version}): {causes}"

    # -- what it makes -----------------------------------------------------------------------------

    async def samples(
        self, request: RolloutRequest, share: Share
    ) -> AsyncGenerator[Rollout | FailedPrompt, None]:
        """Every sample as it finishes, added to `share`; where a prompt fails, the others go on.

        Closing the iterator aborts the rest in the engine, and returns when that is done.
        """
        finished: asyncio.Queue[Rollout | FailedPrompt | None] = asyncio.Queue()

        async def one(wanted: SampleRequest) -> None:
            try:
                await self._one_prompt(wanted, request.request_id, share, finished)
            except Exception as error:
                finished.put_nowait(FailedPrompt(wanted.prompt_index, as_known_error(error)))
            finished.put_nowait(None)

        tasks: list[asyncio.Task[None]] = []
        try:
            for wanted in request.wanted:
                tasks.append(asyncio.create_task(one(wanted)))
                # A prompt takes a millisecond to encode: a thousand at once would stop everything else.
                await asyncio.sleep(0)
            running = len(tasks)
            while running:
                item = await finished.get()
                if item is None:
                    running -= 1
                else:
                    yield item
                # Nor is a sample that was sent held while the next one is waited for.
                del item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one_prompt(
        self, wanted: SampleRequest, request_id: str | None, share: Share, finished: asyncio.Queue[Any]
    ) -> None:
        prompts: Any = [wanted.prompt]
        stream = self._client.stream(
            prompts,
            {**wanted.sampling_params, "n": len(wanted.samples)},
            top_logprobs_p=wanted.top_logprobs_p,
            request_id=request_id,
            progress=False,
        )
        try:
            async with aclosing(stream) as samples:
                async for sample in samples:
                    share.add(sample)
                    finished.put_nowait(replace(sample, prompt_index=wanted.prompt_index))
                    del sample
        except SglangToppError as error:
            if isinstance(error, MissingCandidateSetsError):
                # It may have been restarted without the patch set since it was last looked at.
                self.status = replace(self.status, phase="unpatched", reason=str(error), patch={})
                self._has_been_ready = False
            if isinstance(error, TransportError | ServerError | MissingCandidateSetsError):
                self._in_doubt.set()
            raise upstream_error(error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._probes.aclose()
        await self._client.close()


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
