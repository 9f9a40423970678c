"""A patched SGLang's `/generate`, asked for no token: the request for one sequence's scores, and its answer.

SGLang scores a prompt from row `logprob_start_len` on, and row t is the distribution of token t + 1: it
reports position `logprob_start_len` without a log-prob, and the first that has one is the next. What stands
before may come from its prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp import wire
from sglang_topp.errors import BadRequestError, WireError
from sglang_topp_client.record import check_kept_mass, check_sets
from sglang_topp_client.request import DISTRIBUTION, check_source
from sglang_topp_client.score import Score
from sglang_topp_client.score_request import ScoreRequest
from sglang_topp_client.sglang_api import StreamedExchange
from sglang_topp_client.sglang_fields import field_of, token_logprobs, weight_version_of

__all__ = ["GenerateScoreExchange"]

_LOGPROBS, _SETS = "input_token_logprobs", "input_top_p_logprobs"


class GenerateScoreExchange(StreamedExchange[Score]):
    """One `POST /generate` that scores."""

    def __init__(
        self, wanted: Sequence[ScoreRequest], *, request_id: str, timeout_s: float | None = None
    ) -> None:
        """See `StreamedExchange`."""
        super().__init__(wanted, request_id=request_id, timeout_s=timeout_s)
        (one,) = wanted
        self._start = one.start

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return super().body() | {"logprob_start_len": self._start - 1}

    def _result(self, index: int, chunks: list[Mapping[str, Any]]) -> Score:
        start, last = self._start, chunks[-1]
        meta_info = last["meta_info"]
        if count := field_of(meta_info, "completion_tokens", int):
            raise WireError("completion_tokens", f"got {count}, and no token was asked for")
        token_ids = self._prompt_ids(last)
        if start > len(token_ids):
            raise BadRequestError(
                f"start: got {start}, expected at most {len(token_ids)}, the number of the sequence's tokens",
                status=400,
            )
        scored = token_ids[start:]
        logprobs = _logprobs(field_of(meta_info, _LOGPROBS, list), token_ids, start)
        candidates = None
        if (p := self._wanted.top_logprobs_p) is not None:
            sets = wire.decode_input_sets(meta_info, token_ids[start - 1 :])
            if sets.sizes[0]:
                raise WireError(_SETS, f"got a set before position {start}, the first that was asked for")
            candidates = sets[1:]
            check_sets(candidates, scored, logprobs, field=_SETS)
            check_source(self._wanted, meta_info.get("top_logprobs_source", DISTRIBUTION))
            check_kept_mass(candidates, p, field=_SETS)
        return Score(
            sequence_index=self._wanted.prompt_index,
            request_id=meta_info["id"],
            token_ids=token_ids,
            start=start,
            logprobs=logprobs,
            candidates=candidates,
            weight_version=weight_version_of(meta_info),
            cached_tokens=field_of(meta_info, "cached_tokens", int),
        )


def _logprobs(entries: list[Any], token_ids: NDArray[np.int32], start: int) -> NDArray[np.float32]:
    """float32 [L - start] from what SGLang reports of positions `start - 1` and on."""
    first = entries[0] if entries else None
    if not isinstance(first, list) or not first or first[0] is not None:
        raise WireError(_LOGPROBS, f"expected a first entry without a log-prob, for position {start - 1}")
    rest, as_reported = entries[1:], token_ids[start:].copy()
    for t in np.flatnonzero(as_reported == token_ids.max()).tolist():
        # SGLang 0.5.23 reports the vocabulary's last id as 0.
        if t < len(rest) and isinstance(rest[t], list) and rest[t][1:2] == [0]:
            as_reported[t] = 0
    return token_logprobs(_LOGPROBS, rest, as_reported, of="sequence")
