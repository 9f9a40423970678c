"""EngineClient: poll the engine's status, and ask the engine for samples, scores, and aborts."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from sglang_topp.engine_contract import Model
from sglang_topp.errors import (
    MissingCandidateSetsError,
    PatchError,
    ServerError,
    SglangToppError,
    TransportError,
)
from sglang_topp_client import Rollout, Score
from sglang_topp_client.requests import plan
from sglang_topp_client.run import RunOptions, Runs
from sglang_topp_client.transport.server_config import ServerConfig
from sglang_topp_server.engine.probe import EngineProbe, EngineStatus
from sglang_topp_server.error_responses import as_sglang_topp_error, from_engine_error
from sglang_topp_server.limits import LongMessageSlots, MemoryShare
from sglang_topp_server.schemas.requests import AnyCall, RolloutsBody

__all__ = ["EngineClient", "FailedPrompt"]

# The prompt of the request that probes the engine. Every vocabulary has a token 0, whose meaning does not
# matter for a probe.
_PROBE_PROMPT = [0]
_PROBE_ID = "sglang-topp-probe"
_MAX_CALLS = 4096
# The engine may have closed an idle connection, so the sidecar repeats a failed call to the engine once. Only
# the sidecar's caller makes further retries, and waits if the engine refuses requests. If the sidecar retried
# as often as its caller, the numbers of retries would multiply.
_MAX_RETRIES = 1
# The maximum number of long messages (over 1 MiB) that the sidecar reads from the engine at the same time.
# Each of these messages holds one sample. The sidecar's memory limit (`MemoryLimit`) counts a sample only
# after the sidecar has read the sample, so this maximum bounds the memory that is not counted yet.
_MAX_LONG_MESSAGES = 4
_OPTIONS = RunOptions("", keeps_going=True, waits_out_refusals=False)
_POLL_READY_S = 10.0
_POLL_OTHERWISE_S = 0.5


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that failed. The client yields no further samples of this prompt."""

    prompt_index: int
    error: SglangToppError


class EngineClient:
    """A client of one engine. All methods, including `close`, must be called within one event loop.

    Args:
        base_url: the address of SGLang's HTTP server.
        api_key: the engine's key, or None.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.status = EngineStatus("unreachable", f"the engine at {self.base_url} was not asked yet")
        self._has_been_ready = False
        self._has_probed = asyncio.Event()
        self._probe_now = asyncio.Event()
        config = ServerConfig(
            self.base_url,
            max_connections=_MAX_CALLS,
            api_key=api_key,
            throttle=LongMessageSlots(_MAX_LONG_MESSAGES).throttle,
        )
        self._runs = Runs([config], kind="sglang", max_retries=_MAX_RETRIES)
        self._probe = EngineProbe(config, generate_one=self._generate_one)

    # -- status ------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe the engine periodically, and soon after a failed request. Run until canceled."""
        while True:
            has_failed_request = self._probe_now.is_set()
            self._probe_now.clear()
            is_healthy = self.status.phase == "ready" and not has_failed_request
            self.status = await self._probe.look(self.status, is_healthy=is_healthy)
            if self.status.phase in ("ready", "unpatched"):
                self._has_been_ready = self.status.phase == "ready"
            self._has_probed.set()
            await asyncio.sleep(_POLL_OTHERWISE_S)
            if self.status.phase == "ready":
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._probe_now.wait(), _POLL_READY_S)

    async def require_ready(self) -> Model:
        """Return the engine's model, or raise an error if the engine cannot take requests.

        If the engine was ready earlier but did not answer the latest probe, this method raises no error. The
        engine may have been too busy to answer.

        Raises:
            PatchError: the engine is not patched.
            ServerError: the engine has not become ready yet (HTTP status 503).
        """
        await self._has_probed.wait()
        if self.status.phase == "unpatched":
            raise PatchError(self.status.reason)
        if not self._has_been_ready or self.status.model is None:
            raise ServerError(self.status.reason, status=503)
        return self.status.model

    async def weight_version(self) -> str | None:
        """Return the version of the engine's weights, or None if the engine doesn't answer."""
        return await self._probe.weight_version()

    async def _generate_one(self, timeout_s: float) -> None:
        """Generate one token with its candidate set, through the code that also serves callers' requests."""
        requests = plan([_PROBE_PROMPT], {"max_new_tokens": 1, "temperature": 1.0}, 0.5)
        await self._runs.gather(
            requests, replace(_OPTIONS, request_id=_PROBE_ID, timeout_s=timeout_s, keeps_going=False)
        )

    # -- samples -----------------------------------------------------------------------------------

    async def samples(
        self, request: AnyCall, share: MemoryShare, headers: Mapping[str, str]
    ) -> AsyncGenerator[Rollout | Score | FailedPrompt, None]:
        """Yield each sample or score as it finishes, and count its memory in `share`.

        If a prompt fails, yield a FailedPrompt and continue with the other prompts. Closing the iterator
        aborts the unfinished samples in the engine.

        Args:
            request: the caller's request.
            share: the memory of this request.
            headers: sent with each request to the engine.
        """
        # The engine never waits for a slow caller: finished samples leave its connections at once.
        finished: asyncio.Queue[Rollout | Score | FailedPrompt | None] = asyncio.Queue()
        task = asyncio.create_task(self._collect(request, share, headers, finished))
        task.add_done_callback(lambda _: finished.put_nowait(None))
        try:
            while (item := await finished.get()) is not None:
                yield item
                # Free the yielded sample now, before this loop waits for the next sample.
                del item
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def _collect(
        self,
        request: AnyCall,
        share: MemoryShare,
        headers: Mapping[str, str],
        finished: asyncio.Queue[Rollout | Score | FailedPrompt | None],
    ) -> None:
        options = replace(_OPTIONS, request_id=request.body.request_id or uuid.uuid4().hex, headers=headers)
        if isinstance(request.body, RolloutsBody):
            options = replace(options, on_abort=request.body.on_abort)
        for rollout in request.given.values():
            share.add(rollout)
        missing = {one.prompt_index: len(one.samples) for one in request.wanted}

        def fail(prompts: Iterable[int], cause: Exception) -> None:
            error = self._note_failure(cause)
            for prompt in prompts:
                del missing[prompt]
                finished.put_nowait(FailedPrompt(prompt, error))

        try:
            async with aclosing(self._runs.stream(request.wanted, options, request.given)) as results:
                async for (prompt, _), item in results:
                    if prompt not in missing:
                        continue  # another sample of the prompt has failed
                    if isinstance(item, SglangToppError):
                        fail([prompt], item)
                        continue
                    missing[prompt] -= 1
                    if not missing[prompt]:
                        del missing[prompt]
                    share.add(item)
                    finished.put_nowait(item)
                    del item
        except Exception as error:
            fail(list(missing), error)

    def _note_failure(self, error: Exception) -> SglangToppError:
        """Probe the engine again if the error casts doubt on it, and return the error for the caller."""
        if not isinstance(error, SglangToppError):
            return as_sglang_topp_error(error)
        if isinstance(error, MissingCandidateSetsError):
            # The engine may have restarted without the plugin since the last probe.
            self.status = replace(self.status, phase="unpatched", reason=str(error), patch={})
            self._has_been_ready = False
        if isinstance(error, TransportError | ServerError | MissingCandidateSetsError):
            self._probe_now.set()
        return from_engine_error(error)

    async def abort(self, request_id: str | None) -> int | None:
        """Abort one request, or all requests in the engine, and return how many of this sidecar's had the id.

        The field `on_abort` of each aborted request decides what the caller of that request receives.

        Args:
            request_id: the id that a caller gave to its request, or the engine's own id of a request. If
                `request_id` is None, the engine aborts all requests, whose number is unknown.

        Raises:
            SglangToppError: the engine refused the abort, or did not answer.
        """
        try:
            if request_id is not None:
                return await self._runs.abort(request_id)
            await self._runs.abort_all()
            return None
        except SglangToppError as error:
            raise from_engine_error(error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._probe.close()
        await self._runs.close()
