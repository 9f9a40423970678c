"""A patched SGLang's `/generate`: the request for one prompt, and its streamed answer.

Always streamed, with a stream interval that no generation reaches, so that SGLang sends two chunks a
sample, its first token and the whole. Compared with an unstreamed request:

- a closed connection cancels the handler at once, which aborts every sample, those still queued
  included. Unstreamed, SGLang looks for it every 4 s;
- the first chunk tells the engine's id of each sample. With `n > 1` SGLang gives the samples random
  ids, whatever `rid` the request has, and `/abort_request` knows those alone;
- with `n > 1` a sample arrives when it is finished, not when the slowest one is.

`n` is not unrolled into single requests: SGLang computes the prompt once and shares it through the
prefix cache, where simultaneous single requests would each compute it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import (
    BadRequestError,
    OverloadedError,
    ResponseError,
    RolloutError,
    ServerError,
    WireError,
)
from sglang_topp.resumable import RESUMED
from sglang_topp_client.checks import MAX_BODY_CHARS, MAX_MESSAGE_CHARS, fresh_id, shown
from sglang_topp_client.record import check_kept_mass, check_seconds, check_sets
from sglang_topp_client.request import DISTRIBUTION, SAMPLER, SampleRequest, check_source
from sglang_topp_client.resuming import nothing_generated
from sglang_topp_client.rollout import ABORT, Rollout
from sglang_topp_client.sglang_fields import (
    field_of,
    text_of,
    token_ids_of,
    token_logprobs,
    weight_version_of,
)
from sglang_topp_client.versions import spans_from_json

__all__ = ["GenerateExchange", "StreamedExchange"]

_STREAM_INTERVAL = 1 << 30
_FINISHED = ("stop", "length")
_Result = TypeVar("_Result")


class StreamedExchange(ABC, Generic[_Result]):
    """One `POST /generate`: what is sent for one prompt, and what has come back so far, a `_Result` of each
    sample."""

    path = "/generate"
    accept = None
    samples_per_call = 1
    """A call takes prompts until it holds this many samples: here one prompt, with all of its own."""
    missing_route = ""

    def __init__(
        self, wanted: Sequence[SampleRequest], *, request_id: str, timeout_s: float | None = None
    ) -> None:
        """Args as for every exchange; SGLang has no time limit per request, so `timeout_s` stays here.

        The engine's id ends in a fresh random part of fixed length. SGLang rejects an id that is in
        use, and its scheduler aborts by prefix: `a-1` would take `a-10` down with it.
        """
        (self._wanted,) = wanted
        self._rid = fresh_id(request_id)
        self._chunks: dict[int, list[Mapping[str, Any]]] = {}
        self._engine_ids: dict[int, str] = {}
        if len(self._wanted.samples) == 1:
            self._engine_ids[0] = self._rid
        self._finished: set[int] = set()
        self.complete = False

    def body(self) -> dict[str, Any]:
        """The JSON body."""
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
        if wanted.top_logprobs_source == SAMPLER:
            body |= {"top_logprobs_source": SAMPLER, "return_logprobs_in_base64": True}
        elif wanted.top_logprobs_source is not None:
            body |= {"top_logprobs_p": wanted.top_logprobs_p, "return_logprobs_in_base64": True}
        if wanted.resumed_tokens is not None:
            body[RESUMED] = wanted.resumed_tokens
        return body

    def open_ids(self) -> list[str]:
        """By which of the engine's ids it can be stopped now."""
        return self.unfinished_ids()

    def unfinished_ids(self) -> list[str]:
        """The engine's ids of the samples that may still be running, as far as they are known."""
        return list(self._engine_ids.values())

    def read(self, line: bytes) -> list[_Result]:
        """Take one line of the answer; returns the sample that it finishes, if it does.

        Raises:
            WireError: the line is not what SGLang writes, or the sample is not exact.
            RolloutError: the engine gave up on a sample, and it was not asked for as one that may be
                interrupted.
            ResponseError: the line reports an error.
        """
        if not line or line.startswith(b":"):
            # The end of an event, or a comment: gateways send those to keep a connection alive.
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
        try:
            # Decoded here, without a copy of the bytes: a line may be hundreds of MB.
            chunk = json.loads(str(memoryview(line)[start:], "utf-8"))
        except (ValueError, RecursionError) as error:
            raise WireError("stream", f"got {line[:200]!r}: {error}") from None
        if not isinstance(chunk, dict):
            raise WireError("stream", f"got {type(chunk).__name__}, expected an object")
        if "error" in chunk:
            raise _reported_error(chunk["error"])
        return self._take(chunk)

    def _take(self, chunk: dict[str, Any]) -> list[_Result]:
        index = field_of(chunk, "index", int) if "index" in chunk else 0
        if index not in range(len(self._wanted.samples)) or index in self._finished:
            raise WireError(
                "index", f"got {shown(index)}, beyond {len(self._wanted.samples)} samples or a second time"
            )
        meta_info = field_of(chunk, "meta_info", dict)
        # SGLang aborts by prefix: an empty id would be everybody's.
        if not (engine_id := text_of(meta_info, "id")):
            raise WireError("id", "got an empty string, expected the request's id")
        self._engine_ids[index] = engine_id
        reason = meta_info.get("finish_reason")
        if reason is not None and not (self._wanted.is_interruptible and _is_order(reason)):
            _check_finish(reason)
        _check_resumed(self._wanted, meta_info)
        # A server with --incremental-streaming-output sends only what is new.
        is_whole = meta_info.get("completion_tokens") == len(field_of(chunk, "output_ids", list))
        earlier = [] if is_whole else self._chunks.get(index, [])
        self._chunks[index] = [*earlier, chunk]
        if reason is None:
            return []
        self._finished.add(index)
        del self._engine_ids[index]
        return [self._result(index, self._chunks.pop(index))]

    @abstractmethod
    def _result(self, index: int, chunks: list[Mapping[str, Any]]) -> _Result:
        """What these chunks, of a finished sample, say."""

    def _prompt_ids(self, last: Mapping[str, Any]) -> NDArray[np.int32]:
        """The prompt as the engine saw it; `last` is the last chunk of a sample."""
        if isinstance(self._wanted.prompt, str):
            prompt_ids = _text_prompt_ids(last)
        else:
            prompt_ids = np.array(self._wanted.prompt, np.int32)
        if (count := field_of(last["meta_info"], "prompt_tokens", int)) != len(prompt_ids):
            raise WireError(
                "prompt_tokens",
                f"got {shown(count)} for a prompt of {len(prompt_ids)} tokens; the engine saw another prompt"
                " (is it started with --allow-auto-truncate?)",
            )
        return prompt_ids


class GenerateExchange(StreamedExchange[Rollout]):
    """One `POST /generate` that generates."""

    def _result(self, index: int, chunks: list[Mapping[str, Any]]) -> Rollout:
        wanted, last = self._wanted, chunks[-1]
        meta_info = last["meta_info"]
        if meta_info["finish_reason"]["type"] == ABORT and meta_info.get("completion_tokens") == 0:
            return _waiting(wanted, wanted.samples[index], last)
        parts = [token_ids_of("output_ids", chunk["output_ids"]) for chunk in chunks]
        output_ids = np.concatenate(parts)
        if (count := field_of(meta_info, "completion_tokens", int)) != len(output_ids):
            raise WireError("output_ids", f"got {len(output_ids)} ids, completion_tokens is {shown(count)}")

        entries = [e for chunk in chunks for e in field_of(chunk["meta_info"], "output_token_logprobs", list)]
        # For `max_new_tokens` 0, SGLang may report the log-prob of a token that is not part of the sample.
        logprobs = token_logprobs("output_token_logprobs", entries if count else [], output_ids, of="output")
        candidates = weight_spans = None
        if wanted.top_logprobs_source is not None:
            candidates = CandidateSets.concat(
                [
                    CandidateSets.from_meta_info(chunk["meta_info"], ids)
                    for chunk, ids in zip(chunks, parts, strict=True)
                ]
            )
            check_sets(candidates, output_ids, logprobs, field="output_top_p_logprobs")
            check_source(wanted, meta_info.get("top_logprobs_source", DISTRIBUTION))
            if wanted.top_logprobs_p is not None:
                check_kept_mass(candidates, wanted.top_logprobs_p, field="output_top_p_logprobs")
            # Without sets it is SGLang's own account, which can be a token off.
            weight_spans = spans_from_json(meta_info.get("weight_versions"), len(output_ids))

        return Rollout(
            prompt_index=wanted.prompt_index,
            sample_index=wanted.samples[index],
            request_id=meta_info["id"],
            prompt_ids=self._prompt_ids(last),
            output_ids=output_ids,
            text="".join("" if chunk.get("text") is None else text_of(chunk, "text") for chunk in chunks),
            logprobs=logprobs,
            candidates=candidates,
            finish_reason=meta_info["finish_reason"]["type"],
            weight_version=weight_version_of(meta_info),
            cached_tokens=field_of(meta_info, "cached_tokens", int),
            # The difference of two readings of a clock that may have been set back between them.
            latency_s=check_seconds("e2e_latency", max(field_of(meta_info, "e2e_latency", (int, float)), 0)),
            top_logprobs_source=wanted.top_logprobs_source,
            weight_spans=weight_spans,
        )


def _is_order(reason: Any) -> bool:
    """Whether a sample was aborted because somebody said so; a refusal has a status."""
    return isinstance(reason, dict) and reason.get("type") == ABORT and reason.get("status_code") is None


def _check_resumed(wanted: SampleRequest, meta_info: Mapping[str, Any]) -> None:
    if (heard := meta_info.get(RESUMED)) != wanted.resumed_tokens:
        raise WireError(
            RESUMED,
            f"got {shown(heard)}, and {wanted.resumed_tokens} was asked for: the engine, or what stands"
            " before it, does not resume answers; is it patched, with this version of sglang-topp?",
        )


def _text_prompt_ids(chunk: Mapping[str, Any]) -> NDArray[np.int32]:
    name = "prompt_token_ids"
    if name not in chunk:
        raise WireError(
            name,
            "got nothing for a prompt of text: SGLang before 0.5.13 does not tell its ids; give token ids",
        )
    return token_ids_of(name, field_of(chunk, name, list))


def _waiting(wanted: SampleRequest, sample: int, chunk: Mapping[str, Any]) -> Rollout:
    """A sample that was aborted while it waited for its first token: SGLang tells little of it."""
    if chunk["output_ids"]:
        raise WireError("output_ids", f"got {len(chunk['output_ids'])} ids, completion_tokens is 0")
    if isinstance(wanted.prompt, str):
        wanted = replace(wanted, prompt=_text_prompt_ids(chunk).tolist())
    rollout = nothing_generated(wanted, sample, chunk["meta_info"]["id"])
    assert rollout is not None
    return replace(rollout, weight_version=weight_version_of(chunk["meta_info"]))


def _check_finish(reason: Any) -> None:
    """Raise unless the sample finished by itself."""
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind in _FINISHED:
        return
    if kind is None:
        raise WireError("finish_reason", f"got {shown(reason)}, expected an object with a type")
    words = shown(reason.get("message"), MAX_MESSAGE_CHARS)
    message = f"the engine gave up on a sample: {shown(kind)}, {words}"
    # An abort with an HTTP status is a refusal (a full queue, a prompt that is too long): unstreamed,
    # SGLang answers it with that status.
    raise _engine_error(message, reason.get("status_code"), RolloutError, reason)


def _reported_error(error: Any) -> ResponseError:
    fields = error if isinstance(error, dict) else {"message": error}
    message = f"the engine reports an error: {shown(fields.get('message'), MAX_MESSAGE_CHARS)}"
    return _engine_error(message, fields.get("code"), ServerError, error)


def _engine_error(message: str, status: Any, otherwise: type[ResponseError], body: Any) -> ResponseError:
    """The error that an answer with this HTTP status would be; `otherwise` where the engine names none."""
    kind = otherwise
    if status == 429:
        kind = OverloadedError
    elif isinstance(status, int) and 400 <= status < 600:
        kind = BadRequestError if status < 500 else ServerError
    else:
        status = None
    return kind(message, status=status, body=shown(body, MAX_BODY_CHARS))
