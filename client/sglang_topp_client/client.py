"""AsyncRolloutClient: many samples in flight on one event loop, retried and aborted sample by sample."""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from sglang_topp.errors import (
    AuthenticationError,
    BadRequestError,
    InvalidInputError,
    OverloadedError,
    RequestTimeoutError,
    RolloutError,
    SglangToppError,
    TransportError,
    WireError,
)
from sglang_topp_client import aborts
from sglang_topp_client.aborts import Aborts
from sglang_topp_client.checks import check_request_id, seconds, shown, whole_number
from sglang_topp_client.http import Connections, Server
from sglang_topp_client.progress import Progress
from sglang_topp_client.request import (
    Prompts,
    SampleRequest,
    SamplingParams,
    TopLogprobsP,
    TopLogprobsSource,
    plan,
)
from sglang_topp_client.retry import delay_s, is_retryable
from sglang_topp_client.rollout import Rollout
from sglang_topp_client.score import Score
from sglang_topp_client.score_request import Sequences, Start, plan_scores
from sglang_topp_client.sglang_api import GenerateExchange, StreamedExchange
from sglang_topp_client.sglang_scores import GenerateScoreExchange
from sglang_topp_client.sidecar_api import SERVICE, RolloutsExchange, SidecarExchange
from sglang_topp_client.sidecar_scores import ScoresExchange

__all__ = ["AsyncRolloutClient"]

Kind: TypeAlias = Literal["sidecar", "sglang"]
_INFO_PATHS: dict[Kind, str] = {"sidecar": "/info", "sglang": "/server_info"}

_INFO_TIMEOUT_S = 30.0
# A message this long takes milliseconds to decode; the other connections should not wait for that.
_OFF_LOOP_BYTES = 1 << 18
_CALLER_FIRST_S = 0.02

_T = TypeVar("_T")
_Result = TypeVar("_Result", Rollout, Score)
_Exchange: TypeAlias = SidecarExchange[_Result] | StreamedExchange[_Result]


@dataclass(frozen=True)
class _Work(Generic[_Result]):
    """What calls are for.

    Attributes:
        one, many: what a call returns, in words.
        exchanges: how each kind of server is asked for it.
        place: which one a result is, by prompt and sample.
        num_tokens: how many tokens it tells of.
    """

    one: str
    many: str
    exchanges: Mapping[Kind, type[SidecarExchange[_Result]] | type[StreamedExchange[_Result]]]
    place: Callable[[_Result], tuple[int, int]]
    num_tokens: Callable[[_Result], int]


_ROLLOUTS = _Work[Rollout](
    "sample",
    "rollouts",
    {"sidecar": RolloutsExchange, "sglang": GenerateExchange},
    lambda rollout: (rollout.prompt_index, rollout.sample_index),
    lambda rollout: len(rollout.output_ids),
)
_SCORES = _Work[Score](
    "sequence",
    "scores",
    {"sidecar": ScoresExchange, "sglang": GenerateScoreExchange},
    lambda score: (score.sequence_index, 0),
    lambda score: len(score.logprobs),
)


@dataclass
class _Loop:
    """What belongs to one event loop."""

    connections: Connections
    aborts: Aborts
    slots: asyncio.Semaphore
    kind_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: dict[asyncio.Task[None], str] = field(default_factory=dict)
    """The requests in flight, with their names; several may share one."""


class AsyncRolloutClient:
    """Rollouts with their candidate sets, from a sidecar or straight from a patched SGLang.

    Usable from any event loop, one after the other or side by side: connections belong to the loop
    that they were made in, and close with it (or with `close`). Pickles as its configuration.

    Args:
        base_url: `http://host:port`, of a sidecar or of an engine.
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
        base_url: str,
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
        self._server = Server(base_url, max_connections, max_line_bytes, api_key)
        self._asked_kind = kind
        self._kind: Kind | None = None if kind == "auto" else kind
        self._max_retries = max_retries
        self._logprob_bits = logprob_bits
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(
            type(self),
            self._server.base_url,
            kind=self._asked_kind,
            api_key=self._server.api_key,
            max_connections=self._server.max_connections,
            max_retries=self._max_retries,
            max_line_bytes=self._server.max_line_bytes,
            logprob_bits=self._logprob_bits,
        ), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._server.base_url!r}, kind={self._asked_kind!r})"

    # -- rollouts ----------------------------------------------------------------------------------

    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams = None,
        *,
        top_logprobs_p: TopLogprobsP = None,
        top_logprobs_source: TopLogprobsSource = None,
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
            timeout_s: the time limit for all of it, retries included; None waits for as long as it takes.
            progress: None shows a progress line for what takes longer than two seconds, True always,
                False never; only ever where stderr is a terminal.
            request_id: a name for `abort` and for the server's logs, printable and of 512 characters at
                most; a random one by default.

        Returns:
            The rollouts in the order of the prompts, then of the samples.

        Raises:
            InvalidInputError: an argument is wrong; nothing was sent.
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
        timeout_s = _check_call(timeout_s, progress, request_id)
        wanted = plan(prompts, sampling_params, top_logprobs_p, top_logprobs_source)
        return self._results(_ROLLOUTS, wanted, timeout_s, progress, request_id or uuid.uuid4().hex)

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
        return self._results(_SCORES, wanted, timeout_s, progress, request_id or uuid.uuid4().hex)

    # -- requests in flight ------------------------------------------------------------------------

    async def abort(self, request_id: str) -> None:
        """Stop a request, in the engine too; whoever waits for it gets a RolloutError.

        What this client has in flight under that name on this event loop has stopped when this
        returns, and its engine has been told (where that takes longer than three seconds, it is left to
        the closed connections). Where there is none, an engine is asked to abort the request of that id
        (as in `Rollout.request_id`); a sidecar takes no such order, it watches its connections instead.
        """
        check_request_id(request_id)
        here = self._here()
        workers = [worker for worker, name in here.running.items() if name == request_id]
        if workers:
            await _stop(workers)
            await here.aborts.finish(request_id)
        elif await self._kind_here(here) == "sglang":
            await _abort_in_engine(here.connections, request_id)

    async def server_info(self) -> dict[str, Any]:
        """What the server says about itself: a sidecar's `/info`, SGLang's `/server_info`."""
        here = self._here()
        path = _INFO_PATHS[await self._kind_here(here)]
        info = await self._retrying(
            lambda: here.connections.request_json("GET", path, timeout_s=_INFO_TIMEOUT_S)
        )
        if not isinstance(info, dict):
            raise WireError(path, f"got {type(info).__name__}, expected an object")
        return info

    async def close(self) -> None:
        """Stop what is in flight on this event loop and close its connections; the client stays usable.

        Waits until the engine has been told what to abort, for three seconds at most.
        """
        here = self._loops.pop(asyncio.get_running_loop(), None)
        if here is None:
            return
        try:
            await _stop(list(here.running))
            await here.aborts.finish()
        finally:
            await here.connections.aclose()

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    # -- one request -------------------------------------------------------------------------------

    async def _results(
        self,
        work: _Work[_Result],
        wanted: Sequence[SampleRequest],
        timeout_s: float | None,
        progress: bool | None,
        request_id: str,
    ) -> AsyncGenerator[_Result, None]:
        here = self._here()
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        too_late = RequestTimeoutError(f"timeout_s: {timeout_s} s passed before every {work.one} finished")
        finished: asyncio.Queue[_Result | None] = asyncio.Queue()
        worker = asyncio.create_task(self._run(here, work, wanted, finished.put_nowait, deadline, request_id))
        here.running[worker] = request_id

        def end(_: asyncio.Task[None]) -> None:
            del here.running[worker]
            finished.put_nowait(None)
            if not worker.cancelled():
                # Whoever left before does not ask for it.
                worker.exception()

        worker.add_done_callback(end)
        try:
            with Progress(sum(len(one.samples) for one in wanted), progress, of=work.many) as bar:
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

    async def _run(
        self,
        here: _Loop,
        work: _Work[_Result],
        wanted: Sequence[SampleRequest],
        deliver: Callable[[_Result], None],
        deadline: float | None,
        request_id: str,
    ) -> None:
        """Deliver every sample, or raise the first error after everything has stopped.

        Raises:
            TimeoutError: the deadline passed; nobody may be there to hear it.
        """
        # Who waits for it is told first.
        end = None if deadline is None else deadline + _CALLER_FIRST_S
        try:
            with here.aborts.expected():
                async with asyncio.timeout_at(end):
                    kind = await self._kind_here(here)
                    exchange_type = work.exchanges[kind]
                    options = {"logprob_bits": self._logprob_bits} if kind == "sidecar" else {}
                    async with asyncio.TaskGroup() as group:
                        for some in _calls(wanted, exchange_type.samples_per_call):
                            make = functools.partial(
                                _new_exchange, exchange_type, request_id, deadline, options
                            )
                            group.create_task(self._call(here, work, request_id, some, make, deliver))
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
        work: _Work[_Result],
        request_id: str,
        wanted: Sequence[SampleRequest],
        make: Callable[[Sequence[SampleRequest]], _Exchange[_Result]],
        deliver: Callable[[_Result], None],
    ) -> None:
        """One call and its retries, each of which asks for what is still missing, under a fresh id."""
        missing = {(one.prompt_index, sample) for one in wanted for sample in one.samples}

        def take(result: _Result) -> None:
            missing.remove(work.place(result))
            deliver(result)

        async def attempt() -> None:
            left = [
                replace(one, samples=samples)
                for one in wanted
                if (samples := tuple(s for s in one.samples if (one.prompt_index, s) in missing))
            ]
            try:
                async with here.slots:
                    await self._exchange(here, request_id, make(left), take)
            except SglangToppError as error:
                # What broke off behind the last sample took nothing with it.
                if missing or not is_retryable(error):
                    raise

        await self._retrying(attempt)

    async def _exchange(
        self,
        here: _Loop,
        request_id: str,
        exchange: _Exchange[_Result],
        take: Callable[[_Result], None],
    ) -> None:
        is_open = is_refused = False
        try:
            async with here.connections.post(
                exchange.path, exchange.body(), accept=exchange.accept
            ) as messages:
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
        except (AuthenticationError, BadRequestError, OverloadedError) as error:
            is_refused = not is_open
            if is_refused and error.status in (404, 405) and exchange.missing_route:
                raise BadRequestError(exchange.missing_route, status=error.status, body=error.body) from error
            raise
        finally:
            if not is_refused:
                here.aborts.start(request_id, exchange.unfinished_ids())

    # -- the server --------------------------------------------------------------------------------

    def _here(self) -> _Loop:
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            # Other threads add theirs meanwhile.
            for other in list(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            connections = Connections(self._server, self._LONG_LINES_AT_ONCE)
            self._loops[loop] = _Loop(
                connections,
                Aborts(functools.partial(_abort_in_engine, connections)),
                asyncio.Semaphore(self._server.max_connections),
            )
        return self._loops[loop]

    async def _kind_here(self, here: _Loop) -> Kind:
        async with here.kind_lock:
            if self._kind is None:
                try:
                    info = await self._retrying(
                        lambda: here.connections.request_json("GET", "/info", timeout_s=_INFO_TIMEOUT_S)
                    )
                except BadRequestError as error:
                    if error.status not in (404, 405):
                        raise
                    info = None
                is_sidecar = isinstance(info, dict) and info.get("service") == SERVICE
                self._kind = "sidecar" if is_sidecar else "sglang"
            return self._kind

    async def _retrying(self, attempt: Callable[[], Awaitable[_T]]) -> _T:
        retry = 0
        while True:
            try:
                return await attempt()
            except SglangToppError as error:
                retry += 1
                if retry > self._max_retries or not is_retryable(error):
                    raise
                wait_s = delay_s(retry, error)
            await asyncio.sleep(wait_s)


async def _abort_in_engine(connections: Connections, engine_id: str) -> None:
    await connections.request_json("POST", "/abort_request", {"rid": engine_id}, timeout_s=aborts.TIMEOUT_S)


async def _stop(workers: Sequence[asyncio.Task[None]]) -> None:
    """Cancel and wait until all have cleaned up after themselves, whatever they end with."""
    for worker in workers:
        if not worker.cancelling():
            worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


def _calls(wanted: Sequence[SampleRequest], samples_per_call: int) -> Iterator[list[SampleRequest]]:
    """Consecutive prompts, in calls that are full at `samples_per_call` samples."""
    call: list[SampleRequest] = []
    num_samples = 0
    for one in wanted:
        call.append(one)
        num_samples += len(one.samples)
        if num_samples >= samples_per_call:
            yield call
            call, num_samples = [], 0
    if call:
        yield call


def _new_exchange(
    exchange_type: Callable[..., _Exchange[_Result]],
    request_id: str,
    deadline: float | None,
    options: dict[str, Any],
    wanted: Sequence[SampleRequest],
) -> _Exchange[_Result]:
    left_s = None if deadline is None else max(deadline - asyncio.get_running_loop().time(), 0.001)
    return exchange_type(wanted, request_id=request_id, timeout_s=left_s, **options)


def _check_call(timeout_s: Any, progress: Any, request_id: Any) -> float | None:
    """Check what every call takes; returns the time limit as a number."""
    if progress is not None and not isinstance(progress, bool):
        raise InvalidInputError(f"progress: got {shown(progress)}, expected True, False or None")
    if request_id is not None:
        check_request_id(request_id)
    return None if timeout_s is None else seconds("timeout_s", timeout_s)
