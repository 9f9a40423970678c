"""Score: a given sequence's log-probs under a model, and the candidate sets at the sequence's positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets

__all__ = ["Score"]


@dataclass(frozen=True, eq=False)
class Score:
    """One scored sequence of L tokens. The tokens at positions `start` to L - 1 have log-probs.

    Each log-prob comes from the model's own distribution at temperature 1, given all earlier tokens.
    Penalties, logit bias, and grammars do not change the log-probs, even if the sequence was sampled with
    them.

    Attributes:
        sequence_index: the index of the sequence in the request, from 0.
        request_id: the engine's id of the request.
        token_ids: int32 [L], the token ids of the whole sequence.
        start: the first scored position, 1 to L, where L means that no position is scored.
        logprobs: float32 [L - start], the natural log-prob of each token from `start` on, given all earlier
            tokens. The log-probs are normalized over the full vocabulary.
        candidates: the L - start candidate sets of the scored positions, or None if the request did not ask
            for sets. In the set of position t, the sampled token is `token_ids[t]`.
        weight_version: the version of the weights that scored every position, as the engine reports it.
            SGLang before 0.5.19 reports the version that the engine has at the end of the request. If weights
            are pushed between the scoring and the end of the request, these releases can report the version
            of the new weights.
        cached_tokens: how many tokens before the first scored position came from the engine's prefix cache.
    """

    sequence_index: int
    request_id: str
    token_ids: NDArray[np.int32]
    start: int
    logprobs: NDArray[np.float32]
    candidates: CandidateSets | None
    weight_version: str | None
    cached_tokens: int
