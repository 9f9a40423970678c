"""AsyncRolloutClient: many samples in flight on one event loop, retried and aborted sample by sample."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, TypeVar

from sglang_topp.errors import (
    AuthenticationError,
    BadRequestError,
    InvalidInputError,
    OverloadedError,
    RequestTimeoutError,
    RolloutError,
    SglangToppError,
    TransportError,
)
from sglang_topp_client.checks import check_request_id, seconds, shown, whole_number
from sglang_topp_client.fleet import Fleet
from sglang_topp_client.http import Server
from sglang_topp_client.interruption import Interruption
from sglang_topp_client.link import Kind, Link
from sglang_topp_client.partials import Partials
from sglang_topp_client.progress import Progress
from sglang_topp_client.request import (
    Prompts,
    SampleRequest,
    SamplingParams,
    TopLogprobsP,
    TopLogprobsSource,
    plan,
)
from sglang_topp_client.resuming import (
    OnAbort,
    check_on_abort,
    interruptible,
    nothing_generated,
    plan_resume,
)
from sglang_topp_client.retry import delay_s, is_refusal, is_retryable
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.sglang_api import GenerateExchange
from sglang_topp_client.sidecar_api import RolloutsExchange

__all__ = ["AsyncRolloutClient"]

_EXCHANGES: dict[Kind, type[RolloutsExchange] | type[GenerateExchange]] = {
    "sidecar": RolloutsExchange,
    "sglang": GenerateExchange,
}

# Gateways keep what has the same one on the same worker.
_ROUTING_KEY = "X-SMG-Routing-Key"
# A message this long takes milliseconds to decode; the other connections should not wait for that.
_OFF_LOOP_BYTES = 1 << 18
_CALLER_FIRST_S = 0.02
# A sidecar waits for its engine itself.
_GRACE_S: dict[Kind, float] = {"sglang": 5.0, "sidecar": 10.0}

_T = TypeVar("_T")


@dataclass
class _Loop:
    """What belongs to one event loop."""

    fleet: Fleet[Link]
    slots: asyncio.Semaphore
    running: dict[asyncio.Task[None], str] = field(default_factory=dict)
    """The requests in flight, with their names; several may share one."""
    interruptions: dict[asyncio.Task[None], Interruption] = field(default_factory=dict)
    """Of those whose samples are returned when they are aborted."""

    @property
    def links(self) -> list[Link]:
        """All servers."""
        return [member.server for member in self.fleet.members]

    def maker(self, wanted: Sequence[SampleRequest]) -> Link | None:
        """The server that made what these go on from, as far as it is one of them."""
        return next((link for link in self.links if link.made(wanted[0].routing_key)), None)


class AsyncRolloutClient:
    """Rollouts with their candidate sets, from a sidecar or straight from a patched SGLang, or from several.

    Of several servers, the one with the fewest samples in flight takes the next call; a prompt's samples stay
    together, for its prefix cache. What a server did not finish because it died, is full or fails goes to the
    others, and it is asked again later, after 0.5 to 8 s.

    Usable from any event loop, one after the other or side by side: connections belong to the loop
    that they were made in, and close with it (or with `close`). Pickles as its configuration.

    Args:
        base_url: `http://host:port`, of a sidecar or of an engine; or several, all of one kind, with the same
            model and weights.
        kind: what listens there; `"auto"` asks once, `GET /info`.
        api_key: sent as a bearer token; never along a redirect, none is followed.
        max_connections: how many calls may be in flight at once; the rest wait, for as long as it takes.
            They are fewer where the process may have fewer files open (`ulimit -n`): its clients share
            what is left of those, beside a reserve of 64.
        max_retries: how often a call is sent again after it met a transport error, 429 or 5xx.
        max_line_bytes: how long one message of an answer may be, which is about one sample; a longer one
            is an error before it has come whole. 512 MiB hold a sample of 32,000 tokens with 1,500
            candidates each.
        logprob_bits: 16 lets a sidecar round the log-probs in the candidate sets to 16 bits, each off by at
            most 0.001, and by at most 0.00012 where all of a sample's are above -15.99
            (`sglang_topp.compact.Packed`); `Rollout.logprobs` stay exact. An engine, or an older sidecar,
            sends all 32.

    Raises:
        InvalidInputError: an argument is wrong.
    """

    # All: a server may take who does not read for one that is gone.
    _LONG_LINES_AT_ONCE = 1 << 30

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
        if not isinstance(kind, str) or kind not in ("auto", "sidecar", "sglang"):
            raise InvalidInputError(f"kind: got {shown(kind)}, expected 'auto', 'sidecar' or 'sglang'")
        whole_number("max_retries", max_retries, 0)
        if whole_number("logprob_bits", logprob_bits, 16) not in (16, 32):
            raise InvalidInputError(f"logprob_bits: got {shown(logprob_bits)}, expected 16 or 32")
        self._servers = [
            Server(url, max_connections, max_line_bytes, api_key) for url in _addresses(base_url)
        ]
        self._base_url = base_url if isinstance(base_url, str) else tuple(base_url)
        self._asked_kind = kind
        self._kinds: dict[str, Kind] = (
            {} if kind == "auto" else dict.fromkeys((server.base_url for server in self._servers), kind)
        )
        self._max_retries = max_retries
        self._logprob_bits = logprob_bits
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(
            type(self),
            self._base_url,
            kind=self._asked_kind,
            api_key=self._servers[0].api_key,
            max_connections=self._servers[0].max_connections,
            max_retries=self._max_retries,
            max_line_bytes=self._servers[0].max_line_bytes,
            logprob_bits=self._logprob_bits,
        ), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._base_url!r}, kind={self._asked_kind!r})"

    # -- rollouts ----------------------------------------------------------------------------------

    async def generate(
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
        """Generate for every prompt; all samples, or an exception, and then what is left is aborted.

        Aborting goes on behind the caller's back (`close` waits for it): neither a time limit nor a
        cancellation waits for an engine that hangs.

        Args:
            prompts: one text, several texts, the token ids of one prompt, or of several.
            sampling_params: SGLang's names; one mapping for all, or one per prompt. `n` is the number
                of samples of each prompt.
            top_logprobs_p: the threshold p of the candidate sets, one for all or one per prompt; None
                or 0 for none.
            top_logprobs_source: `"sampler"` in place of a threshold: the sets are what the engine's
                sampler could draw under top_k, top_p and min_p of `sampling_params`. One for all or one
                per prompt; None or `"distribution"` where a threshold makes them.
            on_abort: what becomes of a sample that the engine is told to abort, by `abort`, by a pause or by
                a weight update. `"raise"`: it is an error. `"return"`: it is a rollout with finish reason
                `"abort"`, which holds what was generated, whole in every field, and can be given to
                `resume`. `"resume"`: it is gone on with, as often as that happens and once the engine takes
                requests again, and comes as if nothing had been; `max_new_tokens` has to be given then.
            timeout_s: the time limit for all of it, retries included; None waits for as long as it takes.
            progress: None shows a progress line for what takes longer than two seconds, True always,
                False never; only ever where stderr is a terminal.
            request_id: a name for `abort` and for the server's logs, printable and of 512 characters at
                most; a random one by default.

        Returns:
            The rollouts in the order of the prompts, then of the samples.

        Raises:
            InvalidInputError: an argument is wrong; nothing was sent. With `on_abort="resume"`, also a
                sampling parameter that cannot be exact across an interruption
                (`sglang_topp.resumable`): penalties, grammars, custom parameters.
            BadRequestError, AuthenticationError: the server refuses the request.
            RequestTimeoutError: `timeout_s` passed.
            TransportError, OverloadedError, ServerError: and so did every retry.
            RolloutError: the engine gave up on a sample, or `abort` was called.
            MissingCandidateSetsError: the answer lacks the sets that were asked for.
            SampledTokenMissingError: a set lacks its sampled token.
            WireError: anything else in the answer is not exact.
        """
        rollouts = [
            rollout
            async for rollout in self.stream(
                prompts,
                sampling_params,
                top_logprobs_p=top_logprobs_p,
                top_logprobs_source=top_logprobs_source,
                on_abort=on_abort,
                timeout_s=timeout_s,
                progress=progress,
                request_id=request_id,
            )
        ]
        return sorted(rollouts, key=lambda rollout: (rollout.prompt_index, rollout.sample_index))

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
    ) -> AsyncGenerator[Rollout, None]:
        """As `generate`, but each sample as it finishes, in any order.

        Nothing is sent before the first sample is asked for. Closing the iterator (`aclose`, or
        `contextlib.aclosing` around it) aborts what is left in the engine. A sample is never
        delivered twice; after a connection broke, only samples that had not finished are generated
        again.
        """
        wanted = plan(prompts, sampling_params, top_logprobs_p, top_logprobs_source)
        return self._stream(wanted, {}, on_abort, timeout_s, progress, request_id)

    async def resume(
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
        """Go on with rollouts that were interrupted, ran into `max_new_tokens`, or were extended.

        Each becomes one rollout, as if it had been made at one go: ids, text, log-probs, sets and weight
        versions are those of before and then those of now (another engine, or newer weights, may make them).
        Stop strings and end tokens end it wherever the cut is. What `Rollout.extend` appended begins a new
        turn: `max_new_tokens`, `min_new_tokens` and stop strings are of the last turn alone.

        A rollout with finish reason `"stop"` is returned as it is; one whose last turn has no token left
        under `max_new_tokens` as well, with the finish reason `"length"`.

        Args:
            rollouts: one or several, as `generate` returned them; they may have been saved meanwhile.
            sampling_params: as for `generate`, the same as then: `max_new_tokens` and `min_new_tokens` are
                those of the whole turn, and must be given. `n` is passed over: each rollout is one sample.
                One mapping for all, or one per rollout.
            top_logprobs_p: as for `generate`; sets are asked for where the rollouts have some, by the same
                rule.
            top_logprobs_source: as for `generate`.
            on_abort: as for `generate`.
            timeout_s: as for `generate`.
            progress: as for `generate`.
            request_id: as for `generate`.

        Returns:
            The rollouts in the order in which they were given, with the indices that they had.

        Raises:
            InvalidInputError: an argument is wrong, or a sampling parameter cannot be exact where a turn has
                begun; nothing was sent.
            Exception: as `generate`.
        """
        wanted, given = plan_resume(rollouts, sampling_params, top_logprobs_p, top_logprobs_source)
        made = self._stream(wanted, dict(enumerate(given)), on_abort, timeout_s, progress, request_id)
        # Several may have the same indices.
        by_place = {rollout.prompt_index: rollout async for rollout in made}
        return [
            replace(by_place[place], prompt_index=rollout.prompt_index, sample_index=rollout.sample_index)
            for place, rollout in enumerate(given)
        ]

    async def abort(self, request_id: str) -> None:
        """Stop a request, in the engine too; whoever waits for it gets a RolloutError.

        With `on_abort="return"` the samples are stopped in the engine while their connections stay open, and
        whoever waits gets what was generated. An engine that ends none of them for five seconds (ten, with a
        sidecar before it) is given up: samples of which nothing has come are rollouts of no token then (or a
        RolloutError, where the prompt is a text that the engine has not taken in).

        What this client has in flight under that name on this event loop has stopped when this
        returns, and its engine has been told (where that takes longer than three seconds, it is left to
        the closed connections). Where there is none, the server, each of several, is asked to abort the
        request of that id (an engine's as in `Rollout.request_id`, a sidecar's as its caller named it).
        """
        check_request_id(request_id)
        here = self._here()
        workers = [worker for worker, name in here.running.items() if name == request_id]
        if workers:
            await _interrupt(here, workers)
            await _stop([worker for worker in workers if worker not in here.interruptions])
            await asyncio.gather(*(link.aborts.finish(request_id) for link in here.links))
        else:
            await self._order(here, lambda link: link.stop(request_id))

    async def abort_all(self) -> None:
        """Stop everything that the engine, each of several, has in flight, whoever asked for it; for whoever
        is about to push weights.

        What becomes of each sample is what its request says: an error, a rollout with finish reason
        `"abort"`, or it is resumed (pause the engine first, so that this is not at once). Requests of this
        client with `on_abort="return"` stop as by `abort`, those that were not sent yet included.
        """
        here = self._here()
        order = self._order(here, lambda link: link.stop_all())
        await asyncio.gather(order, _interrupt(here, list(here.running)))

    async def _order(self, here: _Loop, give: Callable[[Link], Awaitable[None]]) -> None:
        """Give an order to all servers."""
        await self._kind_here(here)
        failed = await asyncio.gather(*map(give, here.links), return_exceptions=True)
        # A server that is gone has nothing left of it.
        if all(failed):
            assert isinstance(failed[0], BaseException)
            raise failed[0]

    async def server_info(self, base_url: str | None = None) -> dict[str, Any]:
        """What the server says about itself: a sidecar's `/info`, SGLang's `/server_info`.

        Args:
            base_url: which one, where there are several.
        """
        links = self._here().links
        if base_url is not None:
            links = [link for link in links if link.base_url == base_url]
        if len(links) != 1:
            known = ", ".join(server.base_url for server in self._servers)
            raise InvalidInputError(f"base_url: got {shown(base_url)}, expected one of {known}")
        return await self._retrying(links[0].info)

    async def close(self) -> None:
        """Stop what is in flight on this event loop and close its connections; the client stays usable.

        Waits until the engine has been told what to abort, for three seconds at most.
        """
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is None:
            return
        try:
            await _stop(list(here.running))
            await asyncio.gather(*(link.aborts.finish() for link in here.links))
        finally:
            await asyncio.gather(*(link.connections.aclose() for link in here.links))

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- one request -------------------------------------------------------------------------------

    def _stream(
        self,
        wanted: Sequence[SampleRequest],
        given: Mapping[int, Rollout],
        on_abort: OnAbort,
        timeout_s: float | None,
        progress: bool | None,
        request_id: str | None,
    ) -> AsyncGenerator[Rollout, None]:
        """The samples, after a check of the other arguments; `given` is what is there, by prompt index."""
        if timeout_s is not None:
            timeout_s = seconds("timeout_s", timeout_s)
        if progress is not None and not isinstance(progress, bool):
            raise InvalidInputError(f"progress: got {shown(progress)}, expected True, False or None")
        if request_id is not None:
            check_request_id(request_id)
        check_on_abort(on_abort)
        wanted = interruptible(wanted, on_abort)
        return self._samples(wanted, given, on_abort, timeout_s, progress, request_id or uuid.uuid4().hex)

    async def _samples(
        self,
        wanted: Sequence[SampleRequest],
        given: Mapping[int, Rollout],
        on_abort: OnAbort,
        timeout_s: float | None,
        progress: bool | None,
        request_id: str,
    ) -> AsyncGenerator[Rollout, None]:
        here = self._here()
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        too_late = RequestTimeoutError(f"timeout_s: {timeout_s} s passed before every sample finished")
        finished: asyncio.Queue[Rollout | None] = asyncio.Queue()
        partials = Partials(wanted, on_abort, finished.put_nowait, given)
        interruption = None
        if on_abort == "return":
            interruption = Interruption(_GRACE_S[next(iter(self._kinds.values()), "sidecar")])
        worker = asyncio.create_task(self._run(here, partials, deadline, request_id, interruption))
        here.running[worker] = request_id
        if interruption is not None:
            here.interruptions[worker] = interruption

        def end(_: asyncio.Task[None]) -> None:
            del here.running[worker]
            here.interruptions.pop(worker, None)
            finished.put_nowait(None)
            if not worker.cancelled():
                # Whoever left before does not ask for it.
                worker.exception()

        worker.add_done_callback(end)
        try:
            with Progress(sum(len(one.samples) for one in wanted), progress) as bar:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline):
                            rollout = await finished.get()
                    except TimeoutError:
                        raise too_late from None
                    if rollout is None:
                        break
                    bar.add(len(rollout.output_ids))
                    yield rollout
            if worker.cancelled():
                raise RolloutError(f"request {request_id} was aborted by this client")
            try:
                worker.result()
            except TimeoutError:
                raise too_late from None
        finally:
            # Not waited for: with hundreds in flight, closing their connections takes a second.
            worker.cancel()

    async def _run(
        self,
        here: _Loop,
        partials: Partials,
        deadline: float | None,
        request_id: str,
        interruption: Interruption | None,
    ) -> None:
        """Deliver every sample, or raise the first error after everything has stopped.

        Raises:
            TimeoutError: the deadline passed; nobody may be there to hear it.
        """
        # Who waits for it is told first.
        end = None if deadline is None else deadline + _CALLER_FIRST_S
        try:
            with ExitStack() as stack:
                for link in here.links:
                    stack.enter_context(link.aborts.expected())
                async with asyncio.timeout_at(end):
                    kind = await self._kind_here(here)
                    exchange_type = _EXCHANGES[kind]
                    options = {"logprob_bits": self._logprob_bits} if kind == "sidecar" else {}
                    make = functools.partial(_new_exchange, exchange_type, request_id, deadline, options)
                    call = functools.partial(self._call, here, request_id, make, interruption)
                    num_samples = exchange_type.samples_per_call

                    async def go_on(missing: SampleRequest, wait_s: float) -> None:
                        await asyncio.sleep(wait_s)
                        await call(take, [missing], is_patient=True)

                    async with asyncio.TaskGroup() as group:

                        def take(rollout: Rollout) -> None:
                            if (more := partials.take(rollout)) is not None:
                                group.create_task(go_on(*more))

                        for some in _calls(_by_maker(here, list(partials.begin())), num_samples):
                            group.create_task(call(take, some))
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
        here: _Loop,
        request_id: str,
        make: Callable[[Sequence[SampleRequest]], RolloutsExchange | GenerateExchange],
        interruption: Interruption | None,
        deliver: Callable[[Rollout], None],
        wanted: Sequence[SampleRequest],
        *,
        is_patient: bool = False,
    ) -> None:
        """One call and its retries, each of which asks for what is still missing, under a fresh id; without
        an end while the server refuses, where `is_patient`."""
        missing = {(one.prompt_index, sample) for one in wanted for sample in one.samples}
        exchange: RolloutsExchange | GenerateExchange | None = None
        asked: Link | None = None

        def take(rollout: Rollout) -> None:
            missing.remove((rollout.prompt_index, rollout.sample_index))
            if interruption is not None:
                interruption.note_progress()
            deliver(rollout)

        async def attempt() -> None:
            nonlocal exchange, asked
            left = [
                replace(one, samples=samples)
                for one in wanted
                if (samples := tuple(s for s in one.samples if (one.prompt_index, s) in missing))
            ]
            try:
                async with here.slots:
                    with here.fleet.member(len(missing), here.maker(left)) as link:
                        keys = {one.prompt_index: link.routing_key(one.routing_key) for one in left}
                        exchange, asked = make(left), link
                        await self._exchange(link, request_id, exchange, keys, take)
            except SglangToppError as error:
                # What broke off behind the last sample took nothing with it.
                if missing or not is_retryable(error):
                    raise
            finally:
                exchange = asked = None

        work = self._retrying(attempt, here.fleet, is_patient=is_patient)
        if interruption is None:
            await work
            return

        async def stop(name: str) -> None:
            if asked is not None:
                await asked.stop(name)

        await interruption.follow(work, lambda: None if exchange is None else exchange.open_ids(), stop)
        for one in wanted:
            for sample in one.samples:
                if (one.prompt_index, sample) in missing:
                    take(_nothing(one, sample, request_id))

    async def _exchange(
        self,
        link: Link,
        request_id: str,
        exchange: RolloutsExchange | GenerateExchange,
        keys: Mapping[int, str],
        take: Callable[[Rollout], None],
    ) -> None:
        if len(self._servers) > 1 and _EXCHANGES[await link.kind()] is not type(exchange):
            raise InvalidInputError(
                f"base_url: {link.base_url} is of another kind than the others, expected engines or sidecars"
            )
        headers = {} if exchange.accept is None else {"Accept": exchange.accept}
        if len(keys) == 1:
            (headers[_ROUTING_KEY],) = keys.values()
        is_open = is_refused = False
        try:
            async with link.connections.post(exchange.path, exchange.body(), headers=headers) as messages:
                is_open = True
                async for message in messages:
                    if len(message) < _OFF_LOOP_BYTES:
                        rollouts = exchange.read(message)
                    else:
                        rollouts = await asyncio.to_thread(exchange.read, message)
                    while rollouts:
                        rollout = rollouts.pop(0)
                        take(replace(rollout, routing_key=keys[rollout.prompt_index]))
                        del rollout
                    # The next one may be long in coming, and this one large.
                    del message
            if not exchange.complete:
                raise TransportError("the answer was cut off: it ended before the line that closes it")
        except SglangToppError as error:
            if len(self._servers) > 1:
                error.add_note(f"the server is {link.base_url}")
            refusals = (AuthenticationError, BadRequestError, OverloadedError)
            is_refused = not is_open and isinstance(error, refusals)
            raise
        finally:
            if not is_refused:
                link.aborts.start(request_id, exchange.unfinished_ids())

    # -- the server --------------------------------------------------------------------------------

    def _here(self) -> _Loop:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            # Other threads add theirs meanwhile.
            for other in list(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            links = [Link(server, self._kinds, self._LONG_LINES_AT_ONCE) for server in self._servers]
            slots = asyncio.Semaphore(self._servers[0].max_connections)
            self._loops[loop] = _Loop(Fleet(links, loop.time), slots)
        return self._loops[loop]

    async def _kind_here(self, here: _Loop) -> Kind:
        """What all servers are, as whichever answers tells."""

        async def ask() -> Kind:
            with here.fleet.member(0) as link:
                return await link.kind()

        for known in self._kinds.values():
            return known
        return await self._retrying(ask, here.fleet)

    async def _retrying(
        self,
        attempt: Callable[[], Awaitable[_T]],
        fleet: Fleet[Link] | None = None,
        *,
        is_patient: bool = False,
    ) -> _T:
        """Until it succeeds; at once where an attempt goes to another server of the fleet then."""
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
            if fleet is None or not fleet.has_another:
                await asyncio.sleep(wait_s)


def _addresses(base_url: Any) -> list[Any]:
    """One for each server."""
    if isinstance(base_url, str | bytes) or not isinstance(base_url, Sequence):
        return [base_url]
    if not base_url:
        raise InvalidInputError("base_url: got none, expected at least one")
    plain = [url.rstrip("/") if isinstance(url, str) else url for url in base_url]
    if twice := [url for i, url in enumerate(plain) if url in plain[:i]]:
        raise InvalidInputError(f"base_url: got {shown(twice[0])} twice, expected different servers")
    return list(base_url)


async def _interrupt(here: _Loop, workers: Sequence[asyncio.Task[None]]) -> None:
    """Stop those whose samples are returned, and wait until they are."""
    ending = [worker for worker in workers if worker in here.interruptions]
    for worker in ending:
        here.interruptions[worker].ask()
    await asyncio.gather(*ending, return_exceptions=True)


def _nothing(wanted: SampleRequest, sample: int, request_id: str) -> Rollout:
    rollout = nothing_generated(wanted, sample, request_id)
    if rollout is None:
        raise RolloutError(
            f"request {request_id} was aborted before the engine had taken in prompt {wanted.prompt_index}, a"
            " text: its token ids are not known (a prompt that is given as ids comes back without a token)"
        )
    return rollout


async def _stop(workers: Sequence[asyncio.Task[None]]) -> None:
    """Cancel and wait until all have cleaned up after themselves, whatever they end with."""
    for worker in workers:
        if not worker.cancelling():
            worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


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


def _by_maker(here: _Loop, wanted: Sequence[SampleRequest]) -> Iterable[Sequence[SampleRequest]]:
    """In groups that go on from what one server made, or from nothing."""
    if not any(one.routing_key for one in wanted):
        return [wanted]
    groups: dict[Link | None, list[SampleRequest]] = {}
    for one in wanted:
        groups.setdefault(here.maker([one]), []).append(one)
    return groups.values()


def _new_exchange(
    exchange_type: type[RolloutsExchange] | type[GenerateExchange],
    request_id: str,
    deadline: float | None,
    options: dict[str, Any],
    wanted: Sequence[SampleRequest],
) -> RolloutsExchange | GenerateExchange:
    left_s = None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.001)
    return exchange_type(wanted, request_id=request_id, timeout_s=left_s, **options)
