"""Dispatcher: split one request of the caller into HTTP calls, send them, and deliver every result.

A request of the caller is one call of `generate`, `resume`, or `score`, with all prompts of the call. After a
retryable error, the dispatcher repeats the HTTP call, on the same server or on another server. If the
caller passed `on_abort="resume"`, the dispatcher also resumes aborted samples.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from sglang_topp.errors import (
    AuthenticationError,
    BadRequestError,
    InvalidInputError,
    OverloadedError,
    ResponseError,
    RolloutError,
    SglangToppError,
    TransportError,
)
from sglang_topp_client.dispatch.endpoint import Endpoint, Kind
from sglang_topp_client.dispatch.failover import EndpointPool
from sglang_topp_client.dispatch.graceful_abort import GracefulAbort
from sglang_topp_client.dispatch.retry_policy import is_retryable
from sglang_topp_client.protocols.sglang_generate import GenerateExchange, StreamedExchange
from sglang_topp_client.protocols.sglang_scores import GenerateScoreExchange
from sglang_topp_client.protocols.sidecar_rollouts import RolloutsExchange, SidecarExchange
from sglang_topp_client.protocols.sidecar_scores import ScoresExchange
from sglang_topp_client.requests.plan_generate import SampleRequest
from sglang_topp_client.requests.resume import empty_rollout
from sglang_topp_client.transport.extra_headers import ROUTING_KEY
from sglang_topp_client.types.rollout import Rollout
from sglang_topp_client.types.score import Score

__all__ = ["ROLLOUTS", "SCORES", "Dispatcher", "OnFailure", "Operation", "Result", "ResultSink"]

# Messages above this size are decoded in a thread, because decoding takes milliseconds and would block the
# event loop.
_OFF_LOOP_BYTES = 1 << 18

Result = TypeVar("Result", Rollout, Score)
_Taken = TypeVar("_Taken", Rollout, Score, contravariant=True)
_Exchange: TypeAlias = SidecarExchange[Result] | StreamedExchange[Result]

OnFailure: TypeAlias = Callable[[tuple[int, int], SglangToppError], None]
"""A callback that takes a failed sample's indices `(prompt index, sample index)` and the error."""


@dataclass(frozen=True)
class Operation(Generic[Result]):
    """The parts of the dispatcher that differ between rollouts and scores.

    Attributes:
        singular, plural: the nouns for one result and for several results, in texts for the user.
        exchanges: for each kind of server (sidecar or SGLang), the class that writes the requests and reads
            the answers.
        place: returns a result's prompt index and sample index.
        num_tokens: returns how many tokens a result has.
        with_key: returns a copy of a rollout with the given `Rollout.routing_key`. A score has no routing
            key, and is returned unchanged.
    """

    singular: str
    plural: str
    exchanges: Mapping[Kind, type[SidecarExchange[Result]] | type[StreamedExchange[Result]]]
    place: Callable[[Result], tuple[int, int]]
    num_tokens: Callable[[Result], int]
    with_key: Callable[[Result, str], Result]


ROLLOUTS = Operation[Rollout](
    "sample",
    "rollouts",
    {"sidecar": RolloutsExchange, "sglang": GenerateExchange},
    lambda rollout: (rollout.prompt_index, rollout.sample_index),
    lambda rollout: len(rollout.output_ids),
    lambda rollout, key: replace(rollout, routing_key=key),
)
SCORES = Operation[Score](
    "sequence",
    "scores",
    {"sidecar": ScoresExchange, "sglang": GenerateScoreExchange},
    lambda score: (score.sequence_index, 0),
    lambda score: len(score.logprobs),
    lambda score, _: score,
)


class ResultSink(Protocol[_Taken]):
    """The receiver of the results of one request of the caller.

    The return values of `begin` and `take` tell the dispatcher which samples to request.
    """

    def begin(self) -> Iterable[SampleRequest]:
        """Return the initial requests. `take` may return further requests."""

    def take(self, result: _Taken, /) -> tuple[SampleRequest, float] | None:
        """Take one result from the dispatcher.

        Returns:
            A pair to continue a partial result, or None to request nothing more. The pair holds a request for
            the rest of the result, and the seconds to wait before the dispatcher sends this request.
        """


class Dispatcher(Generic[Result]):
    """The sender of all HTTP calls for one request of the caller.

    Args:
        endpoints: the servers.
        operation: `ROLLOUTS` or `SCORES`.
        request_id: the caller's name for the request.
        deadline: when the request times out, on the event loop's clock; None for no limit.
        wait_for_room: an async function that waits while too many results are queued for the caller. The
            dispatcher awaits the function before it sends a call for new samples. Calls that continue samples
            do not wait.
        graceful_abort: aborts the calls and keeps their partial samples; None if the caller does not want
            partial samples.
        max_message_bytes: the maximum length of a message after decompression.
        repeats_aborted: whether a call that the engine aborted is sent again; see `RetryBudget`.
        on_failure: called for each sample that failed, while the samples of other prompts continue. If
            `on_failure` is not None, the dispatcher sends each prompt in its own call, because a server that
            refuses one prompt refuses the whole call. If `on_failure` is None, the first error ends the
            request.
    """

    def __init__(
        self,
        endpoints: EndpointPool,
        operation: Operation[Result],
        request_id: str,
        deadline: float | None,
        wait_for_room: Callable[[], Awaitable[None]],
        graceful_abort: GracefulAbort | None,
        *,
        max_message_bytes: int,
        repeats_aborted: bool,
        on_failure: OnFailure | None,
    ) -> None:
        self._endpoints, self._request_id = endpoints, request_id
        self._operation: Operation[Result] = operation
        self._deadline, self._wait_for_room = deadline, wait_for_room
        self._graceful_abort = graceful_abort
        self._options: dict[Kind, dict[str, Any]] = {"sidecar": {"max_bytes": max_message_bytes}}
        self._repeats_aborted, self._on_failure = repeats_aborted, on_failure

    async def run(self, sink: ResultSink[Result]) -> None:
        """Send all calls and pass every result to `sink`. On an error, stop all calls and raise the error."""
        kind = await self._endpoints.kind()
        exchange_type = self._operation.exchanges[kind]
        new_exchange = functools.partial(exchange_type, **self._options.get(kind, {}))
        window = asyncio.Semaphore(self._endpoints.max_calls)

        async def resume(request: SampleRequest, wait_s: float) -> None:
            await asyncio.sleep(wait_s)
            await self._call(new_exchange, take, [request], continues=True)

        try:
            async with asyncio.TaskGroup() as group:

                def take(result: Result) -> None:
                    if (rest := sink.take(result)) is not None:
                        group.create_task(resume(*rest))

                groups = self._endpoints.by_issuer(sink.begin())
                for requests in _batches(groups, self._samples_per_call(exchange_type, groups)):
                    await self._wait_for_room()
                    await window.acquire()
                    call = group.create_task(self._call(new_exchange, take, requests))
                    call.add_done_callback(lambda _: window.release())
                    # Let other tasks run: starting a call takes a millisecond, and there may be a thousand
                    # calls.
                    await asyncio.sleep(0)
        except ExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            return
        # Raise `first` outside of the `except` block. Inside the block, `raise first` would overwrite the
        # context of `first`, and `raise first from None` would remove the cause of `first`.
        raise first

    def _samples_per_call(
        self, exchange_type: type[_Exchange[Result]], groups: Collection[Sequence[SampleRequest]]
    ) -> int:
        """Return the number of samples at which `_batches` completes a batch.

        The number is at most one server's equal share of all samples.
        """
        if self._on_failure is not None:
            return 1
        num_samples = sum(len(request.samples) for group in groups for request in group)
        return min(exchange_type.samples_per_call, math.ceil(num_samples / len(self._endpoints.all)))

    async def _call(
        self,
        new_exchange: Callable[..., _Exchange[Result]],
        deliver: Callable[[Result], None],
        requests: Sequence[SampleRequest],
        *,
        continues: bool = False,
    ) -> None:
        """Send one call. Report failed samples to `on_failure`. Without `on_failure`, raise the error."""
        missing = {(request.prompt_index, sample) for request in requests for sample in request.samples}
        try:
            await self._call_until_complete(new_exchange, deliver, requests, missing, continues)
        except SglangToppError as error:
            if self._on_failure is None:
                raise
            for place in missing:
                self._on_failure(place, error)

    async def _call_until_complete(
        self,
        new_exchange: Callable[..., _Exchange[Result]],
        deliver: Callable[[Result], None],
        requests: Sequence[SampleRequest],
        missing: set[tuple[int, int]],
        continues: bool,
    ) -> None:
        """Send one call and its retries. Each retry asks only for the `missing` samples, under a new id."""
        requests = list(requests)
        keys: dict[int, str] = {}
        in_flight: tuple[_Exchange[Result], Endpoint] | None = None

        def take(result: Result) -> None:
            place = self._operation.place(result)
            deliver(self._operation.with_key(result, keys[place[0]]))
            missing.remove(place)

        async def attempt(endpoint: Endpoint) -> None:
            nonlocal in_flight
            if await endpoint.kind() == "sglang":
                # Apply the chat template once for all attempts, because the engines may have different
                # templates.
                for i, request in enumerate(requests):
                    if isinstance(request.prompt, tuple):
                        ids = await endpoint.apply_chat_template(request.prompt)
                        requests[i] = replace(request, prompt=ids)
            left = [
                replace(request, samples=samples)
                for request in requests
                if (samples := tuple(s for s in request.samples if (request.prompt_index, s) in missing))
            ]
            keys.update({one.prompt_index: endpoint.routing_key(one.routing_key) for one in left})
            key = keys[left[0].prompt_index] if len(left) == 1 else None
            exchange = new_exchange(left, request_id=self._request_id, timeout_s=self._left_s())
            in_flight = exchange, endpoint
            try:
                await self._exchange(endpoint, exchange, key, take)
            except SglangToppError as error:
                # After the last sample has arrived, ignore a retryable error, such as a broken connection.
                if missing or not is_retryable(error):
                    raise
            finally:
                in_flight = None

        def abort_orders() -> dict[str, Callable[[], Awaitable[object]]] | None:
            if in_flight is None:
                return None
            exchange, endpoint = in_flight
            return {name: functools.partial(endpoint.abort, name) for name in exchange.open_ids()}

        call = self._endpoints.call(
            attempt,
            num_samples=lambda: len(missing),
            preferred=self._endpoints.that_issued(requests[0]),
            continues=continues,
            repeats_aborted=self._repeats_aborted,
        )
        if self._graceful_abort is None:
            await call
            return
        await self._graceful_abort.run(call, abort_orders)
        for request in requests:
            for sample in request.samples:
                if (request.prompt_index, sample) in missing:
                    keys.setdefault(request.prompt_index, request.routing_key)
                    take(self._nothing_generated(request, sample))

    def _nothing_generated(self, request: SampleRequest, sample: int) -> Any:
        rollout = empty_rollout(request, sample, self._request_id)
        if rollout is None:
            raise RolloutError(
                f"request {self._request_id} was aborted before the engine had tokenized prompt"
                f" {request.prompt_index}, a text or a chat, so its token ids are unknown; give the prompt"
                " as ids to get a rollout without tokens"
            )
        return rollout

    async def _exchange(
        self,
        endpoint: Endpoint,
        exchange: _Exchange[Result],
        routing_key: str | None,
        take: Callable[[Result], None],
    ) -> None:
        """Send one call, and pass each result to `take` as it arrives."""
        headers = {} if exchange.accept is None else {"Accept": exchange.accept}
        if routing_key is not None:
            headers[ROUTING_KEY] = routing_key
        is_open = is_refused = False
        try:
            async with endpoint.post(
                exchange.path, exchange.body(), headers, self._note_received
            ) as messages:
                is_open = True
                async for message in messages:
                    if len(message) < _OFF_LOOP_BYTES:
                        results = exchange.read(message)
                    else:
                        results = await asyncio.to_thread(exchange.read, message)
                    while results:
                        take(results.pop(0))
                    # Free the message now: it may be large, and the next message may arrive much later.
                    del message
            if not exchange.complete:
                raise TransportError("the answer was cut off: it ended before its last message")
        except SglangToppError as error:
            if len(self._endpoints.all) > 1:
                error.add_note(f"the server is {endpoint.base_url}")
            refusals = (AuthenticationError, BadRequestError, OverloadedError)
            if not is_open and isinstance(error, refusals):
                is_refused = True
                self._check_route(endpoint, exchange, error)
            raise
        finally:
            if not is_refused:
                endpoint.abort_delivery.start(self._request_id, exchange.unfinished_ids())

    def _check_route(self, endpoint: Endpoint, exchange: _Exchange[Result], error: ResponseError) -> None:
        """If the server lacks the call's route, raise an error that explains the cause."""
        if error.status not in (404, 405):
            return
        if exchange.missing_route:
            raise BadRequestError(exchange.missing_route, status=error.status, body=error.body) from error
        if len(self._endpoints.all) > 1:
            raise InvalidInputError(
                f"base_url: {endpoint.base_url} has no {exchange.path}, so its kind differs from the others',"
                " expected only engines or only sidecars"
            ) from error

    def _note_received(self) -> None:
        if self._graceful_abort is not None:
            self._graceful_abort.note_received()

    def _left_s(self) -> float | None:
        """Return the seconds until the deadline, or None without a deadline."""
        if self._deadline is None:
            return None
        return max(self._deadline - asyncio.get_running_loop().time(), 0.001)


def _batches(
    groups: Iterable[Sequence[SampleRequest]], samples_per_call: int
) -> Iterator[list[SampleRequest]]:
    """Split each group of requests into batches, one batch for each HTTP call.

    A batch is complete once it requests `samples_per_call` samples or more.
    """
    for group in groups:
        batch: list[SampleRequest] = []
        num_samples = 0
        for request in group:
            batch.append(request)
            num_samples += len(request.samples)
            if num_samples >= samples_per_call:
                yield batch
                batch, num_samples = [], 0
        if batch:
            yield batch
