"""RolloutClient: the synchronous client, which runs `AsyncRolloutClient` in a background thread.

The background thread has its own event loop (`transport/loop_thread.py`). Any number of threads may therefore
call the client, even a thread that already runs an event loop, such as a notebook's. `AsyncRolloutClient`
retries and aborts requests, and decodes the answers.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from ssl import SSLContext
from types import TracebackType
from typing import Any, Literal, TypeVar, Unpack, overload

from sglang_topp.errors import SglangToppError
from sglang_topp_client.async_client import AsyncRolloutClient, GenerateOptions, ScoreOptions
from sglang_topp_client.requests.plan_generate import SamplingParams
from sglang_topp_client.requests.plan_score import Sequences
from sglang_topp_client.requests.prompts import Prompts
from sglang_topp_client.rollout import Rollout, Score
from sglang_topp_client.transport.loop_thread import LoopThread
from sglang_topp_client.weight_push.engine_control import PauseMode, Transport

__all__ = ["RolloutClient"]

_T = TypeVar("_T")


class RolloutClient:
    """A synchronous client with the arguments, results, and errors of `AsyncRolloutClient`.

    Several threads may share a client. Pickling a client copies only its configuration. An interrupt (Ctrl-C)
    during a call aborts the request in the engine.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        engine_url: str | Sequence[str] | None = None,
        kind: Literal["auto", "sidecar", "sglang"] = "auto",
        api_key: str | None = None,
        engine_api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        ssl: SSLContext | None = None,
        max_connections: int = 1024,
        max_retries: int = 4,
        max_message_bytes: int = 512 * 2**20,
    ) -> None:
        self._client = AsyncRolloutClient(
            base_url,
            engine_url=engine_url,
            kind=kind,
            api_key=api_key,
            engine_api_key=engine_api_key,
            headers=headers,
            ssl=ssl,
            max_connections=max_connections,
            max_retries=max_retries,
            max_message_bytes=max_message_bytes,
        )
        self._thread = LoopThread(self._client.close)

    def __reduce__(self) -> tuple[object, ...]:
        rebuild, _ = self._client.__reduce__()
        assert isinstance(rebuild, functools.partial)
        return functools.partial(type(self), *rebuild.args, **rebuild.keywords), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}{repr(self._client).removeprefix(type(self._client).__name__)}"

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams = None,
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams = None,
        *,
        return_exceptions: bool,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout | SglangToppError]: ...

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams = None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Any]:
        """Generate samples for every prompt, and return all of them; see `AsyncRolloutClient.generate`."""
        return self._thread.run(
            self._client.generate(prompts, sampling_params, return_exceptions=return_exceptions, **options)
        )

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Rollout]:
        """Yield each sample as it finishes; see `AsyncRolloutClient.stream`.

        Leaving the `for` loop early aborts the remaining samples.
        """
        return self._iterate(self._client.stream(prompts, sampling_params, **options))

    @overload
    def resume(
        self,
        rollouts: Rollout | Sequence[Rollout],
        sampling_params: SamplingParams = None,
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout]: ...

    @overload
    def resume(
        self,
        rollouts: Rollout | Sequence[Rollout],
        sampling_params: SamplingParams = None,
        *,
        return_exceptions: bool,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout | SglangToppError]: ...

    def resume(
        self,
        rollouts: Rollout | Sequence[Rollout],
        sampling_params: SamplingParams = None,
        *,
        return_exceptions: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Any]:
        """Continue aborted, truncated, or extended rollouts; see `AsyncRolloutClient.resume`."""
        return self._thread.run(
            self._client.resume(rollouts, sampling_params, return_exceptions=return_exceptions, **options)
        )

    @overload
    def score(
        self,
        sequences: Sequences,
        *,
        return_exceptions: Literal[False] = False,
        **options: Unpack[ScoreOptions],
    ) -> list[Score]: ...

    @overload
    def score(
        self, sequences: Sequences, *, return_exceptions: bool, **options: Unpack[ScoreOptions]
    ) -> list[Score | SglangToppError]: ...

    def score(
        self, sequences: Sequences, *, return_exceptions: bool = False, **options: Unpack[ScoreOptions]
    ) -> list[Any]:
        """Return log-probs and candidate sets of existing sequences; see `AsyncRolloutClient.score`."""
        return self._thread.run(self._client.score(sequences, return_exceptions=return_exceptions, **options))

    def stream_scores(self, sequences: Sequences, **options: Unpack[ScoreOptions]) -> Iterator[Score]:
        """Yield each score as it arrives; see `AsyncRolloutClient.stream_scores`.

        Leaving the `for` loop early aborts the unfinished requests.
        """
        return self._iterate(self._client.stream_scores(sequences, **options))

    def _iterate(self, results: AsyncGenerator[_T, None]) -> Iterator[_T]:
        async def following() -> _T | None:
            return await anext(results, None)

        try:
            while (result := self._thread.run(following())) is not None:
                yield result
        finally:
            # Closing the generator `results` aborts the remaining samples. If this thread cannot wait for the
            # event loop, asyncio closes `results` later: when Python garbage-collects `results`, or when the
            # loop ends.
            if self._thread.can_wait:
                self._thread.run(results.aclose())

    def abort(self, request_id: str) -> int:
        """Abort a request whose results another thread awaits; see `AsyncRolloutClient.abort`."""
        return self._thread.run(self._client.abort(request_id))

    def abort_all(self) -> None:
        """Abort the requests of all clients in every engine; see `AsyncRolloutClient.abort_all`.

        A running `generate` blocks the thread that called it, so call this method from another thread.
        """
        self._thread.run(self._client.abort_all())

    def push_weights(
        self,
        weights: Any,
        *,
        version: str,
        via: Transport = "disk",
        pause: PauseMode = "retract",
        partial: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        """Give every engine new weights; see `AsyncRolloutClient.push_weights`."""
        self._thread.run(
            self._client.push_weights(
                weights, version=version, via=via, pause=pause, partial=partial, timeout_s=timeout_s
            )
        )

    def pause(self, mode: PauseMode = "retract", *, timeout_s: float = 600.0) -> None:
        """Pause generation on every engine; see `AsyncRolloutClient.pause`."""
        self._thread.run(self._client.pause(mode, timeout_s=timeout_s))

    def continue_generation(self, *, timeout_s: float = 600.0) -> None:
        """Continue generation on every engine; see `AsyncRolloutClient.continue_generation`."""
        self._thread.run(self._client.continue_generation(timeout_s=timeout_s))

    def server_info(self, base_url: str | None = None) -> dict[str, Any]:
        """Return what a server reports about itself; see `AsyncRolloutClient.server_info`."""
        return self._thread.run(self._client.server_info(base_url))

    def check_servers(self) -> None:
        """Check that no server or gateway drops a request or answer field that the client needs.

        See `AsyncRolloutClient.check_servers`.
        """
        self._thread.run(self._client.check_servers())

    def close(self) -> None:
        """Stop all requests, and close the connections. The client stays usable."""
        self._thread.stop()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
