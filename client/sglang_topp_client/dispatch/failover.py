"""EndpointPool: send each HTTP call to one server, and fail over to other servers.

After an HTTP call has failed on every ready server, the pool waits and tries all servers again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from sglang_topp.errors import SglangToppError, TransportError
from sglang_topp_client.dispatch.endpoint import Endpoint, Kind
from sglang_topp_client.dispatch.load_balancer import LoadBalancer
from sglang_topp_client.dispatch.retry_policy import RetryBudget, is_retryable
from sglang_topp_client.requests.plan_generate import SampleRequest
from sglang_topp_client.transport import fd_limit
from sglang_topp_client.transport.fd_limit import FileLimitError
from sglang_topp_client.transport.http import ServerConfig

__all__ = ["EndpointPool"]

_T = TypeVar("_T")

_FILE_WAIT_S = 0.1


class EndpointPool:
    """All servers of one client, for the calls from one event loop.

    The pool must be created while its event loop runs.

    Args:
        configs: the servers' connection settings. The `max_connections` of the first config limits the calls
            to all servers together.
        kinds: maps the `base_url` of a server to its kind, `"sidecar"` or `"sglang"`, once the kind is known.
            All event loops share this mapping.
        max_long_messages: how many long messages the client reads at once from each server; see
            `LongMessageSlots`.
        max_retries: the maximum number of retries of a failed call.
        waits_out_refusals: whether a call waits for servers that accept no request at the moment (429, 503).
            Only the caller's time limit ends this wait.
    """

    def __init__(
        self,
        configs: Sequence[ServerConfig],
        kinds: dict[str, Kind],
        *,
        max_long_messages: int,
        max_retries: int,
        waits_out_refusals: bool,
    ) -> None:
        self.all = [Endpoint(config, kinds, max_long_messages) for config in configs]
        self.max_calls = fd_limit.max_connections(configs[0].max_connections)
        self._slots = asyncio.Semaphore(self.max_calls)
        self._balancer = LoadBalancer(self.all, asyncio.get_running_loop().time)
        self._kinds = kinds
        self._max_retries, self._waits_out_refusals = max_retries, waits_out_refusals

    @property
    def known_kind(self) -> Kind | None:
        """The kind of the servers (sidecar or SGLang), or None if the kind is still unknown."""
        return next(iter(self._kinds.values()), None)

    async def kind(self) -> Kind:
        """Return the servers' kind, `"sidecar"` or `"sglang"`.

        If the servers' kind is unknown, send `GET /info` to one server after another until one answers.
        """
        known = self.known_kind
        return await self.call(Endpoint.kind) if known is None else known

    async def call(
        self,
        attempt: Callable[[Endpoint], Awaitable[_T]],
        *,
        num_samples: Callable[[], int] = lambda: 0,
        preferred: Endpoint | None = None,
        continues: bool = False,
        repeats_aborted: bool = False,
    ) -> _T:
        """Run `attempt` on an endpoint, with retries, and return the result of `attempt`.

        After a retryable error, the call moves to another ready endpoint at once, which does not count as a
        retry. If the call has failed on every ready endpoint, it waits, and then tries all endpoints again,
        which counts as one retry. `LoadBalancer` explains when an endpoint is ready.

        Args:
            attempt: makes one attempt on the given endpoint.
            num_samples: returns how many samples the next attempt requests.
            preferred: the endpoint to try first, if it is ready.
            continues: whether the call continues a sample. Such a call always waits out refusals, because the
                engine that aborted the sample may be paused.
            repeats_aborted: see `RetryBudget`.

        Raises:
            SglangToppError: the last attempt's error. If the client has several servers and none of them
                answers, the method raises a TransportError that names all servers instead.
        """
        budget = RetryBudget(
            self._max_retries,
            waits_out_refusals=self._waits_out_refusals or continues,
            repeats_aborted=repeats_aborted,
        )
        failed: set[Endpoint] = set()
        while True:
            try:
                async with self._slots:
                    with self._balancer.pick(num_samples(), preferred, without=failed) as endpoint:
                        return await attempt(endpoint)
            except FileLimitError as error:
                # Each running call of this client frees its file descriptors when the call ends. So while
                # other calls run, wait without using up a retry.
                wait_s = _FILE_WAIT_S if self._balancer.num_in_flight else budget.next_delay_s(error)
                if wait_s is None:
                    raise
            except SglangToppError as error:
                failed.add(endpoint)
                if is_retryable(error) and self._balancer.has_ready(without=failed):
                    continue
                if (wait_s := budget.next_delay_s(error)) is None:
                    if (none_answers := self._none_answers(error)) is not None:
                        raise none_answers from error
                    raise
                failed.clear()
            await asyncio.sleep(wait_s)

    async def retrying(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        """Run `attempt`, and return its result. After a retryable error, run `attempt` again.

        `attempt` calls the same server each time.
        """
        budget = RetryBudget(self._max_retries)
        while True:
            try:
                return await attempt()
            except SglangToppError as error:
                if (wait_s := budget.next_delay_s(error)) is None:
                    raise
            await asyncio.sleep(wait_s)

    async def order_all(self, order: Callable[[Endpoint], Awaitable[_T]]) -> list[_T]:
        """Run `order` on every server, for example to abort a request, and return the results.

        Raises:
            SglangToppError: a server answered but did not carry out `order`, or no server answered. If at
                least one server answers, `order_all` ignores the servers that do not answer. These servers
                need no order: a dead server runs no requests, and calls to a hung server time out.
        """
        outcomes = await asyncio.gather(*map(order, self.all), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for failure in failures:
            if len(failures) == len(outcomes) or not isinstance(failure, TransportError):
                raise failure
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    @contextmanager
    def aborts_expected(self) -> Generator[None, None, None]:
        """Keep the event loop alive until the `with` block has ended and all pending aborts are sent."""
        with ExitStack() as stack:
            for endpoint in self.all:
                stack.enter_context(endpoint.abort_delivery.expected())
            yield

    async def aborts_delivered(self, request_id: str | None = None) -> None:
        """Wait up to three seconds for the pending aborts of `request_id`.

        If `request_id` is None, wait for all pending aborts.
        """
        await asyncio.gather(*(endpoint.abort_delivery.finish(request_id) for endpoint in self.all))

    def that_issued(self, request: SampleRequest) -> Endpoint | None:
        """Return the server that the request's routing key identifies, or None if no server matches.

        This server generated the rollout that the request continues or scores.
        """
        return next((endpoint for endpoint in self.all if endpoint.issued(request.routing_key)), None)

    def by_issuer(self, requests: Iterable[SampleRequest]) -> Collection[Sequence[SampleRequest]]:
        """Group requests by the server that each request's routing key identifies.

        One more group holds the requests without a routing key and the requests whose server is unknown.
        """
        groups: dict[Endpoint | None, list[SampleRequest]] = {}
        for request in requests:
            issuer = self.that_issued(request) if request.routing_key else None
            groups.setdefault(issuer, []).append(request)
        return groups.values()

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(endpoint.close() for endpoint in self.all))

    def _none_answers(self, error: SglangToppError) -> TransportError | None:
        """If no server answers, return a TransportError that names every server.

        Return None if at least one server has not failed, if `error` is not a TransportError, or if there is
        only one server.
        """
        failures = self._balancer.failures
        if len(self.all) == 1 or not isinstance(error, TransportError) or len(failures) < len(self.all):
            return None
        words = [f"\n  {server.base_url}: {failure}" for server, failure in failures.items()]
        return TransportError(f"none of the {len(self.all)} servers answers:{''.join(words)}")
