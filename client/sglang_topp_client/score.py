"""Score: the log-probs of one sequence that somebody else wrote, and the candidate sets at its positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets

__all__ = ["Score"]


@dataclass(frozen=True, eq=False)
class Score:
    """One scored sequence. L is the number of its tokens; positions `start` to L - 1 are scored.

    The distribution at a position is the model's own, given all tokens before it: at temperature 1, without
    penalties, bias or grammar, whatever the sequence was sampled with.

    Attributes:
        sequence_index: which of the request's sequences, from 0.
        request_id: the engine's id of the request.
        token_ids: int32 [L], the whole sequence as the engine saw it.
        start: the first position that is scored, 1 to L; L where none is.
        logprobs: float32 [L - start], natural log-prob of `token_ids[t]` given the tokens before it, under
            the full vocabulary, for `t` from `start` on.
        candidates: the candidate set of each of these positions, L - start of them, with `token_ids[t]` as
            its sampled token; None when the request did not ask for them.
        weight_version: the engine's name for the weights that every position comes from. (Without candidate
            sets, and on SGLang before 0.5.19, that is its name when it had scored the sequence: where weights
            were pushed into an `in_place` pause meanwhile, positions before that come from the ones before.)
        cached_tokens: how many tokens before the first scored position came from the engine's prefix cache.
    """

    sequence_index: int
    request_id: str
    token_ids: NDArray[np.int32]
    start: int
    logprobs: NDArray[np.float32]
    candidates: CandidateSets | None
    weight_version: str
    cached_tokens: int
