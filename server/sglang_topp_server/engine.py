"""Engine: the patched SGLang behind the sidecar, what is known of it, and the samples that it makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any

from sglang_topp.engine_request import Model
from sglang_topp.errors import (
    MissingCandidateSetsError,
    PatchError,
    ServerError,
    SglangToppError,
    TransportError,
)
from sglang_topp_client import AsyncRolloutClient, Rollout, Score
from sglang_topp_client.request import SampleRequest
from sglang_topp_client.resuming import OnAbort
from sglang_topp_client.score_request import ScoreRequest
from sglang_topp_server.engine_status import EngineProbe, EngineStatus
from sglang_topp_server.held import Share, num_bytes_of
from sglang_topp_server.problems import as_known_error, upstream_error
from sglang_topp_server.schema import RolloutRequest, SampleBody

__all__ = ["Engine", "FailedPrompt"]

# The first token of every vocabulary: what it says does not matter.
_PROBE_PROMPT = [0]
_PROBE_ID = "sglang-topp-probe"
_POLL_READY_S = 10.0
_POLL_OTHERWISE_S = 0.5


@dataclass(frozen=True)
class FailedPrompt:
    """A prompt that failed: no more of its samples will come."""

    prompt_index: int
    error: SglangToppError


class _Client(AsyncRolloutClient):
    # Of all callers: what several of these hold while they are taken apart is all that is held beyond
    # finished samples.
    _LONG_LINES_AT_ONCE = 4

    def samples_of(
        self, wanted: SampleRequest, given: Rollout | None, on_abort: OnAbort, request_id: str | None
    ) -> AsyncGenerator[Rollout, None]:
        """The samples of a prompt that was checked; where `given`, it is gone on with."""
        there = {} if given is None else {wanted.prompt_index: given}
        return self._stream([wanted], there, on_abort, None, False, request_id)

    async def abort_here(self, request_id: str) -> bool:
        """Stop what is in flight here under that name; whether there was any."""
        return await self._abort_here(request_id)


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
        self._probe = EngineProbe(self.base_url, api_key=api_key, generate_one=self._generate_one)

    # -- what is known of it -----------------------------------------------------------------------

    async def watch(self) -> None:
        """Look at the engine again and again, and at once when a request cast doubt on it; never returns."""
        while True:
            in_doubt = self._in_doubt.is_set()
            self._in_doubt.clear()
            is_healthy = self.status.phase == "ready" and not in_doubt
            self.status = await self._probe.look(self.status, is_healthy=is_healthy)
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

    async def _generate_one(self, timeout_s: float) -> None:
        """One token with its candidate set, by the way that all others come."""
        await self._client.generate(
            [_PROBE_PROMPT],
            {"max_new_tokens": 1, "temperature": 1.0},
            top_logprobs_p=0.5,
            timeout_s=timeout_s,
            request_id=_PROBE_ID,
            progress=False,
        )

    # -- what it makes -----------------------------------------------------------------------------

    async def samples(
        self, request: SampleBody, share: Share
    ) -> AsyncGenerator[Rollout | Score | FailedPrompt, None]:
        """Every sample as it finishes, or every score, added to `share`; where a prompt fails, the others go
        on.

        Closing the iterator aborts the rest in the engine, and returns when that is done.
        """
        finished: asyncio.Queue[Rollout | Score | FailedPrompt | None] = asyncio.Queue()

        async def one(wanted: SampleRequest) -> None:
            try:
                await self._one_prompt(wanted, request, share, finished)
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
        self, wanted: SampleRequest, request: SampleBody, share: Share, finished: asyncio.Queue[Any]
    ) -> None:
        given = request.given.pop(wanted.prompt_index, None) if isinstance(request, RolloutRequest) else None
        num_given = 0
        if given is not None:
            share.add(given)
            num_given = num_bytes_of(given)
        try:
            stream = self._stream(wanted, given, request)
            del given
            async with aclosing(stream) as samples:
                async for sample in samples:
                    share.remove(num_given)
                    share.add(sample)
                    if isinstance(sample, Score):
                        finished.put_nowait(replace(sample, sequence_index=wanted.prompt_index))
                    else:
                        finished.put_nowait(sample)
                    del sample
        except SglangToppError as error:
            if isinstance(error, MissingCandidateSetsError):
                # It may have been restarted without the patch set since it was last looked at.
                self.status = replace(self.status, phase="unpatched", reason=str(error), patch={})
                self._has_been_ready = False
            if isinstance(error, TransportError | ServerError | MissingCandidateSetsError):
                self._in_doubt.set()
            raise upstream_error(error) from error

    def _stream(
        self, wanted: SampleRequest, given: Rollout | None, request: SampleBody
    ) -> AsyncGenerator[Rollout, None] | AsyncGenerator[Score, None]:
        if isinstance(wanted, ScoreRequest):
            prompts: Any = [wanted.prompt]
            return self._client.stream_scores(
                prompts,
                top_logprobs_p=wanted.top_logprobs_p,
                start=wanted.start,
                request_id=request.request_id,
                progress=False,
            )
        assert isinstance(request, RolloutRequest)
        return self._client.samples_of(wanted, given, request.on_abort, request.request_id)

    async def abort_here(self, request_id: str | None) -> bool:
        """Stop what callers of this process have in flight by the name that they have for it; where None,
        all that the engine has. What becomes of the samples is what their requests say.

        Returns:
            Whether there was any.

        Raises:
            SglangToppError: the engine does not take the order.
        """
        try:
            if request_id is not None:
                return await self._client.abort_here(request_id)
            await self._client.abort_all()
        except SglangToppError as error:
            raise upstream_error(error) from error
        return True

    async def abort(self, request_id: str | None) -> None:
        """The same by the name that the engine has for it, where no caller here has it.

        Raises:
            SglangToppError: the engine does not take the order.
        """
        try:
            if not await self.abort_here(request_id) and request_id is not None:
                await self._client.abort(request_id)
        except SglangToppError as error:
            raise upstream_error(error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._probe.close()
        await self._client.close()
