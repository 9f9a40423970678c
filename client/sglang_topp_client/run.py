"""Runs: the calls of one client; Run: one call of `generate`, `resume`, or `score`.

A Run has one coroutine for each of its prompts (`Run._prompt`), which knows the samples that are missing. It
picks a server, sends one HTTP call for the missing samples, and reads the answer. If the call fails, it asks
again for what is still missing, under a new id, from another server or after a delay. It ends once no sample
is missing. A sample that the engine has aborted gets a coroutine of its own if the caller wants it resumed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from sglang_topp.errors import (
    AbortedError,
    AuthenticationError,
    BadRequestError,
    OverloadedError,
    RequestTimeoutError,
    RolloutError,
    SglangToppError,
    TransportError,
)
from sglang_topp_client.protocols.sglang import SglangExchange
from sglang_topp_client.protocols.sidecar import SidecarExchange
from sglang_topp_client.requests import (
    OnAbort,
    OnTimeout,
    SampleRequest,
    ScoreRequest,
    as_finished,
    continuation_request,
    empty_rollout,
)
from sglang_topp_client.retry_policy import RetryBudget, is_retryable
from sglang_topp_client.rollout import ABORT, Rollout, Score, join_parts
from sglang_topp_client.servers import Kind, Server, Servers
from sglang_topp_client.transport.http import FileLimitError
from sglang_topp_client.transport.server_config import ROUTING_KEY, ServerConfig

Place: TypeAlias = tuple[int, int]
"""A prompt index and a sample index."""
Existing: TypeAlias = Mapping[int, Rollout] | None
"""Rollouts to continue, by prompt index. Such a prompt has one sample, which continues the rollout."""

# Messages above this size are decoded in a thread, because decoding takes milliseconds and would block the
# event loop.
_OFF_LOOP_BYTES = 1 << 18
_REFUSALS = (AuthenticationError, BadRequestError, OverloadedError)
_MAX_WAITING_RESULTS = 1024
_FILE_WAIT_S = 0.1
# An engine that aborted a sample before its first token would probably abort the next request too.
_FIRST_RESUME_WAIT_S, _MAX_RESUME_WAIT_S = 0.05, 2.0
# After `stop`, a server that sends nothing for this many seconds is given up. A sidecar first waits for its
# engine.
_GRACE_S: dict[Kind, float] = {"sglang": 5.0, "sidecar": 10.0}
# An engine ignores an abort for a request that has not reached it yet, so `stop` repeats each abort.
_REPEAT_ABORT_S = 0.25
_FIRST_PROGRESS_S, _NEXT_PROGRESS_S = 2.0, 0.2
# A stopped call ends after at most 10 s, and its aborts are sent within three seconds.
_OTHER_LOOPS_S = 15.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """The options of one call of `generate`, `resume`, or `score`; see `AsyncRolloutClient.generate`.

    Attributes:
        keeps_going: whether the other prompts go on if one fails (`return_exceptions`).
        waits_out_refusals: whether a call waits for servers that accept no request at the moment (429, 503).
        headers: additional headers of the HTTP calls.
    """

    request_id: str
    on_abort: OnAbort = "raise"
    timeout_s: float | None = None
    on_timeout: OnTimeout = "raise"
    progress: bool | None = False
    keeps_going: bool = False
    waits_out_refusals: bool = True
    headers: Mapping[str, str] = field(default_factory=dict)


class Runs:
    """The calls of one client: start one, abort some by name, and close. The callers check the arguments.

    Several event loops may use it at the same time. A connection belongs to the loop that opened it.

    Args:
        configs: the connection settings of one or several servers.
        kind: the servers' kind, or None to ask each server.
        max_retries: how often a failed call is retried.
        pauses: why engines are paused, by base URL; see `Server`.
    """

    def __init__(
        self,
        configs: Sequence[ServerConfig],
        *,
        kind: Kind | None,
        max_retries: int,
        pauses: Mapping[str, str] | None = None,
    ) -> None:
        self._configs, self._max_retries = configs, max_retries
        self._pauses = {} if pauses is None else pauses
        self._kinds: dict[str, Kind] = {}
        if kind is not None:
            self._kinds = dict.fromkeys((config.base_url for config in configs), kind)
        self._loops: dict[asyncio.AbstractEventLoop, Servers] = {}

    @property
    def servers(self) -> Servers:
        """The servers, as the current event loop uses them."""
        loop = asyncio.get_running_loop()
        if loop not in self._loops:
            # Iterate over a copy, because other threads may add their event loops to `_loops`.
            for other in list(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            self._loops[loop] = Servers(
                self._configs, self._kinds, self._pauses, max_retries=self._max_retries
            )
        return self._loops[loop]

    def stream(
        self, requests: Sequence[SampleRequest], options: RunOptions, existing: Existing = None
    ) -> AsyncGenerator[tuple[Place, Any], None]:
        """Return the results of a new call with their places, as they arrive; see `Run`."""
        return Run(self.servers, requests, options, existing).results()

    async def gather(
        self, requests: Sequence[SampleRequest], options: RunOptions, existing: Existing = None
    ) -> list[Any]:
        """Return the results of a new call in the order of its prompts."""
        async with aclosing(self.stream(requests, options, existing)) as results:
            outcomes = {place: outcome async for place, outcome in results}
        return [outcomes[place] for place in sorted(outcomes)]

    async def abort(self, request_id: str) -> int:
        """Abort the calls with the id `request_id`; see `AsyncRolloutClient.abort`."""
        counts: list[int] = []
        elsewhere = [
            asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._abort_here(request_id, counts), loop))
            for loop in list(self._loops)
            if loop is not asyncio.get_running_loop() and loop.is_running()
        ]
        await self._abort_here(request_id, counts)
        if elsewhere:
            # A loop that ends at this moment never answers, and ends its calls too.
            await asyncio.wait(elsewhere, timeout=_OTHER_LOOPS_S)
        if not any(counts):
            counts += await self.servers.on_all(lambda server: server.abort(request_id))
        return sum(counts)

    async def _abort_here(self, request_id: str, counts: list[int]) -> None:
        """Abort the calls of this event loop, and add to `counts` how many prompts were unfinished."""
        servers = self.servers
        runs = [run for run in servers.runs if run.name == request_id]
        counts.append(sum(len({prompt for prompt, _ in run.missing}) for run in runs))
        for run in runs:
            run.abort()
        for run in runs:
            await run.wait()
        if runs:
            await servers.aborts_sent()

    async def abort_all(self) -> None:
        """Abort every request in the engines; see `AsyncRolloutClient.abort_all`."""
        servers = self.servers
        stopped = [run for run in servers.runs if run.returns_parts]
        for run in stopped:
            run.abort()
        await servers.on_all(lambda server: server.abort(None))
        for run in stopped:
            await run.wait()

    async def close(self) -> None:
        """Stop this event loop's calls, and close its connections; see `AsyncRolloutClient.close`."""
        servers = self._loops.pop(asyncio.get_running_loop(), None)
        if servers is None:
            return
        try:
            runs = list(servers.runs)
            for run in runs:
                run.cancel()
            for run in runs:
                await run.wait()
        finally:
            await servers.close()


class _Job:
    """The rest of the work of one coroutine: the samples of a prompt, or the rest of one sample.

    Attributes:
        wanted: the caller's request for complete samples of one prompt.
        part: the earlier part of the one sample, or None.
        request: the request to send: `wanted`, or the request for the rest of the sample.
        wait_s: how long to wait before the first call.
        missing: the sample indices that no server has returned yet.
        server, exchange: the call in flight; the server is None between two calls.
        expiry: ends the job at once when it is rescheduled.
    """

    def __init__(
        self, wanted: SampleRequest, part: Rollout | None = None, sample: int = 0, wait_s: float = 0.0
    ) -> None:
        self.wanted, self.part, self.wait_s = wanted, part, wait_s
        self.request = wanted if part is None else continuation_request(part, wanted, sample)
        self.missing = set(self.request.samples)
        self.server: Server | None = None
        self.exchange: SglangExchange | SidecarExchange | None = None
        self.expiry = asyncio.timeout(None)


class Run:
    """One call of `generate`, `resume`, or `score`, on the event loop that creates it.

    Args:
        servers: the client's servers on this event loop.
        requests: one request for each prompt.
        options: the caller's options.
        existing: see `Existing`.

    Attributes:
        name: the caller's name for the call. Several calls may have the same name.
        missing: the places whose results have not been delivered.
        returns_parts: whether the caller takes partial samples when the call is aborted.
    """

    def __init__(
        self, servers: Servers, requests: Sequence[SampleRequest], options: RunOptions, existing: Existing
    ) -> None:
        self.name, self.returns_parts = options.request_id, options.on_abort == "return"
        self.missing = {(one.prompt_index, sample): None for one in requests for sample in one.samples}
        self._servers = servers
        self._requests, self._options, self._existing = requests, options, existing or {}
        self._of_scores = isinstance(requests[0], ScoreRequest)
        self._clock = asyncio.get_running_loop().time
        self._deadline = None if options.timeout_s is None else self._clock() + options.timeout_s
        self._results: asyncio.Queue[tuple[Place, Any] | None] = asyncio.Queue()
        self._max_waiting = _MAX_WAITING_RESULTS
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._jobs: set[_Job] = set()
        self._stopped_at = 0.0
        self._aborting: asyncio.Task[None] | None = None
        self._too_late: RequestTimeoutError | None = None
        self._task: asyncio.Task[None] | None = None

    # -- the caller's side -------------------------------------------------------------------------

    async def results(self) -> AsyncGenerator[tuple[Place, Any], None]:
        """Send all calls, and yield each result with its place as it arrives.

        Errors are yielded only if `RunOptions.keeps_going` is set; otherwise the first one is raised. Leaving
        the generator aborts what is unfinished.
        """
        loop = asyncio.get_running_loop()
        timer = None if self._deadline is None else loop.call_at(self._deadline, self._time_out)
        task = self._task = loop.create_task(self._all_prompts())
        self._servers.runs.add(self)
        task.add_done_callback(self._end)
        noun = "scores" if self._of_scores else "rollouts"
        progress = Progress(len(self.missing), self._options.progress, of=noun)
        try:
            while (item := await self._results.get()) is not None:
                # The prompts go on only after the caller has taken half of the results. Otherwise, each
                # result that it takes would wake them.
                if self._results.qsize() <= self._max_waiting // 2:
                    self._has_room.set()
                if not isinstance(item[1], SglangToppError):
                    progress.add(len(item[1].logprobs))
                yield item
            error: BaseException | None = self._too_late
            if error is None and task.cancelled():
                error = AbortedError(f"request {self.name} was aborted by this client")
            elif error is None:
                error = task.exception()
            if isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if isinstance(error, SglangToppError) and self._options.keeps_going:
                for place in list(self.missing):
                    yield place, error
            elif error is not None:
                raise error
        finally:
            progress.close()
            if timer is not None:
                timer.cancel()
            # Do not wait for the canceled task: it may close hundreds of connections, which takes a second.
            self.cancel()

    async def wait(self) -> None:
        """Wait until all calls have ended. Canceling this wait does not cancel them."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def cancel(self) -> None:
        """End all calls. The caller gets an AbortedError."""
        if self._task is not None and not self._task.cancelling():
            self._task.cancel()

    def abort(self) -> None:
        """End all calls as the caller's `on_abort` says: with partial samples, or with an AbortedError."""
        if self.returns_parts:
            self._stop()
        else:
            self.cancel()

    def _stop(self) -> None:
        """Abort all samples, but keep the connections, so that what was generated still arrives."""
        if self._aborting is None and self._task is not None and not self._task.done():
            self._stopped_at = self._clock()
            self._aborting = asyncio.create_task(self._abort_jobs())
            # The caller may have stopped taking results, and the prompts must end all the same.
            self._max_waiting = 1 << 60
            self._has_room.set()

    def _time_out(self) -> None:
        if self._options.on_timeout == "return":
            self._stop()
            return
        noun = "sequence" if self._of_scores else "sample"
        causes = [server.paused or str(server.error or "") for server in self._servers.all]
        self._too_late = RequestTimeoutError(
            f"timeout_s: {self._options.timeout_s} s passed before every {noun} finished; None sets no limit"
            + "".join(f"\n  {cause}" for cause in causes if cause)
        )
        # The caller gets its error first, because canceling hundreds of calls may take a second.
        self._results.put_nowait(None)
        self.cancel()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._servers.runs.discard(self)
        if self._aborting is not None:
            self._aborting.cancel()
        self._results.put_nowait(None)
        if not task.cancelled():
            # asyncio logs an exception that no code retrieves, and a caller that has stopped iterating does
            # not.
            task.exception()

    def _deliver(self, place: Place, result: Rollout | Score | SglangToppError) -> None:
        if self._too_late is None:
            del self.missing[place]
            self._results.put_nowait((place, result))
            if self._results.qsize() >= self._max_waiting:
                self._has_room.clear()

    # -- the prompts -------------------------------------------------------------------------------

    async def _all_prompts(self) -> None:
        """Start a coroutine for each prompt, as far as `max_connections` allows, and wait for all."""
        async with asyncio.TaskGroup() as self._group:
            for wanted in self._requests:
                part = self._existing.get(wanted.prompt_index)
                if part is not None:
                    part = replace(part, prompt_index=wanted.prompt_index, sample_index=0)
                    if (whole := as_finished(part, wanted)) is not None:
                        self._deliver((wanted.prompt_index, 0), whole)
                        continue
                await self._has_room.wait()
                await self._servers.slots.acquire()
                task = self._group.create_task(self._prompt(_Job(wanted, part)))
                task.add_done_callback(lambda _: self._servers.slots.release())
                # Starting a call takes a millisecond, and there may be a thousand.
                await asyncio.sleep(0)

    async def _prompt(self, job: _Job) -> None:
        """Get the missing samples of one prompt, or the rest of one sample.

        Samples that `_abort_jobs` does not wait for come without new tokens.
        """
        self._jobs.add(job)
        try:
            try:
                if self._aborting is None:
                    async with job.expiry:
                        await self._until_complete(job)
            except TimeoutError:
                if not job.expiry.expired():
                    raise
            for sample in sorted(job.missing):
                if (nothing := empty_rollout(job.request, sample, self.name)) is None:
                    raise RolloutError(
                        f"request {self.name} was aborted before the engine had tokenized prompt"
                        f" {job.wanted.prompt_index}, a text or a chat, so its token ids are unknown; give"
                        " the prompt as ids to get a rollout without tokens"
                    )
                self._take(job, job.request.routing_key, sample, nothing)
        except SglangToppError as error:
            if not self._options.keeps_going:
                raise
            error.prompt_index = job.wanted.prompt_index
            for sample in job.missing:
                self._deliver((job.wanted.prompt_index, sample), error)
        finally:
            self._jobs.discard(job)

    async def _resume(self, job: _Job) -> None:
        async with self._servers.slots:
            await self._prompt(job)

    async def _until_complete(self, job: _Job) -> None:
        """Ask servers for the missing samples until none is missing."""
        if job.wait_s:
            await asyncio.sleep(job.wait_s)
        budget: RetryBudget | None = None
        failed: set[Server] = set()
        while job.missing:
            try:
                with self._servers.pick(len(job.missing), job.request.routing_key, without=failed) as server:
                    await self._call(job, server)
                    return
            except SglangToppError as error:
                job.server = None
                if not job.missing and is_retryable(error):
                    return  # for example, the connection broke after the last sample
                budget = budget or RetryBudget(
                    self._servers.max_retries,
                    # The engine that aborted a sample may be paused, so its rest waits in any case.
                    waits_out_refusals=self._options.waits_out_refusals or job.part is not None,
                    repeats_aborted=self._of_scores and self._options.on_abort == "resume",
                )
                if isinstance(error, FileLimitError) and self._servers.num_in_flight:
                    # Each running call frees its file descriptors when it ends.
                    wait_s = _FILE_WAIT_S
                else:
                    failed.add(server)
                    if is_retryable(error) and self._servers.has_ready(without=failed):
                        _log.info("request %s moves from %s: %s", self.name, server.base_url, error)
                        continue
                    has_begun = job.exchange is not None and job.exchange.has_begun
                    if (delay_s := budget.next_delay_s(error, has_begun=has_begun)) is None:
                        if (none_answers := self._servers.none_answers(error)) is not None:
                            raise none_answers from error
                        raise
                    failed.clear()
                    wait_s = delay_s
                _log.log(
                    logging.WARNING if isinstance(error, FileLimitError) else logging.INFO,
                    "request %s is retried in %.2f s after %s: %s",
                    *(self.name, wait_s, server.base_url, error),
                )
            await asyncio.sleep(wait_s)

    async def _call(self, job: _Job, server: Server) -> None:
        """Send one call for the missing samples, and take each result as it arrives."""
        job.exchange = None
        kind = await server.kind()
        if kind == "sglang" and isinstance(job.request.prompt, tuple):
            # Apply the chat template once for all attempts, because the engines may have different templates.
            ids = await server.apply_chat_template(job.request.prompt)
            job.request = replace(job.request, prompt=ids)
        request = replace(job.request, samples=tuple(sorted(job.missing)))
        exchange: SglangExchange | SidecarExchange
        if kind == "sglang":
            exchange = SglangExchange(request, request_id=self.name)
        else:
            # The sidecar enforces the deadline too.
            left_s = None
            if self._deadline is not None and self._options.on_timeout != "return":
                left_s = max(self._deadline - self._clock(), 0.001)
            exchange = SidecarExchange(
                request, request_id=self.name, timeout_s=left_s, max_bytes=server.max_message_bytes
            )
        key = server.routing_key(request.routing_key)
        headers = {**self._options.headers, ROUTING_KEY: key}
        if exchange.accept:
            headers["Accept"] = exchange.accept
        job.server, job.exchange = server, exchange
        is_open = is_refused = False
        try:
            async with server.post(exchange.path, exchange.body(), headers) as messages:
                is_open = True
                async for message in messages:
                    if len(message) < _OFF_LOOP_BYTES:
                        results = exchange.read(message)
                    else:
                        results = await asyncio.to_thread(exchange.read, message)
                    while results:
                        self._take(job, key, *results.pop(0))
                    # Free the message now: it may be large, and the next message may arrive much later.
                    del message
            if not exchange.complete:
                raise TransportError("the answer was cut off: it ended before its last message")
        except SglangToppError as error:
            if len(self._servers.all) > 1:
                error.add_note(f"the server is {server.base_url}")
            is_refused = not is_open and isinstance(error, _REFUSALS)
            raise
        finally:
            job.server = None
            # A sidecar aborts a request itself when its connection closes.
            if kind == "sglang" and not is_refused:
                server.abort_soon(exchange.open_ids())

    def _take(self, job: _Job, key: str, sample: int, result: Any) -> None:
        """Take one result of a call: deliver it, or continue the sample that it is a part of."""
        if isinstance(result, Rollout):
            is_new = len(result.output_ids) > 0
            result = replace(result, routing_key=key)
            if job.part is not None:
                result = join_parts(job.part, result)
            if result.finish_reason == ABORT and self._aborting is None:
                if self._options.on_abort == "raise":
                    raise AbortedError(
                        "an abort, a pause, or a weight update ended a sample; on_abort='resume' continues it"
                    )
                if self._options.on_abort == "resume":
                    job.missing.discard(sample)
                    wait_s = min(max(2 * job.wait_s, _FIRST_RESUME_WAIT_S), _MAX_RESUME_WAIT_S)
                    rest = _Job(job.wanted, result, sample, 0.0 if is_new else wait_s)
                    self._group.create_task(self._resume(rest))
                    return
            # The last HTTP request may have lower token limits than the caller's.
            wanted = job.wanted
            result = replace(
                result, sampling_params=wanted.sampling_params, top_logprobs_p=wanted.top_logprobs_p
            )
        self._deliver((job.wanted.prompt_index, sample), result)
        job.missing.discard(sample)

    async def _abort_jobs(self) -> None:
        """Abort the calls in flight until they end, and end a job whose server sends nothing for `_GRACE_S`.

        A job that ends without its samples delivers them without new tokens.
        """
        sent: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for job in list(self._jobs):
                    server, now = job.server, self._clock()
                    silent_s = 0.0 if server is None else now - max(self._stopped_at, server.heard_at)
                    if server is None or silent_s >= _GRACE_S[await server.kind()]:
                        if not job.expiry.expired():
                            job.expiry.reschedule(now)
                    elif job.exchange is not None:
                        for name in job.exchange.open_ids():
                            if name not in sent or sent[name].done():
                                sent[name] = asyncio.create_task(_abort(server, name))
                await asyncio.sleep(_REPEAT_ABORT_S)
        finally:
            for task in sent.values():
                task.cancel()


async def _abort(server: Server, name: str) -> None:
    with suppress(SglangToppError):
        await server.abort(name)


class Progress:
    """A progress line with the number of finished samples, shown if stderr is a terminal.

    Args:
        total: the number of samples in the batch.
        show: whether to show the line. If `show` is None and the program has not set up logging, the line
            appears once the batch has taken two seconds. If `show` is None and the program has set up
            logging, no line appears, because the line would mix with the log messages.
        of: the plural noun that names the samples in the line, such as "rollouts".
    """

    def __init__(self, total: int, show: bool | None, *, of: str = "rollouts") -> None:
        self._total, self._of = total, of
        self._num_done = self._num_tokens = 0
        self._start = time.monotonic()
        self._next = self._start + (0.0 if show else _FIRST_PROGRESS_S)
        self._has_written = False
        is_wanted = not _log.hasHandlers() if show is None else show
        try:
            self._is_on = is_wanted and sys.stderr.isatty()
        except Exception:  # the program may have closed stderr, or replaced it with any object
            self._is_on = False

    def add(self, num_tokens: int) -> None:
        """Count one more sample with `num_tokens` tokens."""
        self._num_done += 1
        self._num_tokens += num_tokens
        if self._is_on and time.monotonic() >= self._next:
            self._write()
            self._next = time.monotonic() + _NEXT_PROGRESS_S

    def close(self) -> None:
        """End the line."""
        if self._has_written and self._is_on:
            self._write(end="\n")

    def _write(self, end: str = "") -> None:
        elapsed_s = max(time.monotonic() - self._start, 1e-6)
        self._has_written = True
        try:
            sys.stderr.write(
                f"\r{self._of} {self._num_done}/{self._total}  {elapsed_s:.0f} s "
                f" {self._num_tokens / elapsed_s:.0f} tokens/s {end}"
            )
            sys.stderr.flush()
        except Exception:
            # The write fails if the terminal was closed. The client then continues without a progress line.
            self._is_on = False
