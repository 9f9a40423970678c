"""AsyncRolloutClient: many samples in flight on one event loop, retried and aborted sample by sample."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Generic, Literal

from sglang_topp.errors import InvalidInputError, RequestTimeoutError, RolloutError
from sglang_topp_client.calls import ROLLOUTS, SCORES, Calls, Parts, Result, Work
from sglang_topp_client.checks import check_request_id, seconds, shown, whole_number
from sglang_topp_client.http import Server
from sglang_topp_client.interruption import Interruption
from sglang_topp_client.link import Kind
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
from sglang_topp_client.resuming import OnAbort, check_on_abort, interruptible, plan_resume
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.score import Score
from sglang_topp_client.score_request import Sequences, Start, plan_scores
from sglang_topp_client.servers import Servers

__all__ = ["AsyncRolloutClient"]

_CALLER_FIRST_S = 0.02
# For how long nothing may come of what was told to stop. A sidecar waits for its engine itself.
_GRACE_S: dict[Kind, float] = {"sglang": 5.0, "sidecar": 10.0}


@dataclass
class _Loop:
    """What belongs to one event loop."""

    servers: Servers
    running: dict[asyncio.Task[None], str] = field(default_factory=dict)
    """The requests in flight, with their names; several may share one."""
    interruptions: dict[asyncio.Task[None], Interruption] = field(default_factory=dict)
    """Of those whose samples are returned when they are aborted."""


@dataclass(frozen=True)
class _Whole(Generic[Result]):
    """Results that come whole or not at all."""

    wanted: Sequence[SampleRequest]
    deliver: Callable[[Result], None]

    def begin(self) -> Iterator[SampleRequest]:
        return iter(self.wanted)

    def take(self, result: Result, /) -> None:
        self.deliver(result)


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

    # -- scores ------------------------------------------------------------------------------------

    async def score(
        self,
        sequences: Sequences,
        *,
        top_logprobs_p: TopLogprobsP = None,
        start: Start = None,
        timeout_s: float | None = None,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> list[Score]:
        """The log-probs, and the candidate sets, that the engine's model gives sequences as they are; nothing
        is generated.

        The distribution at a position is the model's own: at temperature 1, without penalties, bias or
        grammar, whatever a sequence was sampled with. All sequences, or an exception, as in `generate`.

        Args:
            sequences: one text, several texts, the token ids of one sequence, or of several; a Rollout or
                several, of which prompt and output are scored together.
            top_logprobs_p: the threshold p of the candidate sets, one for all or one per sequence; None or
                0 for none. (What a sampler could draw, nobody knows of tokens that it did not.)
            start: the first position that is scored, 1 or more, one for all or one per sequence. By default
                1, and in a Rollout its first generated token. The token at position 0 has nothing before
                it, so it has no distribution. The length of the sequence scores none of it.
            timeout_s: as in `generate`.
            progress: as in `generate`.
            request_id: as in `generate`.

        Returns:
            The scores in the order of the sequences.

        Raises:
            BadRequestError: the server refuses a sequence; also one that is longer than the engine takes as
                a prompt (SGLang 0.5.23: some tokens less than its context), or a sidecar that cannot score.
            SglangToppError: what `generate` raises.
        """
        scores = [
            score
            async for score in self.stream_scores(
                sequences,
                top_logprobs_p=top_logprobs_p,
                start=start,
                timeout_s=timeout_s,
                progress=progress,
                request_id=request_id,
            )
        ]
        return sorted(scores, key=lambda score: score.sequence_index)

    def stream_scores(
        self,
        sequences: Sequences,
        *,
        top_logprobs_p: TopLogprobsP = None,
        start: Start = None,
        timeout_s: float | None = None,
        progress: bool | None = None,
        request_id: str | None = None,
    ) -> AsyncGenerator[Score, None]:
        """As `score`, but each sequence as it is scored, in any order; otherwise as `stream`."""
        timeout_s = _check_call(timeout_s, progress, request_id)
        wanted = plan_scores(sequences, top_logprobs_p, start)
        parts = functools.partial(_Whole[Score], wanted)
        name = request_id or uuid.uuid4().hex
        return self._results(SCORES, parts, len(wanted), timeout_s, progress, name)

    # -- requests in flight ------------------------------------------------------------------------

    async def abort(self, request_id: str) -> None:
        """Stop a request, in the engine too; whoever waits for it gets a RolloutError.

        With `on_abort="return"` the samples are stopped in the engine while their connections stay open, and
        whoever waits gets what was generated. An engine that ends none of them for five seconds (ten, with a
        sidecar before it) is given up: samples of which nothing has come are rollouts of no token then (or a
        RolloutError, where the prompt is a text that the engine has not taken in).

        What this client has in flight under that name on this event loop has stopped when this
        returns, and its engine has been told (where that takes longer than three seconds, it is left to
        the closed connections). Where there is none, the server is asked to abort the request of that id
        (an engine's as in `Rollout.request_id`, a sidecar's as its caller named it), each of several.
        """
        check_request_id(request_id)
        if not await self._abort_here(request_id):
            await self._here().servers.tell_all(lambda link: link.stop(request_id))

    async def _abort_here(self, request_id: str) -> bool:
        """Stop what is in flight on this event loop under that name; whether there was any."""
        here = self._here()
        workers = [worker for worker, name in here.running.items() if name == request_id]
        if workers:
            await _interrupt(here, workers)
            await _stop([worker for worker in workers if worker not in here.interruptions])
            await here.servers.aborted(request_id)
        return bool(workers)

    async def abort_all(self) -> None:
        """Stop everything that the engine has in flight, or every engine, whoever asked for it.

        What becomes of each sample is what its request says: an error, a rollout with finish reason
        `"abort"`, or it is resumed (pause the engine first, so that this is not at once). Requests of this
        client with `on_abort="return"` stop as by `abort`, those that were not sent yet included.
        """
        here = self._here()
        order = here.servers.tell_all(lambda link: link.stop_all())
        await asyncio.gather(order, _interrupt(here, list(here.running)))

    async def server_info(self, base_url: str | None = None) -> dict[str, Any]:
        """What the server says about itself: a sidecar's `/info`, SGLang's `/server_info`.

        Args:
            base_url: which one, where there are several.
        """
        servers = self._here().servers
        links = servers.links
        if base_url is not None:
            links = [link for link in links if link.base_url == base_url]
        if len(links) != 1:
            known = ", ".join(server.base_url for server in self._servers)
            raise InvalidInputError(f"base_url: got {shown(base_url)}, expected one of {known}")
        return await servers.retrying(links[0].info)

    async def close(self) -> None:
        """Stop what is in flight on this event loop and close its connections; the client stays usable.

        Waits until the engine has been told what to abort, for three seconds at most.
        """
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is None:
            return
        try:
            await _stop(list(here.running))
            await here.servers.aborted()
        finally:
            await here.servers.close()

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
        timeout_s = _check_call(timeout_s, progress, request_id)
        check_on_abort(on_abort)
        wanted = interruptible(wanted, on_abort)

        def parts(deliver: Callable[[Rollout], None]) -> Partials:
            return Partials(wanted, on_abort, deliver, given)

        count = sum(len(one.samples) for one in wanted)
        name = request_id or uuid.uuid4().hex
        returns_partial = on_abort == "return"
        return self._results(
            ROLLOUTS, parts, count, timeout_s, progress, name, can_be_interrupted=returns_partial
        )

    async def _results(
        self,
        work: Work[Result],
        parts: Callable[[Callable[[Result], None]], Parts[Result]],
        count: int,
        timeout_s: float | None,
        progress: bool | None,
        request_id: str,
        *,
        can_be_interrupted: bool = False,
    ) -> AsyncGenerator[Result, None]:
        """What `parts`, given where results are to be put, puts there; `count` of them."""
        here = self._here()
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        too_late = RequestTimeoutError(f"timeout_s: {timeout_s} s passed before every {work.one} finished")
        finished: asyncio.Queue[Result | None] = asyncio.Queue()
        interruption = None
        if can_be_interrupted:
            interruption = Interruption(_GRACE_S[here.servers.known_kind or "sidecar"])
        options: dict[Kind, dict[str, Any]] = {"sidecar": {"logprob_bits": self._logprob_bits}}
        calls = Calls(here.servers, work, request_id, deadline, options, interruption)
        worker = asyncio.create_task(_run(here.servers, calls, parts(finished.put_nowait), deadline))
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
            with Progress(count, progress, of=work.many) as bar:
                while True:
                    try:
                        async with asyncio.timeout_at(deadline):
                            result = await finished.get()
                    except TimeoutError:
                        raise too_late from None
                    if result is None:
                        break
                    bar.add(work.num_tokens(result))
                    yield result
            if worker.cancelled():
                raise RolloutError(f"request {request_id} was aborted by this client")
            try:
                worker.result()
            except TimeoutError:
                raise too_late from None
        finally:
            # Not waited for: with hundreds in flight, closing their connections takes a second.
            worker.cancel()

    # -- the servers -------------------------------------------------------------------------------

    def _here(self) -> _Loop:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            # Other threads add theirs meanwhile.
            for other in list(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            self._loops[loop] = _Loop(
                Servers(
                    self._servers,
                    self._kinds,
                    long_lines_at_once=self._LONG_LINES_AT_ONCE,
                    max_retries=self._max_retries,
                )
            )
        return self._loops[loop]


async def _run(servers: Servers, calls: Calls[Result], parts: Parts[Result], deadline: float | None) -> None:
    """Everything, or the first error after everything has stopped.

    Raises:
        TimeoutError: the deadline passed; nobody may be there to hear it.
    """
    # Who waits for it is told first.
    end = None if deadline is None else deadline + _CALLER_FIRST_S
    with servers.aborts_expected():
        async with asyncio.timeout_at(end):
            await calls.run(parts)


async def _interrupt(here: _Loop, workers: Sequence[asyncio.Task[None]]) -> None:
    """Stop those whose samples are returned, and wait until they are."""
    ending = [worker for worker in workers if worker in here.interruptions]
    for worker in ending:
        here.interruptions[worker].ask()
    await asyncio.gather(*ending, return_exceptions=True)


async def _stop(workers: Sequence[asyncio.Task[None]]) -> None:
    """Cancel and wait until all have cleaned up after themselves, whatever they end with."""
    for worker in workers:
        if not worker.cancelling():
            worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


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


def _check_call(timeout_s: Any, progress: Any, request_id: Any) -> float | None:
    """Check what every call takes; returns the time limit as a number."""
    if progress is not None and not isinstance(progress, bool):
        raise InvalidInputError(f"progress: got {shown(progress)}, expected True, False or None")
    if request_id is not None:
        check_request_id(request_id)
    return None if timeout_s is None else seconds("timeout_s", timeout_s)
