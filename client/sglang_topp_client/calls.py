"""Calls: what one caller's request becomes at the servers, with retries, moves and orders to stop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from sglang_topp.errors import (
    AuthenticationError,
    BadRequestError,
    InvalidInputError,
    OverloadedError,
    RolloutError,
    SglangToppError,
    TransportError,
)
from sglang_topp_client.interruption import Interruption
from sglang_topp_client.link import Kind, Link
from sglang_topp_client.request import SampleRequest
from sglang_topp_client.resuming import nothing_generated
from sglang_topp_client.retry import is_retryable
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.score import Score
from sglang_topp_client.servers import Servers
from sglang_topp_client.sglang_api import GenerateExchange, StreamedExchange
from sglang_topp_client.sglang_scores import GenerateScoreExchange
from sglang_topp_client.sidecar_api import RolloutsExchange, SidecarExchange
from sglang_topp_client.sidecar_scores import ScoresExchange

__all__ = ["ROLLOUTS", "SCORES", "Calls", "Parts", "Result", "Work"]

# Gateways keep what has the same one on the same worker.
_ROUTING_KEY = "X-SMG-Routing-Key"
# A message this long takes milliseconds to decode; the other connections should not wait for that.
_OFF_LOOP_BYTES = 1 << 18

Result = TypeVar("Result", Rollout, Score)
_Taken = TypeVar("_Taken", Rollout, Score, contravariant=True)
_Exchange: TypeAlias = SidecarExchange[Result] | StreamedExchange[Result]


@dataclass(frozen=True)
class Work(Generic[Result]):
    """What calls are for.

    Attributes:
        one, many: what a call returns, in words.
        exchanges: how each kind of server is asked for it.
        place: which one a result is, by prompt and sample.
        num_tokens: how many tokens it tells of.
        keyed: it, with the routing key of its prompt.
    """

    one: str
    many: str
    exchanges: Mapping[Kind, type[SidecarExchange[Result]] | type[StreamedExchange[Result]]]
    place: Callable[[Result], tuple[int, int]]
    num_tokens: Callable[[Result], int]
    keyed: Callable[[Result, str], Result]


ROLLOUTS = Work[Rollout](
    "sample",
    "rollouts",
    {"sidecar": RolloutsExchange, "sglang": GenerateExchange},
    lambda rollout: (rollout.prompt_index, rollout.sample_index),
    lambda rollout: len(rollout.output_ids),
    lambda rollout, key: replace(rollout, routing_key=key),
)
SCORES = Work[Score](
    "sequence",
    "scores",
    {"sidecar": ScoresExchange, "sglang": GenerateScoreExchange},
    lambda score: (score.sequence_index, 0),
    lambda score: len(score.logprobs),
    lambda score, _: score,
)


class Parts(Protocol[_Taken]):
    """What a request consists of, and where its results go."""

    def begin(self) -> Iterable[SampleRequest]:
        """What to ask for."""

    def take(self, result: _Taken, /) -> tuple[SampleRequest, float] | None:
        """A result has come; what to ask for to go on from it, and after how many seconds, or None."""


class Calls(Generic[Result]):
    """The calls of one request.

    Args:
        servers: who is asked.
        work: for what.
        request_id: the caller's name for it.
        deadline: until when, in the event loop's time.
        options: what exchanges take, by the kind of the server.
        interruption: tells the calls to stop, where they can be.
    """

    def __init__(
        self,
        servers: Servers,
        work: Work[Result],
        request_id: str,
        deadline: float | None,
        options: Mapping[Kind, Mapping[str, Any]],
        interruption: Interruption | None,
    ) -> None:
        self._servers, self._request_id = servers, request_id
        self._work: Work[Result] = work
        self._deadline, self._options, self._interruption = deadline, options, interruption

    async def run(self, parts: Parts[Result]) -> None:
        """Take every result, or raise the first error after everything has stopped."""
        kind = await self._servers.kind()
        samples_per_call = self._work.exchanges[kind].samples_per_call
        make = functools.partial(self._new_exchange, kind)

        async def go_on(missing: SampleRequest, wait_s: float) -> None:
            await asyncio.sleep(wait_s)
            await self._call(make, take, [missing], is_patient=True)

        try:
            async with asyncio.TaskGroup() as group:

                def take(result: Result) -> None:
                    if (more := parts.take(result)) is not None:
                        group.create_task(go_on(*more))

                for some in _calls(self._servers.by_maker(parts.begin()), samples_per_call):
                    group.create_task(self._call(make, take, some))
                    # A call takes a millisecond to begin: a thousand at once would stop all else.
                    await asyncio.sleep(0)
        except ExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            return
        # Out here: inside, or `from None`, it would lose its own cause.
        raise first

    async def _call(
        self,
        make: Callable[[Sequence[SampleRequest]], _Exchange[Result]],
        deliver: Callable[[Result], None],
        wanted: Sequence[SampleRequest],
        *,
        is_patient: bool = False,
    ) -> None:
        """One call and its retries, each of which asks for what is still missing, under a fresh id; without
        an end while the server refuses, where `is_patient`."""
        missing = {(one.prompt_index, sample) for one in wanted for sample in one.samples}
        keys: dict[int, str] = {}
        open_at: tuple[_Exchange[Result], Link] | None = None

        def take(result: Result) -> None:
            place = self._work.place(result)
            missing.remove(place)
            if self._interruption is not None:
                self._interruption.note_progress()
            deliver(self._work.keyed(result, keys[place[0]]))

        async def attempt() -> None:
            left = [
                replace(one, samples=samples)
                for one in wanted
                if (samples := tuple(s for s in one.samples if (one.prompt_index, s) in missing))
            ]

            async def ask(link: Link) -> None:
                nonlocal open_at
                keys.update({one.prompt_index: link.routing_key(one.routing_key) for one in left})
                exchange = make(left)
                open_at = exchange, link
                await self._exchange(
                    link, exchange, keys[left[0].prompt_index] if len(left) == 1 else None, take
                )

            nonlocal open_at
            try:
                await self._servers.call(left, ask)
            except SglangToppError as error:
                # What broke off behind the last sample took nothing with it.
                if missing or not is_retryable(error):
                    raise
            finally:
                open_at = None

        def orders() -> dict[str, Callable[[], Any]] | None:
            if open_at is None:
                return None
            exchange, link = open_at
            return {name: functools.partial(link.stop, name) for name in exchange.open_ids()}

        work = self._servers.retrying(attempt, is_patient=is_patient)
        if self._interruption is None:
            await work
            return
        await self._interruption.follow(work, orders)
        for one in wanted:
            for sample in one.samples:
                if (one.prompt_index, sample) in missing:
                    keys.setdefault(one.prompt_index, one.routing_key)
                    take(self._nothing(one, sample))

    def _nothing(self, wanted: SampleRequest, sample: int) -> Any:
        rollout = nothing_generated(wanted, sample, self._request_id)
        if rollout is None:
            raise RolloutError(
                f"request {self._request_id} was aborted before the engine had taken in prompt"
                f" {wanted.prompt_index}, a text: its token ids are not known (a prompt that is given as ids"
                " comes back without a token)"
            )
        return rollout

    async def _exchange(
        self,
        link: Link,
        exchange: _Exchange[Result],
        routing_key: str | None,
        take: Callable[[Result], None],
    ) -> None:
        are_several = len(self._servers.links) > 1
        if are_several and self._work.exchanges[await link.kind()] is not type(exchange):
            raise InvalidInputError(
                f"base_url: {link.base_url} is of another kind than the others, expected engines or sidecars"
            )
        headers = {} if exchange.accept is None else {"Accept": exchange.accept}
        if routing_key is not None:
            headers[_ROUTING_KEY] = routing_key
        is_open = is_refused = False
        try:
            async with link.connections.post(exchange.path, exchange.body(), headers=headers) as messages:
                is_open = True
                async for message in messages:
                    if len(message) < _OFF_LOOP_BYTES:
                        results = exchange.read(message)
                    else:
                        results = await asyncio.to_thread(exchange.read, message)
                    while results:
                        take(results.pop(0))
                    # The next one may be long in coming, and this one large.
                    del message
            if not exchange.complete:
                raise TransportError("the answer was cut off: it ended before the line that closes it")
        except SglangToppError as error:
            if are_several:
                error.add_note(f"the server is {link.base_url}")
            refusals = (AuthenticationError, BadRequestError, OverloadedError)
            if not is_open and isinstance(error, refusals):
                is_refused = True
                if error.status in (404, 405) and exchange.missing_route:
                    raise BadRequestError(
                        exchange.missing_route, status=error.status, body=error.body
                    ) from error
            raise
        finally:
            if not is_refused:
                link.aborts.start(self._request_id, exchange.unfinished_ids())

    def _new_exchange(self, kind: Kind, wanted: Sequence[SampleRequest]) -> _Exchange[Result]:
        left_s = None
        if self._deadline is not None:
            left_s = max(self._deadline - asyncio.get_running_loop().time(), 0.001)
        options = self._options.get(kind, {})
        exchange: _Exchange[Result] = self._work.exchanges[kind](
            wanted, request_id=self._request_id, timeout_s=left_s, **options
        )
        return exchange


def _calls(groups: Iterable[Sequence[SampleRequest]], samples_per_call: int) -> Iterator[list[SampleRequest]]:
    """Consecutive prompts of a group, in calls that are full at `samples_per_call` samples."""
    for group in groups:
        call: list[SampleRequest] = []
        num_samples = 0
        for one in group:
            call.append(one)
            num_samples += len(one.samples)
            if num_samples >= samples_per_call:
                yield call
                call, num_samples = [], 0
        if call:
            yield call
