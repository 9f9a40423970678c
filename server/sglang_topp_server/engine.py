"""The sidecar's connection to its engine: poll the engine's status, and ask for samples, scores, and aborts.

The engine may be a gateway in front of several engines. A probe requests `/server_info` from the engine, and
in the answer the plugin reports its state. A gateway does not serve `/server_info`. A gateway forwards the
older `/get_server_info` to one worker, and lists all workers at `/workers`. If `/server_info` answers 404 and
`/get_server_info` does not, the probe assumes a gateway, and also requests `/server_info` directly from each
worker that the gateway lists, except from unhealthy workers.

A probe ends with a test request for one token and its candidate set. Once a test request has succeeded, later
probes omit it. If a probe finds the engine unreachable or unpatched, later probes send a test request again.
The test request fails if a gateway silently drops sglang-topp's request fields.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from sglang_topp.engine_contract import Model
from sglang_topp.errors import (
    AuthenticationError,
    BadRequestError,
    MissingCandidateSetsError,
    PatchError,
    ResponseError,
    ServerError,
    SglangToppError,
    TransportError,
    WireError,
)
from sglang_topp_client import Rollout, Score
from sglang_topp_client.requests import build_sample_requests
from sglang_topp_client.run import Place, RunOptions, Runs
from sglang_topp_client.transport.http import HttpClient
from sglang_topp_client.transport.server_config import ServerConfig
from sglang_topp_server.error_responses import as_sglang_topp_error, from_engine_error
from sglang_topp_server.limits import LongMessageSlots, MemoryShare, num_bytes_of
from sglang_topp_server.requests import RolloutsBody, SampleCall

# The prompt of the request that probes the engine. Every vocabulary has a token 0, whose meaning does not
# matter for a probe.
_PROBE_PROMPT = [0]
_PROBE_ID = "sglang-topp-probe"
_MAX_CALLS = 4096
# The engine may have closed an idle connection, so the sidecar repeats a failed call to the engine once. Only
# the sidecar's caller makes further retries, and waits if the engine refuses requests. If the sidecar retried
# as often as its caller, the numbers of retries would multiply.
_MAX_RETRIES = 1
# The maximum number of long messages (over 1 MiB) that the sidecar reads from the engine at the same time.
# Each of these messages holds one sample. The sidecar's memory limit (`MemoryLimit`) counts a sample only
# after the sidecar has read the sample, so this maximum bounds the memory that is not counted yet.
_MAX_LONG_MESSAGES = 4
_OPTIONS = RunOptions("", keeps_going=True, waits_out_refusals=False)
_POLL_READY_S = 10.0
_POLL_OTHERWISE_S = 0.5
# The timeout of a request to the engine. SGLang's `/health` generates a token and waits up to 20 s for the
# token, so this timeout must be longer than 20 s.
_TIMEOUT_S = 30.0
# The timeout of a request to a gateway's worker. A gateway may list workers that this machine cannot reach,
# so this timeout is shorter than `_TIMEOUT_S`.
_WORKER_TIMEOUT_S = 10.0
# `GET /info` waits this long for the version of the weights.
_VERSION_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class EngineStatus:
    """The result of one probe of the engine.

    Attributes:
        phase: one of four words. `unreachable`: the engine does not answer, or answers with an error.
            `starting`: the engine answers but cannot generate yet. `unpatched`: the engine answers but
            returns no candidate sets. `ready`: the engine returns candidate sets.
        reason: a sentence that says why the engine is not `ready`; empty if it is ready.
        model_path, sglang_version: the values that the engine reported. A gateway reports the values of one
            of its workers.
        patch: the plugin's report of its state; empty if the engine sent no report, or returned no
            candidate set for the probe's test request.
        model: the sizes of the engine's model, such as its vocabulary size; None if the engine did not report
            the sizes. The sidecar checks requests against these sizes.
    """

    phase: Literal["unreachable", "starting", "unpatched", "ready"]
    reason: str = ""
    model_path: str | None = None
    sglang_version: str | None = None
    patch: dict[str, Any] = field(default_factory=dict)
    model: Model | None = None

    @property
    def is_patched(self) -> bool:
        """Return whether the plugin is active, according to the engine's last report."""
        return self.patch.get("active") is True

    @property
    def survives_grammars(self) -> bool:
        """Return whether the engine reported that it survives a grammar that forbids every next token."""
        return self.patch.get("sanitizes_logits") is True

    @property
    def problems(self) -> list[str]:
        """Return the plugin's reasons for being inactive."""
        problems = self.patch.get("problems")
        return [str(problem) for problem in problems] if isinstance(problems, list) else []


Results: TypeAlias = asyncio.Queue[tuple[Place, Rollout | Score | SglangToppError] | None]
"""The results of a request, with their places. An error is the last result of its prompt; None comes last."""


class EngineClient:
    """A client of one engine. All methods, including `close`, must be called within one event loop.

    Args:
        base_url: the address of SGLang's HTTP server.
        api_key: the engine's key, or None.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self.status = EngineStatus("unreachable", f"the engine at {self.base_url} was not asked yet")
        self._has_been_ready = self._has_given_sets = False
        self._has_probed = asyncio.Event()
        self._probe_now = asyncio.Event()
        self._config = ServerConfig(
            self.base_url,
            max_connections=_MAX_CALLS,
            api_key=api_key,
            throttle=LongMessageSlots(_MAX_LONG_MESSAGES).throttle,
        )
        self._runs = Runs([self._config], kind="sglang", max_retries=_MAX_RETRIES)
        self._http = HttpClient(self._config)

    # -- status ------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Probe the engine periodically, and soon after a failed request. Run until canceled."""
        while True:
            is_doubtful = self.status.phase != "ready" or self._probe_now.is_set()
            self._probe_now.clear()
            self.status = await self._probe(is_doubtful)
            if self.status.phase in ("ready", "unpatched"):
                self._has_been_ready = self.status.phase == "ready"
            self._has_probed.set()
            await asyncio.sleep(_POLL_OTHERWISE_S)
            if self.status.phase == "ready":
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._probe_now.wait(), _POLL_READY_S)

    async def require_ready(self) -> Model:
        """Return the engine's model, or raise an error if the engine cannot take requests.

        If the engine was ready earlier but did not answer the latest probe, this method raises no error. The
        engine may have been too busy to answer.

        Raises:
            PatchError: the engine is not patched.
            ServerError: the engine has not become ready yet (HTTP status 503).
        """
        await self._has_probed.wait()
        if self.status.phase == "unpatched":
            raise PatchError(self.status.reason)
        if not self._has_been_ready or self.status.model is None:
            raise ServerError(self.status.reason, status=503)
        return self.status.model

    async def weight_version(self) -> str | None:
        """Return the version of the engine's weights, or None if the engine doesn't say.

        This is a new request: `/server_info` keeps the version of the engine's start.
        """
        for path in ("/model_info", "/get_model_info"):
            with suppress(SglangToppError):
                return _text(
                    (await self._http.request_json("GET", path, timeout_s=_VERSION_TIMEOUT_S)).get(
                        "weight_version"
                    )
                )
        return None

    async def _probe(self, is_doubtful: bool) -> EngineStatus:
        if self.status.phase in ("unreachable", "unpatched"):
            # Another engine may have started at this address, so check again that the engine returns
            # candidate sets.
            self._has_given_sets = False
        try:
            status = await self._reported()
            if status.phase == "ready" and is_doubtful:
                health = await self._http.probe("/health", timeout_s=_TIMEOUT_S)
                if health != 200:
                    return self._not_ready(status, f"its /health answers {health or 'nothing'}")
            if status.phase == "ready" and not self._has_given_sets:
                status = await self._test(status)
            return status
        except AuthenticationError as error:
            cause = f"it refuses the sidecar's key; set SGLANG_TOPP_ENGINE_API_KEY: {error}"
        except Exception as error:
            # The sidecar keeps probing, so no failure is final.
            cause = f"{type(error).__name__}: {error}"
        reason = f"the engine at {self.base_url} does not answer: {cause}"
        return replace(self.status, phase="unreachable", reason=reason)

    async def _reported(self) -> EngineStatus:
        """Return the status that the engine reports, or that of a gateway's first unpatched worker."""
        where, workers = f"the engine at {self.base_url}", []
        try:
            info = await self._http.request_json("GET", "/server_info", timeout_s=_TIMEOUT_S)
        except BadRequestError as missing:
            if missing.status != 404:
                raise
            try:
                info = await self._http.request_json("GET", "/get_server_info", timeout_s=_TIMEOUT_S)
            except BadRequestError as error:
                raise (missing if error.status == 404 else error) from None
            behind = f"behind the gateway at {self.base_url}"
            where = f"an engine {behind}"
            workers = [(f"the engine at {url} {behind}", status) for url, status in await self._workers()]
        for place, status in [*workers, (where, _status_of(info))]:
            if not status.is_patched or status.model is None:
                return replace(status, phase="unpatched", reason=_why_unpatched(status, place))
        return status

    async def _workers(self) -> list[tuple[str, EngineStatus]]:
        """Return the address and status of each worker that the gateway lists and that answers the sidecar.

        The result omits a worker that does not answer the sidecar. Perhaps only the gateway can reach such a
        worker, or only the gateway has the worker's key.
        """

        async def ask(url: str) -> EngineStatus | None:
            with suppress(SglangToppError):
                http = HttpClient(replace(self._config, base_url=url))
                try:
                    return _status_of(
                        await http.request_json("GET", "/server_info", timeout_s=_WORKER_TIMEOUT_S)
                    )
                finally:
                    await http.aclose()
            return None

        listed: Any = None
        with suppress(ResponseError, WireError):
            listed = (await self._http.request_json("GET", "/workers", timeout_s=_TIMEOUT_S)).get("workers")
        # If a worker has several ranks, the gateway lists each rank separately, as http://host:port@rank.
        urls = [
            str(worker.get("url")).rstrip("/").partition("@")[0]
            for worker in (listed if isinstance(listed, list) else [])
            if isinstance(worker, dict) and worker.get("is_healthy") is not False
        ]
        found = await asyncio.gather(*map(ask, urls))
        return [(url, status) for url, status in zip(urls, found, strict=True) if status is not None]

    async def _test(self, status: EngineStatus) -> EngineStatus:
        """Generate one token with its candidate set, through the code that also serves callers' requests."""
        requests = build_sample_requests([_PROBE_PROMPT], {"max_new_tokens": 1, "temperature": 1.0}, 0.5)
        options = replace(_OPTIONS, request_id=_PROBE_ID, timeout_s=_TIMEOUT_S, keeps_going=False)
        try:
            await self._runs.gather(requests, options)
        except AuthenticationError:
            raise
        except (WireError, BadRequestError) as error:
            reason = (
                f"{self.base_url} says that the plugin is active, but it did not return one token with"
                f" its candidate set. Does something between the sidecar and the engine drop fields that"
                f" it does not know, as older gateways do? {error}"
            )
            return replace(status, phase="unpatched", reason=reason, patch={})
        except SglangToppError as error:
            return self._not_ready(status, f"it generated no first token: {error}")
        self._has_given_sets = True
        return status

    def _not_ready(self, status: EngineStatus, cause: str) -> EngineStatus:
        reason = f"the engine at {self.base_url} is not ready: {cause}"
        return replace(status, phase="starting", reason=reason)

    # -- samples -----------------------------------------------------------------------------------

    async def collect(
        self,
        request: SampleCall,
        share: MemoryShare,
        headers: Mapping[str, str],
        finished: Results,
    ) -> None:
        """Put each sample or score into `finished` at once, and count its memory in `share`; None comes last.

        The engine never waits for a slow caller. If a prompt fails, the error takes the place of its other
        samples, and the other prompts go on. Canceling this method aborts the unfinished samples in the
        engine.

        Args:
            request: the caller's request.
            share: the memory of this request.
            headers: sent with each request to the engine.
            finished: receives the results.
        """
        missing = {one.prompt_index: len(one.samples) for one in request.wanted}

        def fail(prompt: int, cause: Exception) -> None:
            del missing[prompt]
            finished.put_nowait(((prompt, 0), self._note_failure(cause)))

        try:
            body = request.body
            options = replace(_OPTIONS, request_id=body.request_id or uuid.uuid4().hex, headers=headers)
            if isinstance(body, RolloutsBody):
                options = replace(options, on_abort=body.on_abort)
            for rollout in request.given.values():
                share.change(num_bytes_of(rollout))
            async with aclosing(self._runs.stream(request.wanted, options, request.given)) as results:
                async for place, item in results:
                    prompt, _ = place
                    if prompt not in missing:
                        continue  # another sample of the prompt has failed
                    if isinstance(item, SglangToppError):
                        fail(prompt, item)
                        continue
                    missing[prompt] -= 1
                    if not missing[prompt]:
                        del missing[prompt]
                    share.change(num_bytes_of(item))
                    finished.put_nowait((place, item))
                    del item
        except Exception as error:
            for prompt in list(missing):
                fail(prompt, error)
        finished.put_nowait(None)

    def _note_failure(self, error: Exception) -> SglangToppError:
        """Probe the engine again if the error casts doubt on it, and return the error for the caller."""
        if not isinstance(error, SglangToppError):
            return as_sglang_topp_error(error)
        if isinstance(error, MissingCandidateSetsError):
            # The engine may have restarted without the plugin since the last probe.
            self.status = replace(self.status, phase="unpatched", reason=str(error), patch={})
        if isinstance(error, TransportError | ServerError | MissingCandidateSetsError):
            self._probe_now.set()
        return from_engine_error(error)

    async def abort(self, request_id: str | None) -> int | None:
        """Abort one request, or all requests in the engine, and return how many of this sidecar's had the id.

        The field `on_abort` of each aborted request decides what the caller of that request receives.

        Args:
            request_id: the id that a caller gave to its request, or the engine's own id of a request. If
                `request_id` is None, the engine aborts all requests, whose number is unknown.

        Raises:
            SglangToppError: the engine refused the abort, or did not answer.
        """
        try:
            if request_id is not None:
                return await self._runs.abort(request_id)
            await self._runs.abort_all()
            return None
        except SglangToppError as error:
            raise from_engine_error(error) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()
        await self._runs.close()


def _status_of(info: dict[str, Any]) -> EngineStatus:
    """Build a status from an engine's `/server_info` answer, and set its phase to `ready`."""
    patch = info.get("sglang_topp")
    patch = patch if isinstance(patch, dict) else {}
    return EngineStatus(
        "ready",
        model_path=_text(info.get("model_path")),
        sglang_version=_text(info.get("version")),
        patch=patch,
        model=Model.from_record(patch.get("model")),
    )


def _why_unpatched(status: EngineStatus, where: str) -> str:
    version = f"SGLang {status.sglang_version}" if status.sglang_version else "unknown SGLang version"
    if not status.patch:
        return (
            f"{where} ({version}) runs without the sglang-topp plugin: its"
            " /server_info does not mention it. Install sglang-topp in the engine's environment, leave it"
            " in SGLANG_PLUGINS if that is set, and see `sglang-topp doctor`"
        )
    if status.is_patched:
        return (
            f"the plugin in {where} ({version}) does not report its model's sizes, which request checks"
            " need; install the same sglang-topp there and here"
        )
    causes = "; ".join(status.problems) or "it gives no reason"
    return f"the plugin is not active in {where} ({version}): {causes}"


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
