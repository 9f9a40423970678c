"""The sidecar's `/rollouts`: the request for some prompts, and its answer, message by message.

Request::

    {"prompts": [...], "sampling_params": {...} | [{...}, ...], "top_logprobs_p": p | [p, ...] | null,
     "top_logprobs_source": "sampler", "on_abort": "return", "resumed_tokens": k | [k, ...],
     "request_id": "...", "timeout_s": seconds | null, "stream": true}

Answer, a message per sample as it finishes, and last one that a cut-off answer lacks::

    {"prompt_index": 0, "sample_index": 2, ...}
    {"done": true, "rollouts": 8}

A failure is a message `{"error": {...}}`; nothing after it counts.

Messages are lines of JSON (`record.py`), or, where the server knows the media type that `Accept` names first,
frames (`messages.py`), in which a sample is packed (`packed_record.py`) and all else is the same JSON.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

from sglang_topp.errors import MissingCandidateSetsError, RolloutError, WireError
from sglang_topp.resumable import RESUMED
from sglang_topp_client.checks import fresh_id, shown
from sglang_topp_client.packed_record import MAGIC, MEDIA_TYPE, from_packed
from sglang_topp_client.record import check_kept_mass, error_from_record, from_record
from sglang_topp_client.request import SAMPLER, SampleRequest, check_source
from sglang_topp_client.rollout import ABORT, Rollout

__all__ = ["SERVICE", "RolloutsExchange", "SidecarExchange"]

_Result = TypeVar("_Result")

SERVICE = "sglang-topp"
"""What the sidecar's `GET /info` has under `"service"`; it tells the sidecar from an engine."""


class SidecarExchange(ABC, Generic[_Result]):
    """One POST to a route of the sidecar's: what is sent for some prompts, and what has come back so far, a
    `_Result` of each sample.

    Attributes:
        path: the route; its name is what the line that closes an answer counts.
        media_type: of frames.
        magic: what a packed record begins with.
        missing_route: what it means that there is no such route.
    """

    path: str
    media_type: str
    magic: bytes
    missing_route = ""
    samples_per_call = 128
    """A call takes prompts until it holds this many samples: the body stays at a few MB, a cut
    connection costs no more than these, and a large batch spreads over the sidecars of one address."""

    def __init__(
        self,
        wanted: Sequence[SampleRequest],
        *,
        request_id: str,
        timeout_s: float | None = None,
        logprob_bits: int = 32,
    ) -> None:
        """One call.

        Args:
            wanted: the prompts, and which of their samples.
            request_id: the caller's name for the request; a fresh random part is added.
            timeout_s: the time that the server may take.
            logprob_bits: 16 where the candidates' log-probs may come rounded; else 32.
        """
        rounding = ";logprob-bits=16" if logprob_bits == 16 else ""
        self.accept = f"{self.media_type}{rounding}, application/x-ndjson;q=0.5"
        self._logprob_bits = logprob_bits
        self._wanted = list(wanted)
        self._request_id = fresh_id(request_id)
        self._timeout_s = timeout_s
        self._finished: set[tuple[int, int]] = set()
        self.complete = False

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """The JSON body."""

    @abstractmethod
    def _unpacked(self, frame: bytes) -> _Result:
        """What a packed record holds, under the caller's own indices; it is checked and noted as finished."""

    @abstractmethod
    def _decoded(self, record: dict[str, Any]) -> _Result:
        """The same of a record in JSON."""

    def open_ids(self) -> list[str]:
        """By which name the sidecar can stop it now."""
        return [self._request_id]

    def unfinished_ids(self) -> list[str]:
        """None to abort by name: the sidecar aborts whatever a closed connection leaves behind."""
        return []

    def read(self, line: bytes) -> list[_Result]:
        """Take one message of the answer; returns the sample that it is.

        Raises:
            WireError: the message is not what the sidecar writes, or the sample is not exact.
            SglangToppError: what the line reports.
        """
        if not line:
            return []
        if line.startswith(self.magic):
            return [self._unpacked(line)]
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WireError("stream", f"got {line[:200]!r}: {error}") from None
        if not isinstance(record, dict):
            raise WireError("stream", f"got {type(record).__name__}, expected an object")
        if "error" in record:
            raise error_from_record(record["error"])
        if record.get("done"):
            expected = sum(len(one.samples) for one in self._wanted)
            name = self.path.removeprefix("/")
            counted = record.get(name)
            if counted != len(self._finished) or len(self._finished) != expected:
                raise WireError(
                    name,
                    f"the server counts {shown(counted)}, {len(self._finished)} came, {expected} were asked"
                    " for",
                )
            self.complete = True
            return []
        return [self._decoded(record)]


class RolloutsExchange(SidecarExchange[Rollout]):
    """One `POST /rollouts`."""

    path = "/rollouts"
    media_type = MEDIA_TYPE
    magic = MAGIC

    def body(self) -> dict[str, Any]:
        """The JSON body."""
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
        if SAMPLER in sources:  # which sidecars of 0.1.0 do not know
            body["top_logprobs_source"] = SAMPLER if set(sources) == {SAMPLER} else sources
        # Nor do those know these, which are sent where they are needed.
        if any(one.is_interruptible for one in self._wanted):
            body["on_abort"] = "return"
        resumed = [one.resumed_tokens for one in self._wanted]
        if any(resumed):
            body[RESUMED] = resumed
        return body

    def _unpacked(self, frame: bytes) -> Rollout:
        return self._place(from_packed(frame, logprob_bits=self._logprob_bits))

    def _decoded(self, record: dict[str, Any]) -> Rollout:
        return self._place(from_record(record))

    def _place(self, rollout: Rollout) -> Rollout:
        """The sample under the caller's own indices."""
        at = (rollout.prompt_index, rollout.sample_index)
        if rollout.prompt_index >= len(self._wanted):
            raise WireError("prompt_index", f"got {at[0]}, expected one of {len(self._wanted)} prompts")
        wanted = self._wanted[rollout.prompt_index]
        if rollout.sample_index >= len(wanted.samples) or at in self._finished:
            raise WireError("sample_index", f"got {at[1]} of prompt {at[0]} twice, or beyond the samples")
        is_partial = wanted.is_interruptible and rollout.finish_reason == ABORT
        if rollout.finish_reason not in ("stop", "length") and not is_partial:
            raise RolloutError(f"a sample finished with {shown(rollout.finish_reason)}")
        if wanted.top_logprobs_source is not None:
            if rollout.candidates is None:
                raise MissingCandidateSetsError(
                    "candidates", "the response holds none, though they were asked for"
                )
            check_source(wanted, rollout.top_logprobs_source)
            if wanted.top_logprobs_p is not None:
                check_kept_mass(rollout.candidates, wanted.top_logprobs_p, field="candidates")
        if not isinstance(wanted.prompt, str) and rollout.prompt_ids.tolist() != wanted.prompt:
            raise WireError("prompt_ids", f"are not those of prompt {at[0]}")
        self._finished.add(at)
        return replace(
            rollout, prompt_index=wanted.prompt_index, sample_index=wanted.samples[rollout.sample_index]
        )
