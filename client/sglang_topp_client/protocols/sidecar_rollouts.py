"""Protocol of the sidecar's `POST /rollouts`: write the request for several prompts, and read the answer.

Request::

    {"prompts": [...], "sampling_params": {...} | [{...}, ...], "top_logprobs_p": p | [p, ...] | null,
     "top_logprobs_source": "sampler" | ["sampler", ...], "on_abort": "return",
     "resumed_tokens": k | [k, ...], "request_id": "...", "timeout_s": seconds | null, "stream": true}

The number `k` counts the tokens at a prompt's end that an earlier request generated.

The sidecar sends one message as each sample finishes, and a final message after the last sample. A truncated
answer has no final message. Answer::

    {"prompt_index": 0, "sample_index": 2, ...}
    {"done": true, "rollouts": 8}

The message `{"error": {...}}` reports a failure. The client ignores all messages after an error message.

The client's `Accept` header asks for messages that begin with their length (`framing.py`). A sidecar that
supports them encodes each sample in binary form (`rollout_binary.py`), and the final message or an error
message as JSON. Any other sidecar sends every message as a line of JSON (`rollout_json.py`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from sglang_topp.engine_contract.resumable_sampling_params import RESUMED
from sglang_topp.errors import MissingCandidateSetsError, RolloutError, WireError, describe
from sglang_topp_client.argument_checks import fresh_id
from sglang_topp_client.codecs.answer_consistency import check_kept_mass
from sglang_topp_client.codecs.binary_frame import is_frame
from sglang_topp_client.codecs.error_json import error_from_json
from sglang_topp_client.codecs.rollout_binary import MEDIA_TYPE, rollout_from_bytes
from sglang_topp_client.codecs.rollout_json import rollout_from_json
from sglang_topp_client.requests.plan_generate import SampleRequest, check_source
from sglang_topp_client.types.rollout import ABORT, SAMPLER, Rollout

__all__ = ["SERVICE", "RolloutsExchange", "SidecarExchange"]

_Result = TypeVar("_Result")

SERVICE = "sglang-topp"
"""The value of the field `"service"` in a sidecar's `GET /info`. An engine has no route `/info`."""


class SidecarExchange(ABC, Generic[_Result]):
    """One POST to a route of the sidecar: the request body, and the results received so far.

    A subclass decodes each sample or score into a result, such as a `Rollout`.

    Attributes:
        path: the route, such as `"/rollouts"`. The final message has a field with the route's name, such as
            `rollouts`. The value of this field is the number of results that the sidecar sent.
        media_type: the media type of an answer whose messages begin with their length.
        missing_route: the error message if the sidecar does not have the route `path`.
    """

    path: str
    media_type: str
    missing_route = ""
    samples_per_call = 128
    """The number of samples at which the dispatcher stops adding prompts to one HTTP call.

    This limit keeps a request body below a few MB, and makes the dispatcher spread a large batch over several
    sidecars. If a connection breaks, only the unfinished samples of one HTTP call are lost.
    """

    def __init__(
        self,
        wanted: Sequence[SampleRequest],
        *,
        request_id: str,
        timeout_s: float | None = None,
        max_bytes: int,
    ) -> None:
        """Prepare one call.

        Args:
            wanted: the prompts, each with the indices of the samples to generate.
            request_id: the caller's name for the request. The client appends a random suffix to `request_id`
                before it sends the request.
            timeout_s: the time limit that the sidecar enforces, or None for no time limit.
            max_bytes: the maximum size of a sample after decompression, in bytes.
        """
        self.accept = f"{self.media_type}, application/x-ndjson;q=0.5"
        self._max_bytes = max_bytes
        self._wanted = list(wanted)
        self._request_id = fresh_id(request_id)
        self._timeout_s = timeout_s
        self._finished: set[tuple[int, int]] = set()
        self.complete = False

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the JSON body of the request."""

    @abstractmethod
    def _from_bytes(self, raw: bytes) -> _Result:
        """Decode and check a binary record, and mark the record's sample as finished.

        Return the result. The result's indices refer to the caller's whole request, even if this POST carries
        only a part of the caller's request.
        """

    @abstractmethod
    def _from_json(self, record: dict[str, Any]) -> _Result:
        """Decode and check a JSON record, and mark the record's sample as finished.

        Return the result. The result's indices refer to the caller's whole request, even if this POST carries
        only a part of the caller's request.
        """

    def open_ids(self) -> list[str]:
        """Return a list of one id: this request's id, for the sidecar's route `/abort`."""
        return [self._request_id]

    def unfinished_ids(self) -> list[str]:
        """Return an empty list, because the client need not abort unfinished samples.

        The sidecar itself aborts a request when the connection of the request closes.
        """
        return []

    def read(self, line: bytes) -> list[_Result]:
        """Parse one message of the sidecar's answer.

        If the message holds a sample or a score, return a list with this one result. For an empty line or the
        final message, return an empty list.

        Raises:
            WireError: the message is not in the sidecar's format, or the sample is inconsistent or does not
                match the request.
            SglangToppError: the message contains an error from the sidecar.
        """
        if not line:
            return []
        if is_frame(line):
            return [self._from_bytes(line)]
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WireError("stream", f"got {line[:200]!r}: {error}") from None
        if not isinstance(record, dict):
            raise WireError("stream", f"got {type(record).__name__}, expected an object")
        if "error" in record:
            raise error_from_json(record["error"])
        if record.get("done"):
            expected = sum(len(one.samples) for one in self._wanted)
            name = self.path.removeprefix("/")
            counted = record.get(name)
            if counted != len(self._finished) or len(self._finished) != expected:
                raise WireError(
                    name,
                    f"the server counts {describe(counted)}, got {len(self._finished)}, expected {expected}",
                )
            self.complete = True
            return []
        return [self._from_json(record)]


class RolloutsExchange(SidecarExchange[Rollout]):
    """One `POST /rollouts` request and its answer."""

    path = "/rollouts"
    media_type = MEDIA_TYPE

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the request."""
        params = [{**one.sampling_params, "n": len(one.samples)} for one in self._wanted]
        thresholds = [one.top_logprobs_p for one in self._wanted]
        sources = [one.top_logprobs_source for one in self._wanted]
        body: dict[str, Any] = {
            "prompts": [one.prompt for one in self._wanted],
            "sampling_params": params[0] if all(p == params[0] for p in params) else params,
            "top_logprobs_p": thresholds[0] if len(set(thresholds)) == 1 else thresholds,
            "request_id": self._request_id,
            "timeout_s": self._timeout_s,
            "stream": True,
        }
        # A sidecar of an older version may not know `top_logprobs_source`, `on_abort`, or `resumed_tokens`.
        # The body therefore contains each of these fields only if a prompt needs the field.
        if SAMPLER in sources:
            body["top_logprobs_source"] = SAMPLER if set(sources) == {SAMPLER} else sources
        if any(one.is_interruptible for one in self._wanted):
            body["on_abort"] = "return"
        resumed = [one.resumed_tokens for one in self._wanted]
        if any(resumed):
            body[RESUMED] = resumed
        return body

    def _from_bytes(self, raw: bytes) -> Rollout:
        return self._place(rollout_from_bytes(raw, max_bytes=self._max_bytes))

    def _from_json(self, record: dict[str, Any]) -> Rollout:
        return self._place(rollout_from_json(record))

    def _place(self, rollout: Rollout) -> Rollout:
        """Check a sample, and replace its indices within this POST by its indices in the caller's request."""
        at = (rollout.prompt_index, rollout.sample_index)
        if rollout.prompt_index >= len(self._wanted):
            raise WireError("prompt_index", f"got {at[0]}, expected one of {len(self._wanted)} prompts")
        wanted = self._wanted[rollout.prompt_index]
        if rollout.sample_index >= len(wanted.samples) or at in self._finished:
            raise WireError(
                "sample_index",
                f"got {at[1]} of prompt {at[0]}, expected an unfinished one of {len(wanted.samples)} samples",
            )
        is_partial = wanted.is_interruptible and rollout.finish_reason == ABORT
        if rollout.finish_reason not in ("stop", "length") and not is_partial:
            raise RolloutError(f"a sample finished with {describe(rollout.finish_reason)}")
        if wanted.top_logprobs_source is not None:
            if rollout.candidates is None:
                raise MissingCandidateSetsError(
                    "candidates", "the response holds none, though they were asked for"
                )
            check_source(wanted, rollout.top_logprobs_source)
            if wanted.top_logprobs_p is not None:
                check_kept_mass(rollout.candidates, wanted.top_logprobs_p, field="candidates")
        if isinstance(wanted.prompt, list) and rollout.prompt_ids.tolist() != wanted.prompt:
            raise WireError("prompt_ids", f"got other ids than those of prompt {at[0]}")
        self._finished.add(at)
        return replace(
            rollout, prompt_index=wanted.prompt_index, sample_index=wanted.samples[rollout.sample_index]
        )
