"""Protocol of the sidecar's `POST /scores`: write a request with several sequences, and read the answer.

Request::

    {"sequences": [...], "start": [1, ...], "top_logprobs_p": p | [p, ...] | null, "request_id": "...",
     "timeout_s": seconds | null, "stream": true}

The sidecar sends each sequence's message as soon as the sequence is scored, and a final message after the
last score. A truncated answer has no final message. Answer::

    {"sequence_index": 0, ...}
    {"done": true, "scores": 8}

As in the answer to `/rollouts` (`sidecar_rollouts.py`), the messages are either lines or begin with their
length, and the message `{"error": {...}}` reports a failure. `score_codecs.py` encodes and decodes the
message of a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang_topp.errors import MissingCandidateSetsError, WireError
from sglang_topp_client.codecs.answer_consistency import check_kept_mass
from sglang_topp_client.codecs.score_codecs import MEDIA_TYPE, score_from_bytes, score_from_json
from sglang_topp_client.protocols.sidecar_rollouts import SidecarExchange
from sglang_topp_client.requests.plan_score import ScoreRequest
from sglang_topp_client.types.score import Score

__all__ = ["ScoresExchange"]


class ScoresExchange(SidecarExchange[Score]):
    """One `POST /scores` request and its answer."""

    path = "/scores"
    media_type = MEDIA_TYPE
    missing_route = (
        "this sidecar has no /scores, because its version of sglang-topp is too old to score; install the"
        " client's version there, or use its engine directly (kind='sglang')"
    )
    samples_per_call = 16
    """The maximum number of sequences in one HTTP call.

    A call holds few sequences, because a sequence may be as long as the engine's context.
    """

    def __init__(
        self,
        wanted: Sequence[ScoreRequest],
        *,
        request_id: str,
        timeout_s: float | None = None,
        max_bytes: int,
    ) -> None:
        """See `SidecarExchange`."""
        super().__init__(wanted, request_id=request_id, timeout_s=timeout_s, max_bytes=max_bytes)
        self._sequences = list(wanted)

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the request."""
        thresholds = [one.top_logprobs_p for one in self._sequences]
        return {
            "sequences": [one.prompt for one in self._sequences],
            "start": [one.start for one in self._sequences],
            "top_logprobs_p": thresholds[0] if len(set(thresholds)) == 1 else thresholds,
            "request_id": self._request_id,
            "timeout_s": self._timeout_s,
            "stream": True,
        }

    def _from_bytes(self, raw: bytes) -> Score:
        return self._place(score_from_bytes(raw, max_bytes=self._max_bytes))

    def _from_json(self, record: dict[str, Any]) -> Score:
        return self._place(score_from_json(record))

    def _place(self, score: Score) -> Score:
        """Check a score, and set its `sequence_index` to the sequence's index in the caller's request.

        In the sidecar's answer, `sequence_index` is the sequence's position in one POST. A POST may hold only
        some of the caller's sequences.
        """
        at = score.sequence_index
        if at >= len(self._sequences) or (at, 0) in self._finished:
            raise WireError(
                "sequence_index", f"got {at}, expected an unfinished one of {len(self._sequences)} sequences"
            )
        wanted = self._sequences[at]
        if score.start != wanted.start:
            raise WireError("start", f"got {score.start} of sequence {at}, expected {wanted.start}")
        if isinstance(wanted.prompt, list) and score.token_ids.tolist() != wanted.prompt:
            raise WireError("token_ids", f"got other ids than those of sequence {at}")
        candidates = score.candidates
        if wanted.top_logprobs_p is None:
            candidates = None
        elif candidates is None:
            raise MissingCandidateSetsError(
                "candidates", "the response holds none, though they were asked for"
            )
        else:
            check_kept_mass(candidates, wanted.top_logprobs_p, field="candidates")
        self._finished.add((at, 0))
        return replace(score, sequence_index=wanted.prompt_index, candidates=candidates)
