"""The servers of a client: kind, health, load, and back-off of each, and the choice of one for a call."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypedDict, TypeVar

from sglang_topp import formats
from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import (
    BadRequestError,
    InvalidInputError,
    MissingCandidateSetsError,
    ServerError,
    SglangToppError,
    TransportError,
    WireError,
    describe,
)
from sglang_topp.formats.field_parsing import token_ids_of
from sglang_topp_client.aborts import Aborts
from sglang_topp_client.protocols.sidecar import SERVICE
from sglang_topp_client.requests import Messages
from sglang_topp_client.retry_policy import delay_s, is_retryable, retrying
from sglang_topp_client.rollout import SAMPLER
from sglang_topp_client.transport.http import FileLimitError, HttpClient, max_connections
from sglang_topp_client.transport.server_config import Kind, ServerConfig
from sglang_topp_client.value_checks import convert, decode_json, fresh_id

_T = TypeVar("_T")

_INFO_PATHS: dict[Kind, str] = {"sidecar": "/info", "sglang": "/server_info"}
# Both routes answer at once. SGLang's `/health` does not, because it generates a token. `/ready` answers 503
# while the engine is paused, and SGLang before 0.5.23 answers 404.
_PROBE_PATHS: dict[Kind, str] = {"sidecar": "/healthz", "sglang": "/ready"}
_SILENCE_S = 10.0
_PROBE_TIMEOUT_S = 10.0
_MAX_FAILED_PROBES = 2
# SGLang's scheduler answers `/server_info` only between two steps, so a short time limit would expire while
# the scheduler is busy.
_INFO_TIMEOUT_S = 30.0
# A new engine compiles kernels during its first request, so a short time limit would expire too early.
_FIELD_CHECK_TIMEOUT_S = 120.0
# Request fields that some releases of SGLang refuse. If an error names one of these fields, the field has
# reached the engine.
_REFUSABLE = ("top_logprobs_source", RESUMED)
_BASE64_KEYS = tuple(f"output_top_p_logprobs_{part}" for part in ("val_base64", "idx_base64", "lengths"))
# The sign in an engine's answer that a request field has reached the engine: its name for error messages, and
# a function that looks for it, given the request's body and the answer's `meta_info`.
_SIGNS: dict[str, tuple[str, Callable[[Mapping[str, Any], Mapping[str, Any]], bool]]] = {
    "rid": ("this id", lambda body, meta: meta.get("id") == body["rid"]),
    "return_logprob": ("output_token_logprobs", lambda _, meta: bool(meta.get("output_token_logprobs"))),
    "top_logprobs_p": ("candidate sets", lambda _, meta: formats.has_top_p(meta)),
    "top_logprobs_source": (
        "top_logprobs_source",
        lambda _, meta: meta.get("top_logprobs_source") == SAMPLER,
    ),
    "return_logprobs_in_base64": ("base64 arrays", lambda _, meta: any(key in meta for key in _BASE64_KEYS)),
    RESUMED: (RESUMED, lambda body, meta: meta.get(RESUMED) == body[RESUMED]),
}
# A server counts as busier than another one if it has over so many samples more in flight. One server made
# all samples of a prompt, so calls that prefer the same server often follow each other.
_MAX_AHEAD = 8

_log = logging.getLogger(__name__)


class _Tokens(TypedDict):
    tokens: list[int]


class Server:
    """One server, used from one event loop.

    Args:
        config: the server's connection settings.
        kinds: maps the `base_url` of a server to its kind, `"sidecar"` or `"sglang"`, once the kind is known.
            All event loops share this mapping.
        pauses: maps the `base_url` of an engine that this client paused to the reason. All event loops share
            this mapping.

    Attributes:
        num_in_flight: the number of samples that the running calls asked for.
        error: the last retryable error, or None after a call that succeeded.
        aborts: sends the aborts of the server's requests.
        paused: why calls wait and since when, if the engine says that it is not ready, and otherwise empty.
    """

    def __init__(self, config: ServerConfig, kinds: dict[str, Kind], pauses: Mapping[str, str]) -> None:
        self.base_url, self.max_message_bytes = config.base_url, config.max_message_bytes
        self.num_in_flight = self._last_call = 0
        self.error: SglangToppError | None = None
        self._num_failures, self._retry_at = 0, 0.0
        self.paused = ""
        self._key_suffix = hashlib.blake2s(config.base_url.encode(), digest_size=4).hexdigest()
        self._clock = asyncio.get_running_loop().time
        self._http = HttpClient(config)
        self.aborts = Aborts(self._http, self.kind)
        self._kinds, self._pauses = kinds, pauses
        self._kind_lock = asyncio.Lock()
        self._calls: set[asyncio.Timeout] = set()
        self._watch: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return self.base_url

    # -- what it is --------------------------------------------------------------------------------

    async def kind(self) -> Kind:
        """Return `"sidecar"` or `"sglang"`. If the server's kind is unknown, send one `GET /info`.

        Raises:
            SglangToppError: the server did not answer, or refused the request.
        """
        if (known := self._kinds.get(self.base_url)) is not None:
            return known
        async with self._kind_lock:
            if (known := self._kinds.get(self.base_url)) is None:
                known = self._kinds[self.base_url] = "sidecar" if await self._is_sidecar() else "sglang"
            return known

    async def info(self) -> dict[str, Any]:
        """Return the answer of a sidecar's `/info` or of SGLang's `/server_info`.

        Raises:
            SglangToppError: the server sends no answer, an error, or an answer that is not a JSON object.
        """
        return await self._http.request_json("GET", _INFO_PATHS[await self.kind()], timeout_s=_INFO_TIMEOUT_S)

    async def check_fields(self) -> None:
        """Check that request fields reach the engine, and that answer fields reach the client.

        A gateway may silently drop fields that it does not know. Four requests generate one token each, and
        their answers show which fields have arrived (`_SIGNS`). A sidecar checks its own engine, so it is
        asked only whether it is ready.

        Raises:
            MissingCandidateSetsError: an answer has no candidate sets, because the field that asks for them
                was lost.
            WireError: another field was lost; the error's `field` and message name the field.
            ServerError: the sidecar is not ready.
            SglangToppError: the server did not answer, or refused the request.
        """
        if await self.kind() == "sidecar":
            info = await self.info()
            if info.get("ready") is not True:
                raise ServerError(f"{self.base_url} is not ready: {info.get('reason')}")
            return
        params = {"max_new_tokens": 1, "ignore_eos": True}
        base64 = {"return_logprobs_in_base64": True}
        asked: list[dict[str, Any]] = [
            # The first body asks for no candidate sets. If a gateway drops `return_logprob`, the engine still
            # accepts this body, and the answer shows that the field was lost. Without `return_logprob`, the
            # engine refuses the other bodies, which ask for sets.
            {},
            {"top_logprobs_p": 0.01, **base64},
            {"top_logprobs_source": SAMPLER, "sampling_params": {**params, "top_k": 1}, **base64},
            {"top_logprobs_p": 0.01, RESUMED: 1, **base64},
        ]
        common = {"input_ids": [0, 0], "sampling_params": params, "return_logprob": True}
        for fields in asked:
            body = {**common, **fields, "rid": fresh_id("field-check")}
            try:
                answer = await self._http.request_json(
                    "POST", "/generate", body, timeout_s=_FIELD_CHECK_TIMEOUT_S
                )
            except BadRequestError as error:
                if not any(name in body and name in str(error) for name in _REFUSABLE):
                    raise
            else:
                self._check_answer(body, answer)

    def _check_answer(self, body: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        meta_info = answer.get("meta_info")
        if not isinstance(meta_info, dict):
            raise WireError("meta_info", f"{self.base_url} answered {describe(answer)}, expected one answer")
        for name, (sign, is_there) in _SIGNS.items():
            if name in body and not is_there(body, meta_info):
                kind = MissingCandidateSetsError if name.startswith("top_logprobs") else WireError
                raise self._lost(kind, name, f"a request with this field came back without {sign}")
        if "return_logprobs_in_base64" not in body:
            return
        for key in (*_BASE64_KEYS, "weight_versions"):
            if key not in meta_info:
                raise self._lost(WireError, key, "it is missing in an answer with candidate sets")
        output_ids = convert(answer.get("output_ids"), list[int], field="output_ids")
        formats.decode_top_p(meta_info, output_ids)

    def _lost(self, kind: type[WireError], field: str, what: str) -> WireError:
        return kind(
            field,
            f"{self.base_url} lost this field: {what}. Either a gateway drops fields that it does not know,"
            " as sglang-router does (smg passes them on), or an engine behind it is not patched: run"
            " `sglang-topp doctor` there",
        )

    async def _is_sidecar(self) -> bool:
        try:
            info = await self._http.request_json("GET", "/info", timeout_s=_PROBE_TIMEOUT_S)
        except BadRequestError as error:
            if error.status not in (404, 405):
                raise
            return False
        except WireError:  # a gateway's own /info
            return False
        return info.get("service") == SERVICE

    # -- calls -------------------------------------------------------------------------------------

    def routing_key(self, earlier: str) -> str:
        """Return the value of the header `X-SMG-Routing-Key` for a request to this server.

        Gateways send requests with the same key to the same worker.

        Args:
            earlier: the routing key of the rollout that the request continues or scores, or empty. The part
                of the returned key before the `-` comes from `earlier`, or is random if `earlier` is empty.
                The part after the `-` identifies this server.
        """
        return f"{earlier.partition('-')[0] or secrets.token_hex(8)}-{self._key_suffix}"

    async def apply_chat_template(self, messages: Messages) -> list[int]:
        """Return the token ids of chat messages. The server must be an engine, not a sidecar.

        Raises:
            BadRequestError: the template refuses the messages, or the server lacks the route.
            SglangToppError: the server did not answer with token ids.
        """
        try:
            raw = await self._http.request(
                "POST", "/tokenize", {"messages": messages}, timeout_s=_INFO_TIMEOUT_S
            )
        except BadRequestError as error:
            raise BadRequestError(
                f"prompts: the engine does not turn these chat messages into token ids: {error}; apply the"
                " chat template with the model's tokenizer and give the ids",
                status=error.status,
                body=error.body,
            ) from error
        tokens = decode_json(raw, _Tokens, field="/tokenize")["tokens"]
        if not tokens:
            raise WireError("tokens", "got none: the chat template renders nothing for the messages")
        ids: list[int] = token_ids_of("tokens", tokens).tolist()
        return ids

    @property
    def heard_at(self) -> float:
        """When the server last sent a part of an answer to `post`, as the event loop counts time."""
        return self._http.heard_at

    @asynccontextmanager
    async def post(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a POST request with `HttpClient.post`, while a health check watches the server.

        A generation may wait in the engine's queue for an hour before its first byte arrives, so a time limit
        of the call could not tell a busy server from one that hangs. A server that has sent nothing for 10 s
        is therefore probed. After two failed probes in a row, all calls to it fail.

        Raises:
            TransportError: the server hangs.
            SglangToppError: as for `HttpClient.post`.
        """
        try:
            async with asyncio.timeout(None) as expiry:
                if not self._calls:
                    self._http.heard_at = self._clock()
                    self._watch = asyncio.create_task(self._watch_calls())
                self._calls.add(expiry)
                try:
                    async with self._http.post(path, body, headers) as messages:
                        yield messages
                finally:
                    self._calls.discard(expiry)
                    if not self._calls and self._watch is not None:
                        self._watch.cancel()
        except TimeoutError:
            if not expiry.expired():
                raise
            raise TransportError(
                f"{self.base_url}: the server hangs: nothing arrived for {_SILENCE_S:g} s, and then it"
                f" answered none of {_MAX_FAILED_PROBES} probes"
            ) from None

    async def _watch_calls(self) -> None:
        """Probe the server whenever it is silent for too long, and end its calls if it hangs."""
        num_failed = 0
        while num_failed < _MAX_FAILED_PROBES:
            silent_s = self._clock() - self._http.heard_at
            if silent_s < _SILENCE_S:
                await asyncio.sleep(_SILENCE_S - silent_s)
                num_failed = 0
                continue
            began = self._http.heard_at
            path = _PROBE_PATHS[self._kinds.get(self.base_url, "sglang")]
            status = await self._http.probe(path, timeout_s=_PROBE_TIMEOUT_S)
            if self._http.heard_at > began:
                continue
            if status is None:
                num_failed += 1
            else:
                self._http.heard_at = self._clock()
                self._note_pause(path == "/ready" and status == 503)
        _log.warning(
            "%s hangs: nothing arrived for %g s, and then it answered none of %d probes; its %d calls fail",
            *(self.base_url, _SILENCE_S, _MAX_FAILED_PROBES, len(self._calls)),
        )
        for expiry in self._calls:
            expiry.reschedule(self._clock())
        self._calls.clear()

    def _note_pause(self, is_paused: bool) -> None:
        """Log that calls wait for a paused engine, and that they go on."""
        if not is_paused:
            if self.paused:
                _log.warning("%s is ready again", self.base_url)
            self.paused = ""
        elif not self.paused:
            reason = self._pauses.get(self.base_url) or (
                "it was paused by a weight push, which may have failed, or by POST /pause_generation"
            )
            self.paused = (
                f"{self.base_url} has not been ready since {time.strftime('%H:%M:%S')} (GET /ready: 503):"
                f" {reason}; POST /continue_generation or a push that succeeds lets it go on"
            )
            _log.warning("%d calls wait, because %s", len(self._calls), self.paused)

    async def close(self) -> None:
        """Wait for the aborts that are under way, and close every connection."""
        await self._http.aclose()

    # -- load --------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the server works, or its delay after a failure has passed, and it may get one test call."""
        return not self._num_failures or (self._clock() >= self._retry_at and not self.num_in_flight)

    def note_failure(self, error: SglangToppError) -> None:
        """Note that a call failed, and begin a delay in which the server isn't ready.

        Each further failure in a row roughly doubles the delay (`delay_s`).
        """
        self.error = error
        now = self._clock()
        if now < self._retry_at:
            return  # do not count another failure before the delay ends
        self._num_failures += 1
        wait_s = delay_s(self._num_failures, error)
        self._retry_at = now + wait_s
        if self._num_failures.bit_count() == 1:  # the failures 1, 2, 4, 8, …
            _log.warning("%s fails, and is tried again in %.1f s: %s", self.base_url, wait_s, error)


class Servers:
    """All servers of one client, for the calls from one event loop. Create it while that loop runs.

    Args:
        configs: the servers' connection settings. The `max_connections` of the first config limits the calls
            to all servers together.
        kinds, pauses: see `Server`.
        max_retries: the maximum number of retries of a failed call.

    Attributes:
        slots: a place for each call that may be in flight.
        runs: the client's calls in progress on this event loop (`Run`).
        max_retries: as given.
    """

    def __init__(
        self,
        configs: Sequence[ServerConfig],
        kinds: dict[str, Kind],
        pauses: Mapping[str, str],
        *,
        max_retries: int,
    ) -> None:
        self.all = [Server(config, kinds, pauses) for config in configs]
        self.slots = asyncio.Semaphore(max_connections(configs[0].max_connections))
        self.runs: set[Any] = set()
        self.max_retries = max_retries
        self._num_calls = 0

    @property
    def num_in_flight(self) -> int:
        """The number of samples that the running calls asked for, of all servers."""
        return sum(server.num_in_flight for server in self.all)

    def has_ready(self, *, without: Collection[Server]) -> bool:
        """Return whether any server outside of `without` is ready."""
        return any(server.is_ready for server in self.all if server not in without)

    def choose(self, routing_key: str = "", *, without: Collection[Server] = ()) -> Server:
        """Return the server for one call: the least busy one that is ready.

        The server that the routing key names probably has the prompt in its prefix cache, so it comes first
        unless it is busier than the others. If no server is ready, return the one whose delay ends first.

        Args:
            routing_key: the `Rollout.routing_key` of the rollout that the call continues or scores, or empty.
            without: servers on which this call failed. They are chosen only if all have failed.
        """
        if len(self.all) == 1:
            return self.all[0]
        fresh = [server for server in self.all if server not in without] or self.all
        ready = [server for server in fresh if server.is_ready]
        if not ready:
            return min(fresh, key=lambda server: (server._retry_at, server.num_in_flight))
        least_busy = min(ready, key=lambda server: (server.num_in_flight, server._last_call))
        suffix = routing_key.partition("-")[2]
        same = next((server for server in ready if server._key_suffix == suffix), least_busy)
        return same if same.num_in_flight <= least_busy.num_in_flight + _MAX_AHEAD else least_busy

    @contextmanager
    def pick(
        self, num_samples: int, routing_key: str = "", *, without: Collection[Server] = ()
    ) -> Iterator[Server]:
        """Choose the server for a call of `num_samples` samples, which runs in the `with` block.

        The samples count as the server's load, and a retryable error in the block as its failure.
        """
        server = self.choose(routing_key, without=without)
        self._num_calls += 1
        server._last_call = self._num_calls
        server.num_in_flight += num_samples
        try:
            yield server
        except SglangToppError as error:
            # A lack of file descriptors in this process is no failure of the server.
            if is_retryable(error) and not isinstance(error, FileLimitError):
                server.note_failure(error)
            raise
        else:
            server._num_failures, server._retry_at, server.error = 0, 0.0, None
        finally:
            server.num_in_flight -= num_samples

    def none_answers(self, error: SglangToppError) -> TransportError | None:
        """If no server answers, return a TransportError that names every server.

        Return None if at least one server has not failed, if `error` is not a TransportError, or if there is
        only one server.
        """
        failures = {server.base_url: server.error for server in self.all if server.error is not None}
        if len(self.all) == 1 or not isinstance(error, TransportError) or len(failures) < len(self.all):
            return None
        words = [f"\n  {base_url}: {failure}" for base_url, failure in failures.items()]
        return TransportError(f"none of the {len(self.all)} servers answers:{''.join(words)}")

    async def on_all(self, order: Callable[[Server], Awaitable[_T]]) -> list[_T]:
        """Run `order` on every server, for example to abort a request, and return the results.

        Raises:
            SglangToppError: a server answered but did not carry out `order`, or no server answered. If at
                least one server answers, servers that do not answer are ignored. They need no order: a dead
                server runs no requests, and calls to a hung server time out.
        """
        outcomes = await asyncio.gather(*map(order, self.all), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for failure in failures:
            if len(failures) == len(outcomes) or not isinstance(failure, TransportError):
                raise failure
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]

    async def info(self, base_url: str) -> dict[str, Any]:
        """Return one server's answer to `/info` or `/server_info`.

        Raises:
            InvalidInputError: no server of the client has this base URL.
            SglangToppError: the server does not answer, reports an error, or sends an answer that is not a
                JSON object.
        """
        for server in self.all:
            if server.base_url == base_url:
                return await retrying(server.info, self.max_retries)
        raise InvalidInputError(
            f"base_url: got {describe(base_url)}, expected one of"
            f" {', '.join(server.base_url for server in self.all)}"
        )

    async def check_fields(self) -> None:
        """Check every server; see `Server.check_fields`."""
        for server in self.all:
            await retrying(server.check_fields, self.max_retries)

    async def close(self) -> None:
        """Wait for the aborts that are under way, and close every connection."""
        await asyncio.gather(*(server.close() for server in self.all))

    async def aborts_sent(self) -> None:
        """Wait for the aborts that are under way, at most three seconds."""
        await asyncio.gather(*(server.aborts.wait() for server in self.all))
