"""MethodCallRunner: run one call of `generate`, `resume`, or `score`, stream its results, and abort it by id.

In this folder, a request of the caller is one such method call, with all its prompts. The caller may name the
request with a `request_id`. A request consists of one `SampleRequest` for each prompt to sample from, or one
`ScoreRequest` for each sequence to score. `Dispatcher` sends them in HTTP calls, each with one or more of
them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from sglang_topp.errors import AbortedError, InvalidInputError, RequestTimeoutError, describe
from sglang_topp_client.argument_checks import is_id_of
from sglang_topp_client.dispatch.dispatcher import (
    ROLLOUTS,
    SCORES,
    Dispatcher,
    OnFailure,
    Operation,
    Result,
    ResultSink,
)
from sglang_topp_client.dispatch.endpoint import Endpoint, Kind
from sglang_topp_client.dispatch.failover import EndpointPool
from sglang_topp_client.dispatch.graceful_abort import GracefulAbort
from sglang_topp_client.dispatch.partial_rollouts import PartialRollouts
from sglang_topp_client.dispatch.result_queue import ResultQueue
from sglang_topp_client.progress import Progress
from sglang_topp_client.requests.plan_generate import SampleRequest
from sglang_topp_client.requests.plan_score import ScoreRequest
from sglang_topp_client.requests.resume import OnAbort, mark_interruptible
from sglang_topp_client.transport.http import ServerConfig
from sglang_topp_client.transport.long_message_slots import UNLIMITED
from sglang_topp_client.types.rollout import Rollout
from sglang_topp_client.types.score import Score

__all__ = ["MethodCallRunner"]

_CALLER_FIRST_S = 0.02
# After an abort, the client stops waiting for a server that sends nothing for this many seconds. The client
# waits longer for a sidecar than for an engine, because the sidecar first waits for its engine.
_GRACE_S: dict[Kind, float] = {"sglang": 5.0, "sidecar": 10.0}
_MAX_WAITING_RESULTS = 1024
# A graceful abort ends after `_GRACE_S`, and its aborts are delivered within three seconds.
_OTHER_LOOPS_S = 15.0


@dataclass(frozen=True)
class _Request:
    """One running request of the caller. Several requests may have the same name."""

    name: str
    results: ResultQueue[Any]
    graceful_abort: GracefulAbort | None


@dataclass
class _LoopState:
    """The connections and the running requests of one event loop."""

    endpoints: EndpointPool
    running: dict[asyncio.Task[None], _Request] = field(default_factory=dict)


@dataclass(frozen=True)
class _WholeResults(Generic[Result]):
    """A `ResultSink` for scores, which always arrive complete."""

    requests: Sequence[SampleRequest]
    deliver: Callable[[Result], None]

    def begin(self) -> Iterator[SampleRequest]:
        return iter(self.requests)

    def take(self, result: Result, /) -> None:
        self.deliver(result)


class MethodCallRunner:
    """A runner of one client's requests. The code that calls the runner checks the arguments.

    Several event loops may use one runner at the same time. A connection belongs to the loop that opened the
    connection.

    Args:
        configs: the connection settings of one or several servers. All servers are of the same kind.
        kind: the servers' kind, or None to ask the servers.
        max_retries: how often a failed call is retried.
        waits_out_refusals: see `EndpointPool`.
        max_long_messages: how many long messages the client reads at once from each server; see
            `LongMessageSlots`. The default is no limit, because a limit makes the client stop reading some
            answers for a while. A server may drop a client that stops reading.
    """

    def __init__(
        self,
        configs: Sequence[ServerConfig],
        *,
        kind: Kind | None,
        max_retries: int,
        waits_out_refusals: bool = True,
        max_long_messages: int = UNLIMITED,
    ) -> None:
        self._configs = configs
        self._kinds: dict[str, Kind] = {}
        if kind is not None:
            self._kinds = dict.fromkeys((config.base_url for config in configs), kind)
        self._max_retries, self._max_long_messages = max_retries, max_long_messages
        self._waits_out_refusals = waits_out_refusals
        self._loops: dict[asyncio.AbstractEventLoop, _LoopState] = {}

    def rollouts(
        self,
        requests: Sequence[SampleRequest],
        *,
        existing: Mapping[int, Rollout] | None = None,
        on_abort: OnAbort = "raise",
        timeout_s: float | None = None,
        progress: bool | None = False,
        request_id: str | None = None,
        on_failure: OnFailure | None = None,
    ) -> AsyncGenerator[Rollout, None]:
        """Yield every sample of `requests` as it finishes; see `AsyncRolloutClient.stream`.

        Args:
            requests: one `SampleRequest` for each prompt.
            existing: rollouts to continue, by prompt index. A prompt with an existing rollout yields only one
                sample, which continues the rollout.
            on_abort: how to treat aborted samples.
            timeout_s: the time limit of the whole request, in seconds.
            progress: see `Progress`.
            request_id: the caller's name for the request.
            on_failure: see `Dispatcher`.

        Raises:
            InvalidInputError: `on_abort` is `"resume"`, and the sampling parameters of a prompt do not allow
                an exact resume. The method raises this error at once, before the caller iterates over the
                generator.
        """
        requests = mark_interruptible(requests, on_abort)

        def sink(deliver: Callable[[Rollout], None]) -> PartialRollouts:
            return PartialRollouts(requests, on_abort, deliver, existing or {})

        count = sum(len(request.samples) for request in requests)
        return self._run(
            ROLLOUTS,
            sink,
            count,
            timeout_s,
            progress,
            request_id,
            on_failure,
            returns_partial=on_abort == "return",
        )

    def scores(
        self,
        requests: Sequence[ScoreRequest],
        *,
        is_repeated: bool = False,
        timeout_s: float | None = None,
        progress: bool | None = False,
        request_id: str | None = None,
        on_failure: OnFailure | None = None,
    ) -> AsyncGenerator[Score, None]:
        """Yield the score of each sequence as it arrives; see `AsyncRolloutClient.stream_scores`.

        Args:
            requests: one `ScoreRequest` for each sequence.
            is_repeated: whether to score a sequence again if the engine aborted it because of an abort
                request, a pause, or a weight update.
            timeout_s: the time limit of the whole request, in seconds.
            progress: see `Progress`.
            request_id: the caller's name for the request.
            on_failure: see `Dispatcher`.
        """

        def sink(deliver: Callable[[Score], None]) -> _WholeResults[Score]:
            return _WholeResults(requests, deliver)

        return self._run(
            SCORES,
            sink,
            len(requests),
            timeout_s,
            progress,
            request_id,
            on_failure,
            repeats_aborted=is_repeated,
        )

    async def abort(self, request_id: str) -> int:
        """Abort the requests with the id `request_id`; see `AsyncRolloutClient.abort`."""
        here = self._here()
        elsewhere = [
            asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._abort_here(request_id), loop))
            for loop in list(self._loops)
            if loop is not asyncio.get_running_loop() and loop.is_running()
        ]
        count = await self._abort_here(request_id)
        if elsewhere:
            # A loop that ends at this moment never answers, and ends its requests too.
            done, _ = await asyncio.wait(elsewhere, timeout=_OTHER_LOOPS_S)
            count += sum(each.result() for each in done if not each.cancelled())
        if not count:
            count = sum(await here.endpoints.order_all(lambda endpoint: endpoint.abort(request_id)))
        return count

    async def _abort_here(self, request_id: str) -> int:
        """Abort the requests of this event loop, and return how many there were."""
        here = self._here()
        tasks = [task for task, request in here.running.items() if is_id_of(request.name, request_id)]
        names = {here.running[task].name for task in tasks}
        graceful = _abort_gracefully(here, tasks)
        await _cancel([task for task in tasks if task not in graceful])
        await _wait_until_done(graceful)
        for name in names:
            await here.endpoints.aborts_delivered(name)
        return len(tasks)

    async def abort_all(self) -> None:
        """Abort every request in the engines; see `AsyncRolloutClient.abort_all`."""
        here = self._here()
        tasks = _abort_gracefully(here, list(here.running))
        await here.endpoints.order_all(Endpoint.abort_all)
        await _wait_until_done(tasks)

    async def infos(self, base_urls: Collection[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return each server's answer to `/info` or `/server_info`, by base URL.

        Query only the servers in `base_urls`, or all servers if `base_urls` is None.

        Raises:
            InvalidInputError: a URL does not belong to one of the client's servers.
            SglangToppError: a server does not answer, reports an error, or sends an answer that is not a JSON
                object.
        """
        endpoints = self._here().endpoints
        by_url = {endpoint.base_url: endpoint for endpoint in endpoints.all}
        for base_url in base_urls or ():
            if base_url not in tuple(by_url):
                raise InvalidInputError(
                    f"base_url: got {describe(base_url)}, expected one of {', '.join(by_url)}"
                )
        chosen = list(by_url if base_urls is None else base_urls)
        return {url: await endpoints.retrying(by_url[url].info) for url in chosen}

    async def check_fields(self) -> None:
        """Check every server; see `AsyncRolloutClient.check_servers`."""
        endpoints = self._here().endpoints
        for endpoint in endpoints.all:
            await endpoints.retrying(endpoint.check_fields)

    async def close(self) -> None:
        """Stop this event loop's requests, and close the loop's connections.

        See `AsyncRolloutClient.close`.
        """
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is None:
            return
        try:
            await _cancel(list(here.running))
            await here.endpoints.aborts_delivered()
        finally:
            await here.endpoints.close()

    async def _run(
        self,
        operation: Operation[Result],
        make_sink: Callable[[Callable[[Result], None]], ResultSink[Result]],
        count: int,
        timeout_s: float | None,
        progress: bool | None,
        request_id: str | None,
        on_failure: OnFailure | None,
        *,
        returns_partial: bool = False,
        repeats_aborted: bool = False,
    ) -> AsyncGenerator[Result, None]:
        """Yield the results of one request as they arrive. The progress line shows `count` as the total."""
        here, name = self._here(), request_id or uuid.uuid4().hex
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        too_late = RequestTimeoutError(
            f"timeout_s: {timeout_s} s passed before every {operation.singular} finished; None sets no limit"
        )
        results: ResultQueue[Result] = ResultQueue(_MAX_WAITING_RESULTS)
        graceful_abort = None
        if returns_partial:
            graceful_abort = GracefulAbort(_GRACE_S[here.endpoints.known_kind or "sidecar"])
        dispatcher = Dispatcher(
            here.endpoints,
            operation,
            name,
            deadline,
            results.wait_for_room,
            graceful_abort,
            max_message_bytes=self._configs[0].max_message_bytes,
            repeats_aborted=repeats_aborted,
            on_failure=on_failure,
        )
        task = asyncio.create_task(_dispatch(here.endpoints, dispatcher, make_sink(results.put), deadline))
        here.running[task] = _Request(name, results, graceful_abort)

        def end(_: asyncio.Task[None]) -> None:
            del here.running[task]
            results.close()
            if not task.cancelled():
                # asyncio logs an exception that no code retrieves. Retrieve the exception here, because a
                # caller that has stopped iterating does not retrieve the exception.
                task.exception()

        task.add_done_callback(end)
        try:
            with Progress(count, progress, of=operation.plural) as bar:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline):
                            result = await results.get()
                    except TimeoutError:
                        raise too_late from None
                    if result is None:
                        break
                    bar.add(operation.num_tokens(result))
                    yield result
            if task.cancelled():
                raise AbortedError(f"request {name} was aborted by this client")
            try:
                task.result()
            except TimeoutError:
                raise too_late from None
        finally:
            # Do not wait for the canceled task, because the task may close hundreds of connections, which
            # takes a second.
            task.cancel()

    def _here(self) -> _LoopState:
        """Return the connections and the running requests of the current event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            # Iterate over a copy, because other threads may add their event loops to `_loops`.
            for other in list(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            self._loops[loop] = _LoopState(
                EndpointPool(
                    self._configs,
                    self._kinds,
                    max_long_messages=self._max_long_messages,
                    max_retries=self._max_retries,
                    waits_out_refusals=self._waits_out_refusals,
                )
            )
        return self._loops[loop]


async def _dispatch(
    endpoints: EndpointPool, dispatcher: Dispatcher[Result], sink: ResultSink[Result], deadline: float | None
) -> None:
    """Run one request of the caller until the request ends.

    Raises:
        TimeoutError: the deadline passed before the request ended.
    """
    # At the deadline, `_run` reports the timeout to the caller. Cancel the calls a little later, because
    # canceling the calls may take a second and would delay the report.
    end = None if deadline is None else deadline + _CALLER_FIRST_S
    with endpoints.aborts_expected():
        async with asyncio.timeout_at(end):
            await dispatcher.run(sink)


def _abort_gracefully(here: _LoopState, tasks: Sequence[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    """Begin a graceful abort of each task whose caller wants partial samples, and return these tasks."""
    graceful = []
    for task in tasks:
        request = here.running[task]
        if request.graceful_abort is not None:
            request.graceful_abort.request()
            request.results.lift_limit()
            graceful.append(task)
    return graceful


async def _cancel(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel `tasks` and wait until all have cleaned up."""
    for task in tasks:
        if not task.done() and not task.cancelling():
            task.cancel()
    await _wait_until_done(tasks)


async def _wait_until_done(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until `tasks` end, and ignore their results. Canceling the wait does not cancel the tasks."""
    if tasks:
        await asyncio.wait(tasks)
