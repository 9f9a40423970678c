"""Protocol of the sidecar's `/rollouts` and `/scores`: write the request for one prompt, and read the answer.

Request to `/rollouts`::

    {"prompts": [...], "sampling_params": {...}, "top_logprobs_p": p | null, "top_logprobs_source": "sampler",
     "on_abort": "return", "resumed_tokens": [k], "return_fields": ["routed_experts"], "fields_start": [0],
     "request_id": "...", "timeout_s": seconds | null,
     "stream": true}

The number `k` counts the tokens at the prompt's end that an earlier request generated. Request to `/scores`::

    {"sequences": [...], "start": [1], "top_logprobs_p": p | null, "request_id": "...",
     "timeout_s": seconds | null, "stream": true}

The sidecar sends one message as each sample or score finishes, and a final message after the last one. A
truncated answer has no final message. The message `{"error": {...}}` reports a failure. Answer::

    {"prompt_index": 0, "sample_index": 2, ...}
    {"done": true, "rollouts": 8}

The client's `Accept` header asks for messages that begin with their length (`transport/http.py`). A sidecar
that supports them encodes each result in binary form (`wire/records.py`), and the final message or an error
message as JSON. Any other sidecar sends every message as a line of JSON.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sglang_topp.engine_contract import RESUMED
from sglang_topp.errors import MissingCandidateSetsError, RolloutError, WireError, describe
from sglang_topp_client.requests import SampleRequest, ScoreRequest, check_source
from sglang_topp_client.rollout import ABORT, SAMPLER, Rollout, Score
from sglang_topp_client.value_checks import decode_json, fresh_id
from sglang_topp_client.wire.error_json import error_from_json
from sglang_topp_client.wire.frame import is_frame
from sglang_topp_client.wire.records import MEDIA_TYPES, from_frame, from_record

SERVICE = "sglang-topp"
"""The value of the field `"service"` in a sidecar's `GET /info`. An engine has no route `/info`."""


class SidecarExchange:
    """One `POST /rollouts` or `/scores`: the request body, and the results received so far.

    Args:
        wanted: the prompt with the indices of the samples to generate, or the sequence to score.
        request_id: the caller's name for the request. The client appends a random suffix to it.
        timeout_s: the time limit that the sidecar enforces, or None for no time limit.
        max_bytes: the maximum size of a sample after decompression, in bytes.

    Attributes:
        path: the route. The final message has a field with the route's name, such as `rollouts`, which counts
            the results that the sidecar sent.
        headers: what the request has beside the client's own headers.
        open_ids: this request's id, for the sidecar's route `/abort`.
        has_begun: whether a sample has arrived.
        complete: whether the final message has arrived.
    """

    def __init__(
        self, wanted: SampleRequest, *, request_id: str, timeout_s: float | None = None, max_bytes: int
    ) -> None:
        self._result: Any = Score if isinstance(wanted, ScoreRequest) else Rollout
        self.path = "/scores" if isinstance(wanted, ScoreRequest) else "/rollouts"
        self.headers = {"Accept": f"{MEDIA_TYPES[self._result]}, application/x-ndjson;q=0.5"}
        self._max_bytes = max_bytes
        self._wanted = wanted
        self._request_id = fresh_id(request_id)
        self.open_ids = {0: self._request_id}
        self._timeout_s = timeout_s
        self._finished: set[int] = set()
        self.has_begun = self.complete = False

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the request."""
        wanted = self._wanted
        body: dict[str, Any] = {
            "top_logprobs_p": wanted.top_logprobs_p,
            "request_id": self._request_id,
            "timeout_s": self._timeout_s,
            "stream": True,
        }
        if isinstance(wanted, ScoreRequest):
            return body | {"sequences": [wanted.prompt], "start": [wanted.start]}
        body["prompts"] = [wanted.prompt]
        body["sampling_params"] = {**wanted.sampling_params, "n": len(wanted.samples)}
        if wanted.top_logprobs_source == SAMPLER:
            body["top_logprobs_source"] = SAMPLER
        if wanted.return_fields:
            body |= {"return_fields": [*wanted.return_fields], "fields_start": [wanted.fields_start]}
        if wanted.is_interruptible:
            body["on_abort"] = "return"
        if wanted.resumed_tokens:
            body[RESUMED] = [wanted.resumed_tokens]
        return body

    def read(self, line: bytes) -> list[tuple[int, Rollout | Score]]:
        """Parse one message of the sidecar's answer.

        Return a list with the sample index and the result that the message holds, or an empty list for an
        empty line or the final message.

        Raises:
            WireError: the message is not in the sidecar's format, or the sample is inconsistent or does not
                match the request.
            SglangToppError: the message contains an error from the sidecar.
        """
        if not line:
            return []
        p = self._wanted.top_logprobs_p
        if is_frame(line):
            return [self._place(from_frame(self._result, line, max_bytes=self._max_bytes, p=p))]
        record = decode_json(line, dict[str, Any], field="stream")
        if "error" in record:
            raise error_from_json(record["error"])
        if not record.get("done"):
            return [self._place(from_record(self._result, record, p=p))]
        num_expected, name = len(self._wanted.samples), self.path.removeprefix("/")
        if record.get(name) != len(self._finished) or len(self._finished) != num_expected:
            raise WireError(
                name,
                f"the server counts {describe(record.get(name))}, got {len(self._finished)}, expected"
                f" {num_expected}",
            )
        self.complete = True
        return []

    def _place(self, result: Rollout | Score) -> tuple[int, Rollout | Score]:
        """Check a result, and return its sample index and the result, as the caller counts them."""
        wanted = self._wanted
        if isinstance(result, Score):
            noun, index, at, ids = "sequence", result.sequence_index, 0, result.token_ids
        else:
            noun, index, at, ids = "prompt", result.prompt_index, result.sample_index, result.prompt_ids
        if index:
            raise WireError(f"{noun}_index", f"got {index}, expected 0, the only {noun}")
        if at >= len(wanted.samples) or wanted.samples[at] in self._finished:
            raise WireError(
                "sample_index", f"got {at}, expected an unfinished one of {len(wanted.samples)} samples"
            )
        if isinstance(wanted.prompt, list) and ids.tolist() != wanted.prompt:
            raise WireError(
                "token_ids" if noun == "sequence" else "prompt_ids", f"got other ids than those of the {noun}"
            )
        if wanted.top_logprobs_source is not None and result.candidates is None:
            raise MissingCandidateSetsError(
                "candidates", "the response holds none, though they were asked for"
            )
        sample = wanted.samples[at]
        if isinstance(result, Score):
            assert isinstance(wanted, ScoreRequest)
            if result.start != wanted.start:
                raise WireError("start", f"got {result.start}, expected {wanted.start}")
            candidates = None if wanted.top_logprobs_p is None else result.candidates
            self._finished.add(sample)
            return sample, replace(result, sequence_index=wanted.prompt_index, candidates=candidates)
        is_partial = wanted.is_interruptible and result.finish_reason == ABORT
        if result.finish_reason not in ("stop", "length") and not is_partial:
            raise RolloutError(f"a sample finished with {describe(result.finish_reason)}")
        if wanted.top_logprobs_source is not None:
            check_source(wanted, result.top_logprobs_source)
        if set(result.token_fields) != set(wanted.return_fields):
            got = [*result.token_fields]
            raise WireError("token_fields", f"got {got}, expected {[*wanted.return_fields]}, as requested")
        self.has_begun = True
        self._finished.add(sample)
        return sample, replace(result, prompt_index=wanted.prompt_index, sample_index=sample)
