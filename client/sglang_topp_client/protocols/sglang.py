"""Protocols of a patched SGLang: write a request for one prompt or sequence, and read the answer.

The client always requests a stream. For each sample, SGLang sends a chunk at the first token, a chunk after
every `stream_interval` tokens, and a chunk at the end. The client sets `stream_interval` to more tokens than
any sample has, so SGLang sends only the first chunk and the last chunk. The last chunk holds the complete
sample. With the engine's option `--incremental-streaming-output`, the last chunk holds only the tokens after
the first chunk. A streamed request has these advantages over an unstreamed one:

- If the client closes the connection, SGLang cancels the request's HTTP handler at once. The canceled
  handler aborts every sample of the request, including queued samples. During an unstreamed request, SGLang
  checks only every 4 s whether the connection is still open.
- The first chunk of a sample contains the id that the engine gave the sample. With `n > 1`, SGLang ignores
  the request's `rid` and gives each sample a random id. To abort the sample, `/abort_request` needs this
  random id.
- With `n > 1`, each sample arrives as soon as it finishes.

The client sends one request for all `n` samples of a prompt. SGLang prefills the prompt once, and the samples
share the prompt's KV cache through the prefix cache. With `n` simultaneous requests, SGLang would prefill the
prompt `n` times.

A score is a request that generates no tokens. Its field `logprob_start_len` is a position in the sequence.
SGLang computes the next-token distribution at this position and at all later positions. The distribution at
position i gives the log-prob of the token at i + 1. The first token with a log-prob is therefore the token at
`logprob_start_len + 1`. Tokens before `logprob_start_len` may come from the prefix cache.

Chat messages go to `POST /tokenize` first, which applies the chat template and tokenizes the messages as for
`/v1/chat/completions`. The client then sends the token ids to `/generate`, because `/v1/chat/completions`
cannot resume an interrupted sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Annotated, Any, Required, TypedDict

import msgspec
import numpy as np
import pybase64

from sglang_topp import formats
from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import (
    AbortedError,
    BadRequestError,
    ResponseError,
    RolloutError,
    ServerError,
    SglangToppError,
    WireError,
    describe,
)
from sglang_topp.formats.field_parsing import token_ids_of
from sglang_topp_client.requests import SampleRequest, ScoreRequest, check_source, empty_rollout
from sglang_topp_client.rollout import (
    ABORT,
    DISTRIBUTION,
    SAMPLER,
    Count,
    Logprobs,
    Rollout,
    Score,
    TokenField,
    TokenIds,
    WeightSpan,
    check_result,
    read_array,
    read_spans,
)
from sglang_topp_client.value_checks import (
    MAX_BODY_CHARS,
    convert,
    decode_json,
    fresh_id,
    truncate,
)
from sglang_topp_client.wire.error_json import class_of_status

_STREAM_INTERVAL = 1 << 30
_FINISHED = ("stop", "length")
# If a prompt is too long, the error from SGLang's tokenizer manager or scheduler contains one of these
# phrases.
_TOO_LONG = ("is longer than the model's context length", "exceeds the maximum allowed length")


class TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """An item of SGLang's list of log-probs, `[logprob, token_id, text or null]`.

    There is one for each token, so the garbage collector does not track them.
    """

    logprob: float | None
    token_id: int
    text: str | None = None


_logprob_of, _token_id_of = attrgetter("logprob"), attrgetter("token_id")


class _MetaInfo(TypedDict, total=False):
    # The client may later abort the request by this id. SGLang matches the id in an abort as a prefix, so an
    # empty id would abort every request.
    id: Required[Annotated[str, msgspec.Meta(min_length=1)]]
    finish_reason: dict[str, Any] | None
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    e2e_latency: Annotated[float, msgspec.Meta(le=1e12)]
    weight_version: str | int | None
    weight_versions: list[WeightSpan] | None
    resumed_tokens: Any
    routed_experts: Any
    routed_experts_shape: Any
    output_token_logprobs: list[TokenLogprob]
    input_token_logprobs: list[TokenLogprob]
    top_logprobs_source: Any
    output_top_p_logprobs: list[Any]
    output_top_p_logprobs_val_base64: Any
    output_top_p_logprobs_idx_base64: Any
    output_top_p_logprobs_lengths: list[Any]
    input_top_p_logprobs: Any
    input_top_p_logprobs_val_base64: Any
    input_top_p_logprobs_idx_base64: Any
    input_top_p_logprobs_lengths: Any


class _Chunk(TypedDict, total=False):
    """A chunk of a stream. Fields of type `Any` are checked where they are read."""

    index: int
    text: str | None
    output_ids: list[int]
    prompt_token_ids: list[int]
    meta_info: _MetaInfo
    error: Any


class SglangExchange:
    """One `POST /generate` for one prompt or sequence: the request body, and the chunks received so far.

    Attributes:
        path, headers: the route, and what the request has beside the client's own headers.
        open_ids: the engine's ids of the unfinished samples, as far as the client knows them, to abort them.
        has_begun: whether the engine has begun to generate.
        complete: whether the last event has arrived.
    """

    path = "/generate"
    headers: Mapping[str, str] = {}

    def __init__(self, wanted: SampleRequest, *, request_id: str) -> None:
        """Prepare one call for the samples of one prompt.

        The client sends `request_id` with a random suffix, because SGLang rejects an id that is in use. The
        suffix has a fixed length, because SGLang's scheduler matches the id in an abort request as a prefix.
        If the suffixes differed in length, an abort of `a-1` would also abort `a-10`.
        """
        self._wanted = wanted
        # The name of the caller's argument that holds the prompts, for error messages.
        self._prompts_field = "sequences" if isinstance(wanted, ScoreRequest) else "prompts"
        self._rid = fresh_id(request_id)
        self._chunks: dict[int, _Chunk] = {}
        self._finished: set[int] = set()
        self.open_ids = {0: self._rid} if len(wanted.samples) == 1 else {}
        self.has_begun = self.complete = False

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the request."""
        wanted = self._wanted
        is_text = isinstance(wanted.prompt, str)
        body: dict[str, Any] = {
            "text" if is_text else "input_ids": wanted.prompt,
            "sampling_params": {
                **wanted.sampling_params,
                "n": len(wanted.samples),
                "stream_interval": _STREAM_INTERVAL,
            },
            "rid": self._rid,
            "return_logprob": True,
            "stream": True,
        }
        if is_text:
            body["return_prompt_token_ids"] = True
        if isinstance(wanted, ScoreRequest):
            sets = {"top_logprobs_p": wanted.top_logprobs_p or _LEAST_P, "return_logprobs_in_base64": True}
            body |= {"logprob_start_len": wanted.start - 1, **sets}
        elif wanted.top_logprobs_source == SAMPLER:
            body |= {"top_logprobs_source": SAMPLER, "return_logprobs_in_base64": True}
        elif wanted.top_logprobs_source is not None:
            body |= {"top_logprobs_p": wanted.top_logprobs_p, "return_logprobs_in_base64": True}
        if wanted.return_fields:
            body |= {"return_routed_experts": True, "routed_experts_start_len": wanted.fields_start}
        if wanted.resumed_tokens is not None:
            body[RESUMED] = wanted.resumed_tokens
        return body

    def read(self, line: bytes) -> list[tuple[int, Rollout | Score]]:
        """Parse one line of the answer.

        Return a list with the sample index and the result of the sample that the line finishes, or an empty
        list if it finishes none.

        Raises:
            WireError: the line is not in SGLang's format, or the sample contradicts itself or the request.
            RolloutError: a sample's finish reason is not `"stop"`, `"length"`, or `"abort"`.
            AbortedError: the engine aborted a sample, and the request does not accept partial samples.
            ResponseError: the line reports an error, or the engine refused a sample.
        """
        if not line or line.startswith(b":"):
            # An empty line ends a server-sent event. A line that begins with a colon is a comment, which
            # gateways send to keep a connection alive.
            return []
        start = 5 if line.startswith(b"data:") else 0
        if not start and not line.startswith(b"{"):
            raise WireError("stream", f"got {line[:200]!r}, expected server-sent events")
        if line[start : start + 16].strip() == b"[DONE]":
            if len(self._finished) != len(self._wanted.samples):
                raise WireError(
                    "stream", f"ended after {len(self._finished)} of {len(self._wanted.samples)} samples"
                )
            self.complete = True
            return []
        # Decode the JSON text without a copy of its bytes, because a line may be hundreds of MB long.
        chunk = decode_json(memoryview(line)[start:], _Chunk, field="stream")
        if "error" in chunk:
            raise _reported_error(chunk["error"], self._prompts_field)
        _require(chunk, "output_ids", "meta_info")
        index, samples = chunk.get("index", 0), self._wanted.samples
        if index not in range(len(samples)) or index in self._finished:
            raise WireError(
                "index", f"got {describe(index)}, expected an unfinished one of {len(samples)} samples"
            )
        meta_info = chunk["meta_info"]
        self.open_ids[index] = meta_info["id"]
        reason = meta_info.get("finish_reason")
        is_partial = self._wanted.is_interruptible and reason is not None and _is_order(reason)
        if reason is not None and reason.get("type") not in _FINISHED and not is_partial:
            raise _unfinished(reason, self._prompts_field)
        if (resumed := meta_info.get(RESUMED)) != self._wanted.resumed_tokens:
            raise WireError(
                RESUMED,
                f"got {describe(resumed)}, expected {self._wanted.resumed_tokens}, as requested: the engine,"
                " or a gateway before it, does not resume answers. Is it patched with this version of"
                " sglang-topp?",
            )
        if meta_info.get("completion_tokens") != len(chunk["output_ids"]) and index in self._chunks:
            chunk = _joined(self._chunks[index], chunk)
        self._chunks[index], self.has_begun = chunk, True
        if reason is None:
            return []
        self._finished.add(index)
        del self.open_ids[index], self._chunks[index]
        if isinstance(self._wanted, ScoreRequest):
            return [(samples[index], _score(self._wanted, chunk))]
        return [(samples[index], _rollout(self._wanted, samples[index], chunk))]


def _joined(first: _Chunk, rest: _Chunk) -> _Chunk:
    """Join two chunks of an engine with --incremental-streaming-output, whose chunks have only new tokens."""
    parts = first["meta_info"], rest["meta_info"]
    for part in parts:
        _require(part, "output_token_logprobs")
    meta_info: Any = {**parts[1], **formats.merge_stream_chunks(parts)}
    meta_info["output_token_logprobs"] = parts[0]["output_token_logprobs"] + parts[1]["output_token_logprobs"]
    return {
        **rest,
        "text": (first.get("text") or "") + (rest.get("text") or ""),
        "output_ids": first["output_ids"] + rest["output_ids"],
        "meta_info": meta_info,
    }


def _rollout(wanted: SampleRequest, sample: int, chunk: _Chunk) -> Rollout:
    """Decode the chunk of a finished sample."""
    meta_info = chunk["meta_info"]
    assert meta_info["finish_reason"] is not None
    finish_reason = meta_info["finish_reason"]["type"]
    if finish_reason == ABORT and meta_info.get("completion_tokens") == 0:
        return _empty_rollout_from_chunk(wanted, sample, chunk)
    _require(
        meta_info,
        *("prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "output_token_logprobs"),
    )
    output_ids = token_ids_of("output_ids", chunk["output_ids"])
    if (count := meta_info["completion_tokens"]) != len(output_ids):
        raise WireError(
            "output_ids", f"got {len(output_ids)} ids, but completion_tokens is {describe(count)}"
        )
    # With `max_new_tokens` 0, SGLang may report the log-prob of a token that is not part of the sample.
    entries = meta_info["output_token_logprobs"] if count else []
    logprobs = _parse_logprobs("output_token_logprobs", entries, output_ids, of="output")
    candidates = weight_spans = None
    if wanted.top_logprobs_source is not None:
        candidates = formats.decode_top_p(meta_info, output_ids)
        check_source(wanted, meta_info.get("top_logprobs_source", DISTRIBUTION))
        # For a request with sets, the patch corrects SGLang's field `weight_versions`. Without sets, the
        # boundary between two weight versions can be off by one token, so the client ignores the field.
        if (versions := meta_info.get("weight_versions")) is not None:
            weight_spans = read_spans("weight_versions", versions)

    token_fields: dict[str, TokenField] = {}
    for name in wanted.return_fields:
        token_fields[name] = _token_field(name, meta_info, wanted)
    rollout = Rollout(
        prompt_index=wanted.prompt_index,
        sample_index=sample,
        request_id=meta_info["id"],
        prompt_ids=_prompt_ids(wanted, chunk),
        output_ids=output_ids,
        text=chunk.get("text") or "",
        logprobs=logprobs,
        candidates=candidates,
        finish_reason=finish_reason,
        weight_version=_weight_version(meta_info),
        cached_tokens=meta_info["cached_tokens"],
        # The latency is negative if the engine's clock was set back during the request.
        latency_s=max(meta_info["e2e_latency"], 0.0),
        top_logprobs_source=wanted.top_logprobs_source,
        weight_spans=weight_spans,
        token_fields=token_fields,
    )
    check_result(rollout, p=wanted.top_logprobs_p)
    return rollout


def _token_field(name: str, meta_info: _MetaInfo, wanted: SampleRequest) -> TokenField:
    fields: Any = meta_info
    _require(meta_info, name, f"{name}_shape")
    try:
        shape = convert(fields[f"{name}_shape"], list[Count], field=f"{name}_shape")
        raw = pybase64.b64decode(fields[name], validate=True)
        return TokenField.of(read_array(raw, shape, "int32"), wanted.fields_start)
    except (TypeError, ValueError) as error:
        raise WireError(name, str(error)) from None


def _prompt_ids(wanted: SampleRequest, last: _Chunk) -> TokenIds:
    """Return the prompt's token ids, after a check of their number against a sample's last chunk."""
    prompt_ids = (
        _text_prompt_ids(last) if isinstance(wanted.prompt, str) else np.array(wanted.prompt, np.int32)
    )
    if (count := last["meta_info"]["prompt_tokens"]) != len(prompt_ids):
        raise WireError(
            "prompt_tokens",
            f"got {describe(count)} for a prompt of {len(prompt_ids)} tokens; the engine saw another prompt."
            " Was it started with --allow-auto-truncate?",
        )
    return prompt_ids


def _is_order(reason: Mapping[str, Any]) -> bool:
    """Return whether an abort request, a pause, or a weight update ended the sample.

    The finish reason of such a sample has the type `"abort"`. If the engine refused a sample, the finish
    reason also has the type `"abort"`, but contains a status code.
    """
    return reason.get("type") == ABORT and reason.get("status_code") is None


def _require(fields: _Chunk | _MetaInfo, *names: str) -> None:
    for name in names:
        if name not in fields:
            raise WireError(name, "missing, but required")


def _text_prompt_ids(chunk: _Chunk) -> TokenIds:
    if "prompt_token_ids" not in chunk:
        raise WireError(
            "prompt_token_ids",
            "got nothing for a text prompt: SGLang before 0.5.13 returns no token ids; give token ids",
        )
    return token_ids_of("prompt_token_ids", chunk["prompt_token_ids"])


def _empty_rollout_from_chunk(wanted: SampleRequest, sample: int, chunk: _Chunk) -> Rollout:
    """Return the rollout of a sample that was aborted before its first token."""
    if chunk["output_ids"]:
        raise WireError("output_ids", f"got {len(chunk['output_ids'])} ids, but completion_tokens is 0")
    if isinstance(wanted.prompt, str):
        wanted = replace(wanted, prompt=_text_prompt_ids(chunk).tolist())
    rollout = empty_rollout(wanted, sample, chunk["meta_info"]["id"])
    assert rollout is not None
    return replace(rollout, weight_version=_weight_version(chunk["meta_info"]))


def _unfinished(reason: Mapping[str, Any], prompts_field: str) -> SglangToppError:
    """Return the error of a sample that finished with neither `"stop"` nor `"length"`."""
    if (kind := reason.get("type")) is None:
        return WireError("finish_reason", f"got {describe(reason)}, expected an object with a type")
    words = truncate(reason.get("message"))
    field = _field_at_fault(words, prompts_field)
    if _is_order(reason):
        return AbortedError(
            f"an abort, a pause, or a weight update ended a sample: {words}; on_abort='resume' continues it"
            " once the engine takes requests again",
            body=truncate(reason, MAX_BODY_CHARS),
        )
    message = f"{field}the engine gave up on a sample: {describe(kind)}, {words}"
    # A finish reason `"abort"` with an HTTP status means that the engine refused the sample, for example
    # because the engine's queue is full or the prompt is too long.
    return _engine_error(message, reason.get("status_code"), RolloutError, reason)


def _reported_error(error: Any, prompts_field: str) -> ResponseError:
    fields = error if isinstance(error, dict) else {"message": error}
    words = truncate(fields.get("message"))
    message = f"{_field_at_fault(words, prompts_field)}the engine reports an error: {words}"
    return _engine_error(message, fields.get("code"), ServerError, error)


def _field_at_fault(words: str, prompts_field: str) -> str:
    """Return a prefix for an error message: the name of the argument that is too long, or "".

    SGLang's own error messages do not name the argument that is too long.
    """
    if "Requested token count exceeds" in words:
        return f"{prompts_field}, sampling_params.max_new_tokens: "
    return f"{prompts_field}: " if any(phrase in words for phrase in _TOO_LONG) else ""


def _engine_error(message: str, status: Any, otherwise: type[ResponseError], body: Any) -> ResponseError:
    """Return an error whose type matches the HTTP status that the engine reports.

    `otherwise` is the type of the returned error if `status` is not an HTTP error status.
    """
    is_status = isinstance(status, int) and 400 <= status < 600
    kind = class_of_status(status) if is_status else otherwise
    return kind(message, status=status if is_status else None, body=truncate(body, MAX_BODY_CHARS))


_LOGPROBS, _SETS = "input_token_logprobs", "input_top_p_logprobs"
# If the caller wants only log-probs, the client still requests candidate sets, with the threshold 1e-9. If a
# request asks for sets, the engine guarantees one weight version per score. Sets in an answer also prove that
# the engine is patched. At the threshold 1e-9, the sets are small: a set holds the most likely token and the
# sequence's token at the set's position. If several tokens tie for the highest probability, the set holds all
# of these tokens.
_LEAST_P = 1e-9


def _score(wanted: ScoreRequest, chunk: _Chunk) -> Score:
    """Decode the chunk of a finished score."""
    start, meta_info = wanted.start, chunk["meta_info"]
    _require(meta_info, "prompt_tokens", "completion_tokens", "cached_tokens", _LOGPROBS)
    if count := meta_info["completion_tokens"]:
        raise WireError("completion_tokens", f"got {count}, expected 0, as requested")
    token_ids = _prompt_ids(wanted, chunk)
    if start > len(token_ids):
        raise BadRequestError(
            f"start: got {start}, expected at most {len(token_ids)}, the number of the sequence's tokens",
            status=400,
        )
    logprobs = _logprobs(meta_info["input_token_logprobs"], token_ids, start)
    sets = formats.decode_top_p(meta_info, token_ids[start - 1 :], side="input")
    if sets.sizes[0]:
        raise WireError(_SETS, f"got a set before position {start}, the first requested position")
    p = wanted.top_logprobs_p
    if p is not None:
        check_source(wanted, meta_info.get("top_logprobs_source", DISTRIBUTION))
    score = Score(
        sequence_index=wanted.prompt_index,
        request_id=meta_info["id"],
        token_ids=token_ids,
        start=start,
        logprobs=logprobs,
        candidates=sets[1:],
        weight_version=_weight_version(meta_info),
        cached_tokens=meta_info["cached_tokens"],
    )
    check_result(score, p=p)
    return replace(score, candidates=None) if p is None else score


def _logprobs(entries: list[TokenLogprob], token_ids: TokenIds, start: int) -> Logprobs:
    """Return the log-probs of the tokens from `start` on, float32 [L - start], where L is `len(token_ids)`.

    `entries` is SGLang's list `input_token_logprobs`. The first entry of the list belongs to the token at
    `start - 1`, and has no log-prob.
    """
    if not entries or entries[0].logprob is not None:
        raise WireError(_LOGPROBS, f"expected a first entry without a log-prob, for position {start - 1}")
    rest, as_reported = entries[1:], token_ids[start:].copy()
    for t in np.flatnonzero(as_reported == token_ids.max()).tolist():
        # SGLang 0.5.23 reports the id 0 instead of the vocabulary's last id. The client does not know the
        # vocabulary's size, but in a sequence, only the largest id can be the vocabulary's last id.
        if t < len(rest) and rest[t].token_id == 0:
            as_reported[t] = 0
    return _parse_logprobs(_LOGPROBS, rest, as_reported, of="sequence")


def _parse_logprobs(field: str, entries: list[TokenLogprob], token_ids: TokenIds, *, of: str) -> Logprobs:
    """Return the log-probs in SGLang's list of items, as float32 [T].

    Args:
        field: the name of the answer's field that holds the list.
        entries: the list, with one item for each token.
        token_ids: int32 [T], the expected tokens.
        of: the noun that error messages use for the tokens, such as `"output"`.

    Raises:
        WireError: an item of `entries` has no log-prob, or a token id that differs from `token_ids`.
    """
    if len(entries) != len(token_ids):
        raise WireError(field, f"got {len(entries)} entries for {len(token_ids)} {of}_ids")
    with np.errstate(over="ignore"):
        logprobs = np.array(list(map(_logprob_of, entries)), np.float64).astype(np.float32)
    ids = np.array(list(map(_token_id_of, entries)))
    if np.isnan(logprobs).any():
        raise WireError(field, f"no log-prob at position {int(np.isnan(logprobs).argmax())}")
    if len(wrong := np.flatnonzero(ids != token_ids)):
        t = int(wrong[0])
        raise WireError(field, f"got token {ids[t]} at position {t}, expected {token_ids[t]}, as in the {of}")
    return logprobs


def _weight_version(meta_info: _MetaInfo) -> str | None:
    """Return the field `weight_version` as text, or None if the answer has no weight version."""
    # A Python program may pass an integer to SGLang's class `ServerArgs`, as the argument `weight_version`,
    # and the class does not convert this integer to text.
    version = meta_info.get("weight_version")
    return None if version is None else str(version)
