"""AsyncRolloutClient: the asyncio client that returns rollouts and scores with their candidate sets."""

from __future__ import annotations

import functools
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from ssl import SSLContext
from typing import Any, Concatenate, Literal, ParamSpec, TypedDict, Unpack, overload

from sglang_topp.errors import InvalidInputError, SglangToppError
from sglang_topp_client.requests import (
    OnAbort,
    OnTimeout,
    Prompts,
    SampleRequest,
    SamplingParams,
    Sequences,
    Start,
    TopLogprobsP,
    TopLogprobsSource,
    build_resume_requests,
    build_sample_requests,
    build_score_requests,
)
from sglang_topp_client.rollout import ReturnField, Rollout, Score
from sglang_topp_client.run import RunOptions, Runs
from sglang_topp_client.transport.server_config import ServerConfig, check_key, server_urls
from sglang_topp_client.value_checks import check_choice, check_request_id, seconds, whole_number
from sglang_topp_client.weight_push.weight_pusher import WeightPusher

_P = ParamSpec("_P")
DEFAULT_TIMEOUT_S = 4 * 3600.0
"""The default `timeout_s` of `generate`, `resume`, and `score`: four hours, longer than most batches take."""


class CallOptions(TypedDict, total=False):
    """The options of every call; see `AsyncRolloutClient.generate`."""

    top_logprobs_p: TopLogprobsP
    timeout_s: float | None
    progress: bool | None
    request_id: str | None


class GenerateOptions(CallOptions, total=False):
    """The options of `generate`, `stream`, and `resume`; see `AsyncRolloutClient.generate`."""

    top_logprobs_source: TopLogprobsSource
    return_fields: Sequence[ReturnField]
    on_abort: OnAbort
    on_timeout: OnTimeout


class ScoreOptions(CallOptions, total=False):
    """The options of `score` and `stream_scores`; see `AsyncRolloutClient.score`."""

    start: Start
    on_abort: Literal["raise", "resume"]


def _delegating(
    method: Callable[Concatenate[WeightPusher, _P], Coroutine[Any, Any, None]],
) -> Callable[Concatenate[AsyncRolloutClient, _P], Coroutine[Any, Any, None]]:
    """Return a method of the client that calls one of its WeightPusher, with the same arguments."""

    @functools.wraps(method)
    async def call(self: AsyncRolloutClient, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
        await method(self._weights, *args, **kwargs)

    return call


class AsyncRolloutClient:
    """An asyncio client for sidecars or for patched SGLang servers.

    Each prompt goes in an HTTP call of its own. With several servers, the client sends each call to the
    server with the fewest samples in flight. All samples of a prompt go to one server. This server
    prefills the prompt once, and the samples share the prompt's KV through the prefix cache. If a server
    dies, hangs, or answers 429 or 5xx, the client immediately moves the server's unfinished samples to the
    other servers. The client tries the failed server again after 0.25 to 8 s, or after the time in the
    `Retry-After` header of a 429 answer.

    One client may be used on several event loops at once. A connection belongs to the event loop that opened
    it, and closes when that loop ends or `close` is called. Pickling a client copies only its configuration.

    Args:
        base_url: the address, `http://host:port`, of a sidecar or an engine, or several addresses of servers
            with the same model and weights.
        engine_url: the addresses of all engines that `push_weights` updates; `base_url` by default.
            `push_weights` needs this argument if `base_url` names sidecars or gateways, which do not forward
            weights.
        kind: whether the servers at `base_url` are sidecars or patched SGLang servers. With `"auto"`, the
            client determines the kind with one `GET /info` to each server.
        api_key: the key, sent as a bearer token. The client follows no redirects, so no other server gets the
            key.
        engine_api_key: the bearer token for `engine_url`, for example SGLang's `--admin-api-key`. The default
            is `api_key` if `engine_url` is not given, and no key otherwise.
        headers: additional headers for every request, including requests to `engine_url`.
        ssl: the TLS settings for `https://` addresses, such as the CA to trust or a client certificate. The
            default trusts the CAs of the system, or the CAs in the file that `SSL_CERT_FILE` names. A client
            with an SSLContext cannot be pickled.
        max_connections: how many HTTP calls may be in flight at once. If the limit on open files
            (`ulimit -n`) is low, the client allows fewer calls in flight. The maximum is then the number of
            file descriptors that are free at the client's first call, minus a reserve of at most 64.
        max_retries: the maximum number of retries of an HTTP call. A retry begins once the call has failed on
            every available server. A move to another server does not count as a retry. Only transport errors
            and the statuses 5xx are retried. A refusal (429 or 503) is no failure: `generate`, `resume`, and
            `score` wait until a server accepts the call, or `timeout_s` passes.
        max_message_bytes: the maximum length in bytes of one message in an answer, before and after
            decompression. A message holds at most one sample. 512 MiB is enough for a sample of 32,000 tokens
            with 1,500 candidates per token.

    Raises:
        InvalidInputError: an argument is wrong.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        engine_url: str | Sequence[str] | None = None,
        kind: Literal["auto", "sidecar", "sglang"] = "auto",
        api_key: str | None = None,
        engine_api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        ssl: SSLContext | None = None,
        max_connections: int = 1024,
        max_retries: int = 4,
        max_message_bytes: int = 512 * 2**20,
    ) -> None:
        self._arguments: dict[str, Any] = {name: given for name, given in locals().items() if name != "self"}
        check_choice("kind", kind, Literal["auto", "sidecar", "sglang"])
        whole_number("max_retries", max_retries, 0)
        headers = {} if headers is None else headers
        self._configs = [
            ServerConfig(url, max_connections, max_message_bytes, api_key, headers, ssl)
            for url in server_urls("base_url", base_url)
        ]
        check_key("engine_api_key", engine_api_key)
        self._weights = WeightPusher(
            base_url if engine_url is None else engine_url,
            api_key=api_key if engine_url is None and engine_api_key is None else engine_api_key,
            headers=headers,
            ssl=ssl,
        )
        urls = {name: self._arguments[name] for name in ("base_url", "engine_url")}
        self._arguments |= {name: tuple(url) for name, url in urls.items() if not isinstance(url, str | None)}
        self._arguments["headers"] = self._configs[0].headers
        addresses = [config.base_url for config in (*self._configs, *self._weights.configs)]
        if ssl is not None and not any(url.lower().startswith("https:") for url in addresses):
            raise InvalidInputError(
                f"ssl: got TLS settings, but no address begins with https://: {', '.join(addresses)}"
            )
        self._runs = Runs(
            self._configs,
            kind=None if kind == "auto" else kind,
            max_retries=max_retries,
            pauses=self._weights.pauses,
        )

    def __reduce__(self) -> tuple[object, ...]:
        if self._configs[0].ssl is not None:
            raise InvalidInputError(
                "ssl: got an SSLContext, which does not pickle; make the client where it is used, or name the"
                " CA in the file of SSL_CERT_FILE there and leave ssl= out"
            )
        return functools.partial(type(self), **self._arguments), ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._arguments['base_url']!r}, kind={self._arguments['kind']!r})"

    # -- rollouts ----------------------------------------------------------------------------------

    @overload
    async def generate(
        self, prompts: Prompts, sampling_params: SamplingParams = None, **options: Unpack[GenerateOptions]
    ) -> list[Rollout]: ...

    @overload
    async def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams = None,
        *,
        return_exceptions: bool,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout | SglangToppError]: ...

    async def generate(
        self, prompts: Prompts, sampling_params: SamplingParams = None, **options: Any
    ) -> list[Any]:
        """Generate samples for every prompt, and return all samples.

        If a sample fails, the client aborts all other samples and raises the error. The client sends aborts
        in the background, so that a timeout or a cancellation never waits for an engine that hangs. `close`
        waits for pending aborts.

        If a server sends nothing for 10 s, the client probes the server. After two failed probes of 10 s
        each, all calls to this server fail, and the client moves the calls to other servers or retries the
        calls. A server with a long queue still answers probes, so the client leaves the calls on this server.

        Args:
            prompts: one prompt or several. A prompt is text, token ids, or chat messages, such as
                `[{"role": "user", "content": "Hello"}]`. For chat messages, the engine applies its chat
                template (`POST /tokenize`) and opens the assistant's turn, as in a chat completion. In this
                case, `Rollout.prompt_ids` holds the ids of the prompt after templating. If the engine uses a
                conversation template of SGLang (`--chat-template NAME`), pass the template's stop strings in
                `sampling_params`. To use tools or template variables, apply the template with the model's
                tokenizer and pass the token ids. The client refuses images, audio, and video.
            sampling_params: SGLang's sampling parameters; one mapping for all prompts, or one per prompt. `n`
                is the number of samples of each prompt.
            top_logprobs_p: the threshold p of the candidate sets, one for all prompts or one per prompt. None
                or 0 stands for no threshold. A prompt without a threshold gets no sets, unless its
                `top_logprobs_source` is `"sampler"`.
            top_logprobs_source: the rule that selects the tokens of the sets, one for all prompts or one per
                prompt. `"sampler"` selects the tokens that the engine's sampler could draw under the
                request's top_k, top_p, and min_p. `"sampler"` cannot be combined with `top_logprobs_p`. With
                None or `"distribution"`, the sets are the top-p sets at the threshold `top_logprobs_p`.
            return_fields: what else to return of each token, in `Rollout.token_fields`. `"routed_experts"`
                needs sets, and an engine with `--enable-return-routed-experts`.
            on_abort: how to treat a sample that the engine aborts because of `abort`, a pause, or a weight
                update. `"raise"` raises an error. `"return"` returns a rollout with finish reason `"abort"`.
                This rollout holds everything generated so far and can be resumed. `"resume"` continues the
                sample, as often as needed, once the engine accepts requests again. `"resume"` requires
                `max_new_tokens`. After `abort` in this client, `"resume"` raises an AbortedError too.
            timeout_s: the time limit of the whole call, including retries; None for no limit. The default is
                four hours, and no limit for `stream`.
            on_timeout: what happens at the time limit. `"raise"` raises an error. `"return"` aborts what is
                unfinished, and returns it as rollouts with finish reason `"abort"`, which can be resumed. A
                prompt of text that no engine has tokenized yet is an error all the same, as `abort` says.
            progress: whether to show a progress line. If stderr is not a terminal, the client never shows the
                line. With None, the client shows the line for batches that take over two seconds, unless the
                program has set up logging.
            request_id: the name of the request for `abort` and for the server's logs: printable text of at
                most 512 characters. By default, the client makes up a random name.
            return_exceptions: whether the samples of other prompts continue if a sample fails. If True, the
                returned list holds an error in the place of each failed sample. `isinstance(entry, Rollout)`
                distinguishes rollouts from errors. If a sample fails, all unfinished samples of the same
                prompt fail with the same error. The list also holds errors for samples that `timeout_s` or
                `abort` ended. A wrong argument always raises an error, before anything is sent.

        Returns:
            One rollout per sample, in the order of the prompts; the samples of a prompt are adjacent.

        Raises:
            InvalidInputError: an argument is wrong; nothing was sent. With `on_abort="resume"`, penalties,
                grammars, and custom parameters are also refused, because an interruption would change their
                effect (`sglang_topp.engine_contract`).
            BadRequestError, AuthenticationError: the server refuses the request.
            RequestTimeoutError: `timeout_s` passed.
            TransportError, ServerError: an HTTP call and all of its retries failed. If the client tried
                several servers and none answered, the error message names all of these servers.
            AbortedError: a sample was ended by `abort`, a pause, or a weight update.
            RolloutError: the engine aborted a sample for another reason, or ended it with an error.
            MissingCandidateSetsError: the answer lacks the requested candidate sets.
            SampledTokenMissingError: a set lacks its sampled token.
            WireError: any other part of the answer is missing, is malformed, or contradicts the request.
        """
        run_options = self._options("generate", options)
        requests = build_sample_requests(prompts, sampling_params, **options)
        return await self._runs.gather(requests, run_options)

    @overload
    def stream(
        self, prompts: Prompts, sampling_params: SamplingParams = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[Rollout, None]: ...

    @overload
    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams = None,
        *,
        return_exceptions: bool,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGenerator[Rollout | SglangToppError, None]: ...

    def stream(
        self, prompts: Prompts, sampling_params: SamplingParams = None, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Generate samples as `generate` does, but yield each sample as it finishes, in any order.

        The client sends no request before the caller asks for the first sample. Once 1,024 finished samples
        wait for the caller, the client sends no more prompts until the caller has taken half of these
        samples. The engine still finishes all samples of the prompts that the client has already sent.
        Closing the iterator (`aclose`, or `contextlib.aclosing` around it) aborts the remaining samples in
        the engine. A sample is never yielded twice: after a lost connection, only unfinished samples are
        generated again.

        There is no time limit by default, because `timeout_s` also counts the time that the caller spends
        between samples.

        With `return_exceptions`, the iterator yields an error for each failed sample, whose `prompt_index`
        tells the prompt.
        """
        run_options = self._options("stream", options)
        return self._stream(build_sample_requests(prompts, sampling_params, **options), run_options)

    @overload
    async def resume(
        self,
        rollouts: Rollout | Sequence[Rollout],
        sampling_params: SamplingParams = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout]: ...

    @overload
    async def resume(
        self,
        rollouts: Rollout | Sequence[Rollout],
        sampling_params: SamplingParams = None,
        *,
        return_exceptions: bool,
        **options: Unpack[GenerateOptions],
    ) -> list[Rollout | SglangToppError]: ...

    async def resume(
        self, rollouts: Rollout | Sequence[Rollout], sampling_params: SamplingParams = None, **options: Any
    ) -> list[Any]:
        """Continue rollouts that were aborted, cut off at `max_new_tokens`, or extended by the caller.

        Each result looks as if the rollout had been generated without interruption: the ids, text, log-probs,
        candidate sets, and weight versions cover the earlier part and the new part. The new part may come
        from another engine or from newer weights. A stop string may begin in the earlier part and end in the
        new part. `Rollout.extend` begins a new turn: `max_new_tokens`, `min_new_tokens`, and stop strings
        apply to the last turn alone.

        A rollout with finish reason `"stop"` is returned unchanged. If the last turn already has at least
        `max_new_tokens` tokens, the rollout gets no new tokens, and its finish reason is `"length"`.

        Args:
            rollouts: one rollout or several, returned by `generate` or loaded from a file.
            sampling_params: what to change in the parameters that generated the earlier part, which each
                rollout records; one mapping for all rollouts, or one per rollout. `max_new_tokens` is
                required, here or there. `max_new_tokens` and `min_new_tokens` count all tokens of the turn,
                not only the new tokens. Another distribution (`temperature`, `top_p`, `top_k`, `min_p`,
                `logit_bias`) is an error. `n` is ignored, because each rollout is one sample.
            top_logprobs_p, top_logprobs_source, return_fields: by default as recorded; other values are an
                error.
            return_exceptions: as for `generate`; the returned list has one entry per rollout.
            on_abort, timeout_s, on_timeout, progress, request_id: as for `generate`.

        Returns:
            The continued rollouts, in the order of `rollouts` and with unchanged indices. No rollouts make an
            empty list.

        Raises:
            InvalidInputError: an argument is wrong, or a sampling parameter does not allow an exact resume;
                nothing was sent.
            SglangToppError: as for `generate`.
        """
        if isinstance(rollouts, Sequence) and not len(rollouts):
            return []
        run_options = self._options("resume", options)
        requests, existing = build_resume_requests(rollouts, sampling_params, **options)
        # Two of the caller's rollouts can have the same `prompt_index` and the same `sample_index`. Each of
        # the `requests` therefore has a new `prompt_index`: the position of its rollout in `rollouts`. The
        # code below gives each result the two indices of the caller's rollout.
        resumed = await self._runs.gather(requests, run_options, dict(enumerate(existing)))
        return [
            replace(rest, prompt_index=part.prompt_index, sample_index=part.sample_index)
            if isinstance(rest, Rollout)
            else rest
            for part, rest in zip(existing, resumed, strict=True)
        ]

    # -- scores ------------------------------------------------------------------------------------

    @overload
    async def score(self, sequences: Sequences, **options: Unpack[ScoreOptions]) -> list[Score]: ...

    @overload
    async def score(
        self, sequences: Sequences, *, return_exceptions: bool, **options: Unpack[ScoreOptions]
    ) -> list[Score | SglangToppError]: ...

    async def score(self, sequences: Sequences, **options: Any) -> list[Any]:
        """Return the log-probs and candidate sets that the engine's model assigns to existing sequences.

        The engine generates no token. The engine scores at temperature 1, without penalties, bias, or
        grammar, even if a sequence was sampled with other settings. Errors are raised as in `generate`.

        Args:
            sequences: one sequence or several. A sequence is text, token ids, or a Rollout, whose prompt and
                output tokens form the sequence.
            top_logprobs_p: the threshold p of the candidate sets, one for all sequences or one per sequence.
                With None or 0, the scores have no sets. `score` has no argument `top_logprobs_source`,
                because scoring uses no sampler.
            start: the first scored position, at least 1; one for all sequences or one per sequence. The
                default is 1 or, for a Rollout, the position of its first generated token. Position 0 cannot
                be scored, because no token precedes it. If `start` is the sequence's length, no position is
                scored.
            on_abort: how to treat a sequence that the engine aborts because of `abort_all`, a pause, or a
                weight update. `"raise"` raises an error. `"resume"` sends the sequence again as soon as the
                engine accepts requests.
            return_exceptions: as for `generate`; the returned list has one entry per sequence.
            timeout_s, progress, request_id: as for `generate`.

        Returns:
            The scores in the order of the sequences.

        Raises:
            BadRequestError: the server refuses a sequence, for example because the sequence is longer than
                the engine's prompt limit (in SGLang 0.5.23, the context length minus 7).
            SglangToppError: as for `generate`.
        """
        run_options = self._options("score", options)
        return await self._runs.gather(build_score_requests(sequences, **options), run_options)

    @overload
    def stream_scores(
        self, sequences: Sequences, **options: Unpack[ScoreOptions]
    ) -> AsyncGenerator[Score, None]: ...

    @overload
    def stream_scores(
        self, sequences: Sequences, *, return_exceptions: bool, **options: Unpack[ScoreOptions]
    ) -> AsyncGenerator[Score | SglangToppError, None]: ...

    def stream_scores(self, sequences: Sequences, **options: Any) -> AsyncGenerator[Any, None]:
        """Score as `score` does, but yield each score as it arrives, in any order. See also `stream`."""
        run_options = self._options("stream_scores", options)
        return self._stream(build_score_requests(sequences, **options), run_options)

    # -- requests in flight ------------------------------------------------------------------------

    async def abort(self, request_id: str) -> int:
        """Abort a request in this client and in the engine. The request's caller gets an AbortedError.

        If the request has `on_abort="return"`, the client keeps the request's connections open while the
        engine aborts the samples, and the caller gets everything that was generated. The client stops waiting
        for an engine that sends nothing for five seconds, and for a sidecar that sends nothing for ten
        seconds. If no token of a sample has arrived, the caller gets a rollout without tokens. If the engine
        had not yet tokenized the prompt, the caller gets a RolloutError, because the prompt's token ids are
        unknown.

        When this method returns, all of this client's requests with this `request_id` have stopped, also
        those of other event loops. The method waits up to three seconds for the engine to receive the abort.
        Even if the engine does not receive it, the client closes the samples' connections, and the engine
        then aborts the samples. If the caller cancels the wait, the client still sends the abort.

        If this client runs no request with this `request_id`, it asks every server. A sidecar knows the ids
        that callers gave it over HTTP. Other clients make their ids unique, so that two trainers that both
        use `"step-7"` do not abort each other. An engine is asked only if the id ends as those of its samples
        do (`Rollout.request_id`), and does not say whether it knew the id.

        Returns:
            How many unfinished prompts this client and the sidecars have aborted. 0 means that none of them
            runs a request with this id.
        """
        check_request_id(request_id)
        return await self._runs.abort(request_id)

    async def abort_all(self) -> None:
        """Abort every request in the engines, including requests of other clients.

        The `on_abort` of each request decides what happens to its samples. Pause the engines before this
        call. If the engines are not paused, each client immediately resumes its samples whose `on_abort` is
        `"resume"`. For this client's requests with `on_abort="return"`, `abort_all` has the same effect as
        `abort`: the client sends no further prompts of these requests, and returns their partial samples.
        """
        await self._runs.abort_all()

    # -- weights -----------------------------------------------------------------------------------

    push_weights = _delegating(WeightPusher.push)
    pause = _delegating(WeightPusher.pause)
    continue_generation = _delegating(WeightPusher.continue_generation)

    # -- servers -----------------------------------------------------------------------------------

    async def server_info(self, base_url: str | None = None) -> dict[str, Any]:
        """Return what a server reports about itself: a sidecar's `/info`, or SGLang's `/server_info`.

        Args:
            base_url: the server to ask, by default the first.
        """
        return await self._runs.servers.info(self._configs[0].base_url if base_url is None else base_url)

    async def server_infos(self) -> dict[str, dict[str, Any]]:
        """Return what `server_info` returns for each server, by its URL."""
        return {config.base_url: await self.server_info(config.base_url) for config in self._configs}

    async def check_servers(self) -> None:
        """Check that no server or gateway drops a field that this client needs.

        Call this method when a training run starts. Some gateways silently drop fields that they do not know.
        The client therefore sends each engine or gateway four requests for one token each. The answers show
        whether every request field arrived and every answer field came back. If the engine's SGLang
        release refuses a field, the field also passes the check: the refusal shows that the field arrived. A
        gateway may send the client's requests to only some of its engines, and the client then checks only
        these engines. A sidecar checks its own engine, so the client asks a sidecar only whether the sidecar
        is ready.

        Raises:
            WireError: a field was lost between the client and the engine; the error's `field` and message
                name the lost field.
            ServerError: a sidecar is not ready; the message states the reason.
            SglangToppError: a server does not answer, or refuses the request.
        """
        await self._runs.servers.check_fields()

    async def close(self) -> None:
        """Stop all requests on this event loop, and close the loop's connections.

        The client stays usable after `close`. `close` waits up to three seconds for the engines to receive
        the aborts of the stopped requests.
        """
        await self._runs.close()

    async def __aenter__(self) -> AsyncRolloutClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _stream(
        self, requests: Sequence[SampleRequest], options: RunOptions
    ) -> AsyncGenerator[Any, None]:
        async with aclosing(self._runs.stream(requests, options)) as results:
            async for _, result in results:
                yield result

    def _options(self, method: str, given: dict[str, Any]) -> RunOptions:
        """Check the options of a call, and leave in `given` those that say what to request."""
        kind = ScoreOptions if "score" in method else GenerateOptions
        for name in given:
            if name not in kind.__optional_keys__ | {"return_exceptions"}:
                raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        keeps_going = given.pop("return_exceptions", False)
        check_choice("return_exceptions", keeps_going, Literal[True, False])
        progress = check_choice("progress", given.pop("progress", None), Literal[True, False, None])
        if (request_id := given.pop("request_id", None)) is not None:
            check_request_id(request_id)
        default_s = None if "stream" in method else DEFAULT_TIMEOUT_S
        if (timeout_s := given.pop("timeout_s", default_s)) is not None:
            timeout_s = seconds("timeout_s", timeout_s)
        headers: dict[str, str] = {}
        # A program that uses OpenTelemetry has imported it. In any other, the import would only cost time.
        if "opentelemetry" in sys.modules:
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            TraceContextTextMapPropagator().inject(headers)
        return RunOptions(
            request_id or uuid.uuid4().hex,
            on_abort=given.get("on_abort", "raise"),
            timeout_s=timeout_s,
            on_timeout=given.get("on_timeout", "raise"),
            progress=progress,
            keeps_going=keeps_going,
            headers=headers,
        )
