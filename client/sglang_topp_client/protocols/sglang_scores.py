"""Score one sequence through a patched SGLang's `POST /generate`. The request generates no tokens.

The request's field `logprob_start_len` is a position in the sequence. SGLang computes the next-token
distribution at this position and at all later positions. The distribution at position i gives the log-prob
of the token at i + 1. The first token with a log-prob is therefore the token at `logprob_start_len + 1`.
Tokens before `logprob_start_len` may come from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp import formats
from sglang_topp.errors import BadRequestError, WireError
from sglang_topp_client.codecs.answer_consistency import check_kept_mass, check_sets
from sglang_topp_client.codecs.json_fields import read_field
from sglang_topp_client.protocols.sglang_generate import StreamedExchange
from sglang_topp_client.protocols.sglang_logprobs_and_weight_version import (
    TokenLogprob,
    parse_token_logprobs,
    read_weight_version,
)
from sglang_topp_client.requests import ScoreRequest, check_source
from sglang_topp_client.types.rollout import DISTRIBUTION
from sglang_topp_client.types.score import Score

__all__ = ["GenerateScoreExchange"]

_LOGPROBS, _SETS = "input_token_logprobs", "input_top_p_logprobs"
# If the caller wants only log-probs, the client still requests candidate sets, with the threshold 1e-9. If a
# request asks for sets, the engine guarantees one weight version per score. Sets in an answer also prove that
# the engine is patched. At the threshold 1e-9, the sets are small: a set holds the most likely token and the
# sequence's token at the set's position. If several tokens tie for the highest probability, the set holds all
# of these tokens.
_LEAST_P = 1e-9


class GenerateScoreExchange(StreamedExchange[Score]):
    """One `POST /generate` that scores a sequence."""

    prompts_field = "sequences"

    def __init__(self, wanted: ScoreRequest, *, request_id: str) -> None:
        """See `StreamedExchange`."""
        super().__init__(wanted, request_id=request_id)
        self._start = wanted.start

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the request."""
        sets = {"top_logprobs_p": self._wanted.top_logprobs_p or _LEAST_P, "return_logprobs_in_base64": True}
        return super().body() | {"logprob_start_len": self._start - 1} | sets

    def _result(self, index: int, chunks: list[Mapping[str, Any]]) -> Score:
        start, last = self._start, chunks[-1]
        meta_info = last["meta_info"]
        if count := read_field(meta_info, "completion_tokens", int):
            raise WireError("completion_tokens", f"got {count}, expected 0, as requested")
        token_ids = self._prompt_ids(last)
        if start > len(token_ids):
            raise BadRequestError(
                f"start: got {start}, expected at most {len(token_ids)}, the number of the sequence's tokens",
                status=400,
            )
        scored = token_ids[start:]
        logprobs = _logprobs(read_field(meta_info, _LOGPROBS, list), token_ids, start)
        sets = formats.decode_prompt_top_p(meta_info, token_ids[start - 1 :])
        if sets.sizes[0]:
            raise WireError(_SETS, f"got a set before position {start}, the first requested position")
        candidates = sets[1:]
        check_sets(candidates, scored, logprobs, field=_SETS)
        if (p := self._wanted.top_logprobs_p) is not None:
            check_source(self._wanted, meta_info.get("top_logprobs_source", DISTRIBUTION))
            check_kept_mass(candidates, p, field=_SETS)
        return Score(
            sequence_index=self._wanted.prompt_index,
            request_id=meta_info["id"],
            token_ids=token_ids,
            start=start,
            logprobs=logprobs,
            candidates=None if p is None else candidates,
            weight_version=read_weight_version(meta_info),
            cached_tokens=read_field(meta_info, "cached_tokens", int),
        )


def _logprobs(entries: list[TokenLogprob], token_ids: NDArray[np.int32], start: int) -> NDArray[np.float32]:
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
    return parse_token_logprobs(_LOGPROBS, rest, as_reported, of="sequence")
