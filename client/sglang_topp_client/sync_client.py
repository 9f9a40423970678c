"""RolloutClient: the synchronous face of `AsyncRolloutClient`.

There is one code path. This client drives an asynchronous one on an event loop of its own, in a thread
of its own (`loop_thread.py`): hundreds of requests in flight need an event loop anyway, it works from
any number of threads and inside a running loop (a notebook), and retries, aborts and decoding are
written and tested once.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, TypeVar

from sglang_topp_client.client import AsyncRolloutClient
from sglang_topp_client.loop_thread import LoopThread
from sglang_topp_client.request import Prompts, SamplingParams, TopLogprobsP, TopLogprobsSource
from sglang_topp_client.resuming import OnAbort
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.score import Score
from sglang_topp_client.score_request import Sequences, Start

__all__ = ["RolloutClient"]

_T = TypeVar("_T")


class RolloutClient:
    """`AsyncRolloutClient`, synchronously: the same arguments, results and errors.

    Safe to share between threads. Pickles as its configuration. An interrupt (Ctrl-C) while it waits
    aborts the request in the engine.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        kind: Literal["auto", "sidecar", "sglang"] = "auto",
        api_key: str | None = None,
        max_connections: int = 1024,
        max_retries: int = 4,
        max_line_bytes: int = 512 * 2**20,
        logprob_bits: Literal[16, 32] = 32,
    ) -> None:
        self._client = AsyncRolloutClient(
            base_url,
            kind=kind,
            api_key=api_key,
            max_connections=max_connections,
            max_retries=max_retries,
            max_line_bytes=max_line_bytes,
            logprob_bits=logprob_bits,
        )
        self._thread = LoopThread()

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, _ = self._client.__reduce__()
        assert isinstance(rebuild, functools.partial)
        return functools.partial(type(self), *rebuild.args, **rebuild.keywords), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{repr(self._client).removeprefix(type(self._client).__name__)}"

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams = None,
        *,
        top_logprobs_p: TopLogprobsP = None,
        top_logprobs_source: TopLogprobsSource = None,
        on_abort: OnAbort = "raise",
        timeout_s: float | None = None,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> list[Rollout]:
        """See `AsyncRolloutClient.generate`."""
        return self._thread.run(
            self._client.generate(
                prompts,
                sampling_params,
                top_logprobs_p=top_logprobs_p,
                top_logprobs_source=top_logprobs_source,
                on_abort=on_abort,
                timeout_s=timeout_s,
                progress=progress,
                request_id=request_id,
            )
        )

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams = None,
        *,
        top_logprobs_p: TopLogprobsP = None,
        top_logprobs_source: TopLogprobsSource = None,
        on_abort: OnAbort = "raise",
        timeout_s: float | None = None,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> Iterator[Rollout]:
        """See `AsyncRolloutClient.stream`; leaving the loop over it aborts the rest in the engine."""
        return self._iterate(
            self._client.stream(
                prompts,
                sampling_params,
                top_logprobs_p=top_logprobs_p,
                top_logprobs_source=top_logprobs_source,
                on_abort=on_abort,
                timeout_s=timeout_s,
                progress=progress,
                request_id=request_id,
            )
        )

    def resume(
        self,
        rollouts: Rollout | Sequence[Rollout],
        sampling_params: SamplingParams = None,
        *,
        top_logprobs_p: TopLogprobsP = None,
        top_logprobs_source: TopLogprobsSource = None,
        on_abort: OnAbort = "raise",
        timeout_s: float | None = None,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> list[Rollout]:
        """See `AsyncRolloutClient.resume`."""
        return self._thread.run(
            self._client.resume(
                rollouts,
                sampling_params,
                top_logprobs_p=top_logprobs_p,
                top_logprobs_source=top_logprobs_source,
                on_abort=on_abort,
                timeout_s=timeout_s,
                progress=progress,
                request_id=request_id,
            )
        )

    def score(
        self,
        sequences: Sequences,
        *,
        top_logprobs_p: TopLogprobsP = None,
        start: Start = None,
        timeout_s: float | None = None,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> list[Score]:
        """See `AsyncRolloutClient.score`."""
        return self._thread.run(
            self._client.score(
                sequences,
                top_logprobs_p=top_logprobs_p,
                start=start,
                timeout_s=timeout_s,
                progress=progress,
                request_id=request_id,
            )
        )

    def stream_scores(
        self,
        sequences: Sequences,
        *,
        top_logprobs_p: TopLogprobsP = None,
        start: Start = None,
        timeout_s: float | None = None,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> Iterator[Score]:
        """See `AsyncRolloutClient.stream_scores`; leaving the loop over it aborts the rest in the engine."""
        return self._iterate(
            self._client.stream_scores(
                sequences,
                top_logprobs_p=top_logprobs_p,
                start=start,
                timeout_s=timeout_s,
                progress=progress,
                request_id=request_id,
            )
        )

    def _iterate(self, results: AsyncGenerator[_T, None]) -> Iterator[_T]:
        async def following() -> _T | None:
            return await anext(results, None)

        try:
            while (result := self._thread.run(following())) is not None:
                yield result
        finally:
            # Where waiting is no use the loop closes it: one that ends, or drops it, closes its generators.
            if self._thread.can_wait:
                self._thread.run(results.aclose())

    def abort(self, request_id: str) -> None:
        """See `AsyncRolloutClient.abort`; call it from another thread."""
        self._thread.run(self._client.abort(request_id))

    def abort_all(self) -> None:
        """See `AsyncRolloutClient.abort_all`; call it from another thread."""
        self._thread.run(self._client.abort_all())

    def server_info(self, base_url: str | None = None) -> dict[str, Any]:
        """See `AsyncRolloutClient.server_info`."""
        return self._thread.run(self._client.server_info(base_url))

    def close(self) -> None:
        """Stop what is in flight and close the connections; the client stays usable."""
        self._thread.run(self._client.close())
        self._thread.stop()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
