"""The sidecar's `/scores`: the request for some sequences, and its answer, message by message.

Request::

    {"sequences": [...], "start": [1, ...], "top_logprobs_p": p | [p, ...] | null, "request_id": "...",
     "timeout_s": seconds | null, "stream": true}

Answer, a message per sequence as it is scored, and last one that a cut-off answer lacks::

    {"sequence_index": 0, ...}
    {"done": true, "scores": 8}

Messages and failures are those of `/rollouts` (`sidecar_api.py`), with `score_record.py` for the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang_topp.errors import MissingCandidateSetsError, WireError
from sglang_topp_client.record import check_kept_mass
from sglang_topp_client.score import Score
from sglang_topp_client.score_record import MAGIC, MEDIA_TYPE, score_from_packed, score_from_record
from sglang_topp_client.score_request import ScoreRequest
from sglang_topp_client.sidecar_api import SidecarExchange

__all__ = ["ScoresExchange"]


class ScoresExchange(SidecarExchange[Score]):
    """One `POST /scores`."""

    path = "/scores"
    media_type = MEDIA_TYPE
    magic = MAGIC
    missing_route = (
        "this sidecar has no /scores: it is of an sglang-topp that does not score yet; install the same"
        " version there as here, or ask its engine (kind='sglang')"
    )
    samples_per_call = 16
    """Fewer than prompts: whole sequences are as long as a context."""

    def __init__(
        self,
        wanted: Sequence[ScoreRequest],
        *,
        request_id: str,
        timeout_s: float | None = None,
        logprob_bits: int = 32,
    ) -> None:
        """See `SidecarExchange`."""
        super().__init__(wanted, request_id=request_id, timeout_s=timeout_s, logprob_bits=logprob_bits)
        self._sequences = list(wanted)

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        thresholds = [one.top_logprobs_p for one in self._sequences]
        return {
            "sequences": [one.prompt for one in self._sequences],
            "start": [one.start for one in self._sequences],
            "top_logprobs_p": thresholds[0] if len(set(thresholds)) == 1 else thresholds,
            "request_id": self._request_id,
            "timeout_s": self._timeout_s,
            "stream": True,
        }

    def _unpacked(self, frame: bytes) -> Score:
        return self._place(score_from_packed(frame, logprob_bits=self._logprob_bits))

    def _decoded(self, record: dict[str, Any]) -> Score:
        return self._place(score_from_record(record))

    def _place(self, score: Score) -> Score:
        """The score under the caller's own index."""
        at = score.sequence_index
        if at >= len(self._sequences) or (at, 0) in self._finished:
            raise WireError(
                "sequence_index", f"got {at} twice, or beyond the {len(self._sequences)} sequences"
            )
        wanted = self._sequences[at]
        if score.start != wanted.start:
            raise WireError("start", f"got {score.start} of sequence {at}, and {wanted.start} was asked for")
        if not isinstance(wanted.prompt, str) and score.token_ids.tolist() != wanted.prompt:
            raise WireError("token_ids", f"are not those of sequence {at}")
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
