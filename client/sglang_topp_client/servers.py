"""Servers: all servers of a client, from one event loop, and how a question to them is asked again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from sglang_topp.errors import SglangToppError, TransportError
from sglang_topp_client.fleet import Fleet
from sglang_topp_client.http import Server
from sglang_topp_client.link import Kind, Link
from sglang_topp_client.request import SampleRequest
from sglang_topp_client.retry import delay_s, is_refusal, is_retryable

__all__ = ["Servers"]

_T = TypeVar("_T")


class Servers:
    """To be made in the event loop that uses it.

    Args:
        servers: where they are; their limit of connections is one for all of them.
        kinds: what they are known to be, by `base_url`; shared with other event loops.
        long_lines_at_once: see `Connections`.
        max_retries: how often a failed attempt is repeated.
    """

    def __init__(
        self, servers: Sequence[Server], kinds: dict[str, Kind], *, long_lines_at_once: int, max_retries: int
    ) -> None:
        self.links = [Link(server, kinds, long_lines_at_once) for server in servers]
        self._fleet = Fleet(self.links, asyncio.get_running_loop().time)
        self._slots = asyncio.Semaphore(servers[0].max_connections)
        self._kinds = kinds
        self._max_retries = max_retries

    @property
    def known_kind(self) -> Kind | None:
        """What they are, where that is known."""
        return next(iter(self._kinds.values()), None)

    async def kind(self) -> Kind:
        """What they are, as whichever answers tells."""

        async def ask() -> Kind:
            with self._fleet.member(0) as link:
                return await link.kind()

        known = self.known_kind
        return await self.retrying(ask) if known is None else known

    @contextmanager
    def aborts_expected(self) -> Generator[None, None, None]:
        """Around calls that may leave something to abort, see `Aborts.expected`."""
        with ExitStack() as stack:
            for link in self.links:
                stack.enter_context(link.aborts.expected())
            yield

    async def aborted(self, request_id: str | None = None) -> None:
        """Wait until the aborts of that request have been sent, or of all; for three seconds at most."""
        await asyncio.gather(*(link.aborts.finish(request_id) for link in self.links))

    async def tell_all(self, order: Callable[[Link], Awaitable[None]]) -> None:
        """Give every server an order.

        Raises:
            SglangToppError: a server did not take it. One that is gone has nothing to do any more, unless
                all are.
        """
        outcomes = await asyncio.gather(*(order(link) for link in self.links), return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        if len(failures) == len(outcomes):
            raise failures[0]
        for failure in failures:
            if not isinstance(failure, TransportError):
                raise failure

    async def call(self, wanted: Sequence[SampleRequest], attempt: Callable[[Link], Awaitable[None]]) -> None:
        """One attempt at a call, at the server that is to take it, once there is a place for it.

        Args:
            wanted: what is asked for; what goes on from a rollout goes where that was made.
            attempt: asks that server.
        """
        async with self._slots:
            samples = sum(len(one.samples) for one in wanted)
            with self._fleet.member(samples, self.maker(wanted[0])) as link:
                await attempt(link)

    def maker(self, wanted: SampleRequest) -> Link | None:
        """The server that made what this goes on from, if it is one of these."""
        return next((link for link in self.links if link.made(wanted.routing_key)), None)

    def by_maker(self, wanted: Iterable[SampleRequest]) -> Iterable[Sequence[SampleRequest]]:
        """In groups that go on from what one server made, or from nothing."""
        groups: dict[Link | None, list[SampleRequest]] = {}
        for one in wanted:
            groups.setdefault(self.maker(one) if one.routing_key else None, []).append(one)
        return groups.values()

    async def retrying(self, attempt: Callable[[], Awaitable[_T]], *, is_patient: bool = False) -> _T:
        """Until it succeeds; at once where another server can be asked.

        Args:
            attempt: one attempt.
            is_patient: whether a refusal that passes (429, 503) is waited for without an end.

        Raises:
            SglangToppError: the last attempt's.
        """
        retry = 0
        while True:
            try:
                return await attempt()
            except SglangToppError as error:
                retry += 1
                is_waited_for = is_patient and is_refusal(error)
                if (retry > self._max_retries and not is_waited_for) or not is_retryable(error):
                    raise
                wait_s = delay_s(retry, error)
            if not self._fleet.has_another:
                await asyncio.sleep(wait_s)

    async def close(self) -> None:
        """Close every connection."""
        await asyncio.gather(*(link.connections.aclose() for link in self.links))
