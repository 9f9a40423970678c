"""Runs: the calls of one client; Run: one call of `generate`, `resume`, or `score`.

A Run has one job for each of its prompts, and each job a task, which knows the samples that are missing. From
the caller to the HTTP call and back:

1. `results` starts `_start_jobs` in the background, and yields each result that arrives.
2. `_start_jobs` starts a task for each prompt, `_do_job`, as far as `max_connections` allows.
3. `_call_until_complete` picks a server. If the call fails, it asks again for what is still missing, under a
   new id, from another server or after a delay. It ends once no sample is missing.
4. `_call` sends one HTTP call for the missing samples, and reads the answer.
5. `_take` gives each result to `results`. If the engine has aborted a sample that the caller wants resumed,
   `_resume_sample` starts a job for the rest of it.

A call ends early in two ways. `cancel` cancels its tasks, which close their connections, and the caller gets
an error. `_stop` serves a caller that wants partial samples: it asks the servers to abort the samples, and
still takes what they send.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import product
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
from sglang_topp_client.progress import FIRST_S, Progress
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
from sglang_topp_client.servers import Server, Servers
from sglang_topp_client.transport.http import FileLimitError
from sglang_topp_client.transport.server_config import ROUTING_KEY, Kind, ServerConfig

Place: TypeAlias = tuple[int, int]
"""A prompt index and a sample index."""
Existing: TypeAlias = Mapping[int, Rollout] | None
"""Rollouts to continue, by prompt index. Such a prompt has one sample, which continues the rollout."""

# Messages above this size are decoded in a thread, because decoding takes milliseconds and would block the
# event loop.
_OFF_LOOP_BYTES = 1 << 18
# With these answers, an engine has not started the request, so nothing has to be aborted.
_NOT_STARTED = (AuthenticationError, BadRequestError, OverloadedError)
# A caller that takes no results stops the start of further prompts, because each result takes memory.
_MAX_WAITING_RESULTS = 1024
_FILE_WAIT_S = 0.1
# An engine that aborted a sample before its first token would probably abort the next request too.
_FIRST_RESUME_WAIT_S, _MAX_RESUME_WAIT_S = 0.05, 2.0
# After `stop`, a server that sends nothing for this many seconds is given up. A sidecar first waits for its
# engine.
_GRACE_S: dict[Kind, float] = {"sglang": 5.0, "sidecar": 10.0}
# An engine ignores an abort for a request that has not reached it yet, so `stop` repeats each abort.
_REPEAT_ABORT_S = 0.25
# `abort` waits this long for the calls of other event loops. A stopped call ends after at most 10 s, and its
# aborts are sent within three seconds.
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
        run = Run(self.servers, requests, options, existing)
        outcomes: dict[Place, Any] = dict.fromkeys(run.missing)
        async with aclosing(run.results()) as results:
            async for place, outcome in results:
                outcomes[place] = outcome
        return list(outcomes.values())

    async def abort(self, request_id: str) -> int:
        """Abort the calls with the id `request_id`; see `AsyncRolloutClient.abort`."""
        counts: list[int] = []

        async def abort_here() -> None:
            servers = self.servers
            runs = [run for run in servers.runs if run.name == request_id]
            counts.append(sum(len({prompt for prompt, _ in run.missing}) for run in runs))
            for run in runs:
                run.abort()
            for run in runs:
                await run.wait()
            if runs:
                await servers.aborts_sent()

        await self._on_all_loops(abort_here)
        if not any(counts):
            counts += await self.servers.on_all(lambda server: server.aborts.send_unknown(request_id))
        return sum(counts)

    async def abort_all(self) -> None:
        """Abort every request in the engines; see `AsyncRolloutClient.abort_all`."""
        asking = self.servers

        async def abort_here() -> None:
            servers = self.servers
            stopped = [run for run in servers.runs if run.returns_parts]
            for run in stopped:
                run.abort()
            if servers is asking:
                await servers.on_all(lambda server: server.aborts.send(None))
            for run in stopped:
                await run.wait()

        await self._on_all_loops(abort_here)

    async def _on_all_loops(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Do the work on this event loop, and on the others that use the client."""
        elsewhere = [
            asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))
            for loop in list(self._loops)
            if loop is not asyncio.get_running_loop() and loop.is_running()
        ]
        await work()
        if elsewhere:
            # A loop that ends at this moment never answers, and ends its calls too.
            await asyncio.wait(elsewhere, timeout=_OTHER_LOOPS_S)

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
    """The work of one task: the samples of a prompt, or the rest of one sample.

    Attributes:
        wanted: the caller's request for complete samples of one prompt.
        part: the earlier part of the one sample, or None.
        request: the request to send: `wanted`, or the request for the rest of the sample.
        wait_s: how long to wait before the first call.
        missing: the sample indices that no server has returned yet.
        server, exchange: the call in flight; the server is None between two calls.
        left_queue: set once the job has one of the client's slots, or has ended without one.
        expiry: ends the job at once when it is rescheduled, even while it waits for its slot.
    """

    def __init__(
        self, wanted: SampleRequest, part: Rollout | None = None, sample: int = 0, wait_s: float = 0.0
    ) -> None:
        self.wanted, self.part, self.wait_s = wanted, part, wait_s
        self.request = wanted if part is None else continuation_request(part, wanted, sample)
        self.missing = set(self.request.samples)
        self.server: Server | None = None
        self.exchange: SglangExchange | SidecarExchange | None = None
        self.left_queue, self.expiry = asyncio.Event(), asyncio.timeout(None)


class Run:
    """One call of `generate`, `resume`, or `score`, on the event loop that creates it.

    Args:
        servers: the client's servers on this event loop.
        requests: one request for each prompt.
        options: the caller's options.
        existing: see `Existing`.

    Attributes:
        name: the caller's name for the call. Several calls may have the same name.
        missing: the places whose results have not been delivered, in the caller's order.
        returns_parts: whether the caller takes partial samples when the call is aborted.
    """

    def __init__(
        self, servers: Servers, requests: Sequence[SampleRequest], options: RunOptions, existing: Existing
    ) -> None:
        self.name, self.returns_parts = options.request_id, options.on_abort == "return"
        self.missing: dict[Place, None] = {}
        for one in requests:
            self.missing |= dict.fromkeys(product([one.prompt_index], one.samples))
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
        self._task: asyncio.Task[None]

    # -- the caller's side -------------------------------------------------------------------------

    async def results(self) -> AsyncGenerator[tuple[Place, Any], None]:
        """Send all calls, and yield each result with its place as it arrives.

        Errors are yielded only if `RunOptions.keeps_going` is set; otherwise the first one is raised. Leaving
        the generator aborts what is unfinished.
        """
        loop = asyncio.get_running_loop()
        timer = None if self._deadline is None else loop.call_at(self._deadline, self._time_out)
        task = self._task = loop.create_task(self._start_jobs())
        self._servers.runs.add(self)
        task.add_done_callback(self._on_end)
        progress = self._start_progress()
        try:
            while (item := await self._results.get()) is not None:
                # The prompts go on only after the caller has taken half of the results. Otherwise, each
                # result that it takes would wake them.
                if self._results.qsize() <= self._max_waiting // 2:
                    self._has_room.set()
                if progress is not None and not isinstance(item[1], SglangToppError):
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
                    failed = copy(error)
                    failed.prompt_index = place[0]
                    yield place, failed
            elif error is not None:
                raise error
        finally:
            if progress is not None:
                progress.close()
            if timer is not None:
                timer.cancel()
            if not task.done():
                # Do not wait for the task: it may close hundreds of connections, which takes a second.
                self.cancel()

    def _start_progress(self) -> Progress | None:
        """Return a progress line if stderr is a terminal, and the caller wants one.

        A caller that does not say gets one, unless the program has set up logging: the line would mix with
        the log messages.
        """
        asked = self._options.progress
        try:
            is_shown = sys.stderr.isatty() and (not _log.hasHandlers() if asked is None else asked)
        except Exception:  # the program may have closed stderr, or replaced it with any object
            return None
        noun = "scores" if self._of_scores else "rollouts"
        return Progress(len(self.missing), of=noun, first_s=0.0 if asked else FIRST_S) if is_shown else None

    async def wait(self) -> None:
        """Wait until all calls have ended. Canceling this wait does not cancel them."""
        await asyncio.wait([self._task])

    def cancel(self) -> None:
        """End all calls. The caller gets an AbortedError."""
        if not self._task.cancelling():
            self._task.cancel()

    def abort(self) -> None:
        """End all calls as the caller's `on_abort` says: with partial samples, or with an AbortedError."""
        if self.returns_parts:
            self._stop()
        else:
            self.cancel()

    def _stop(self) -> None:
        """Abort all samples, but keep the connections, so that what was generated still arrives."""
        if self._aborting is None and not self._task.done():
            self._stopped_at = self._clock()
            self._aborting = asyncio.create_task(self._abort_jobs())
            # The caller may have stopped taking results, and the prompts must end all the same.
            self._max_waiting = 1 << 60
            self._has_room.set()

    def _time_out(self) -> None:
        if self._options.on_timeout == "return" or not self.missing:
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

    def _on_end(self, task: asyncio.Task[None]) -> None:
        self._servers.runs.discard(self)
        if self._aborting is not None:
            self._aborting.cancel()
        self._results.put_nowait(None)
        if not task.cancelled():
            # asyncio logs an exception that no code retrieves, and a caller that has stopped iterating does
            # not.
            task.exception()

    def _deliver(self, place: Place, result: Rollout | Score | SglangToppError) -> None:
        """Give a result to `results`, unless the caller has got a RequestTimeoutError."""
        if self._too_late is None:
            del self.missing[place]
            self._results.put_nowait((place, result))
            if self._results.qsize() >= self._max_waiting:
                self._has_room.clear()

    # -- the jobs ----------------------------------------------------------------------------------

    async def _start_jobs(self) -> None:
        """Start a task for each prompt, as far as `max_connections` allows, and wait for all."""
        async with asyncio.TaskGroup() as self._group:
            for wanted in self._requests:
                part = self._existing.get(wanted.prompt_index)
                if part is not None:
                    part = replace(part, prompt_index=wanted.prompt_index, sample_index=0)
                    if (whole := as_finished(part, wanted)) is not None:
                        self._deliver((wanted.prompt_index, 0), whole)
                        continue
                await self._has_room.wait()
                job = _Job(wanted, part)
                self._group.create_task(self._do_job(job))
                # The next prompt's task starts only then, because there may be a million prompts.
                await job.left_queue.wait()

    async def _do_job(self, job: _Job) -> None:
        """Get the missing samples of a job, and deliver them or, with `keeps_going`, the job's error."""
        self._jobs.add(job)
        try:
            try:
                if self._aborting is None:
                    async with job.expiry, self._servers.slots:
                        job.left_queue.set()
                        await self._call_until_complete(job)
            except TimeoutError:
                if not job.expiry.expired():
                    raise
            if job.missing:
                self._take_empty(job)
        except SglangToppError as error:
            if not self._options.keeps_going:
                raise
            error.prompt_index = job.wanted.prompt_index
            for sample in job.missing:
                self._deliver((job.wanted.prompt_index, sample), error)
        finally:
            self._jobs.discard(job)
            job.left_queue.set()

    def _take_empty(self, job: _Job) -> None:
        """After a stop, take the samples that `_abort_jobs` did not wait for, without new tokens."""
        for sample in sorted(job.missing):
            if (nothing := empty_rollout(job.request, sample, self.name)) is None:
                raise RolloutError(
                    f"request {self.name} was aborted before the engine had tokenized prompt"
                    f" {job.wanted.prompt_index}, a text or a chat, so its token ids are unknown; give the"
                    " prompt as ids to get a rollout without tokens"
                )
            self._take(job, job.request.routing_key, sample, nothing)

    async def _call_until_complete(self, job: _Job) -> None:
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
                    failed.clear()  # after the wait, each server may answer again
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
        headers = {**self._options.headers, **exchange.headers, ROUTING_KEY: key}
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
            is_refused = not is_open and isinstance(error, _NOT_STARTED)
            raise
        finally:
            job.server = None
            # A sidecar aborts a request itself when its connection closes.
            if kind == "sglang" and not is_refused:
                # None is open after a whole answer. After a cancellation, a thread may still read a message.
                for engine_id in list(exchange.open_ids.values()):
                    server.aborts.send_soon(engine_id)

    def _take(self, job: _Job, key: str, sample: int, result: Any) -> None:
        """Take one result of a call: deliver it, or continue the sample that it is a part of."""
        if isinstance(result, Rollout):
            has_new_tokens = len(result.output_ids) > 0
            result = replace(result, routing_key=key)
            if job.part is not None:
                result = join_parts(job.part, result)
            if result.finish_reason == ABORT and self._aborting is None and not self.returns_parts:
                self._resume_sample(job, sample, result, has_new_tokens=has_new_tokens)
                return
            # The last HTTP request may have lower token limits than the caller's.
            wanted = job.wanted
            result = replace(
                result, sampling_params=wanted.sampling_params, top_logprobs_p=wanted.top_logprobs_p
            )
        self._deliver((job.wanted.prompt_index, sample), result)
        job.missing.discard(sample)

    def _resume_sample(self, job: _Job, sample: int, part: Rollout, *, has_new_tokens: bool) -> None:
        """Start a job for the rest of a sample that the engine has aborted.

        Raises:
            AbortedError: the caller wants an error instead.
        """
        if self._options.on_abort == "raise":
            raise AbortedError(
                "an abort, a pause, or a weight update ended a sample; on_abort='resume' continues it"
            )
        job.missing.discard(sample)
        wait_s = min(max(2 * job.wait_s, _FIRST_RESUME_WAIT_S), _MAX_RESUME_WAIT_S)
        rest = _Job(job.wanted, part, sample, 0.0 if has_new_tokens else wait_s)
        self._group.create_task(self._do_job(rest))

    async def _abort_jobs(self) -> None:
        """Abort the calls in flight until they end.

        End a job without a call, which waits for its slot or a retry, one that lacks nothing but the end of
        its answer, and one whose server sends nothing for `_GRACE_S`. The samples that a job lacks then come
        without new tokens.
        """
        sent: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for job in list(self._jobs):
                    server, exchange, now = job.server, job.exchange, self._clock()
                    if server is not None and exchange is not None and job.missing:
                        ids = list(exchange.open_ids.values())
                        # A sample without an id can't be aborted, whatever its server sends to other calls.
                        heard_at = server.heard_at if ids else 0.0
                        if now - max(self._stopped_at, heard_at) < _GRACE_S[await server.kind()]:
                            for engine_id in ids:
                                if engine_id not in sent or sent[engine_id].done():
                                    sent[engine_id] = asyncio.create_task(server.aborts.try_send(engine_id))
                            continue
                    if not job.expiry.expired():
                        job.expiry.reschedule(now)
                await asyncio.sleep(_REPEAT_ABORT_S)
        finally:
            for task in sent.values():
                task.cancel()
