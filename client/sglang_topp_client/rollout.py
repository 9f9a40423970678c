"""Rollout: one finished sample, as every server's answer becomes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp_client.versions import WeightSpans, per_token

__all__ = ["Rollout"]


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sample of one prompt. T is the number of generated tokens.

    Attributes:
        prompt_index: which of the request's prompts, from 0.
        sample_index: which of the prompt's `n` samples, from 0.
        request_id: the engine's id of the request.
        prompt_ids: int32 [P], the prompt's token ids as the engine saw them.
        output_ids: int32 [T], the generated token ids.
        text: the generated text, as the engine detokenised it.
        logprobs: float32 [T], natural log-prob of each generated token under the full vocabulary.
        candidates: the candidate set of each generated token, T positions; None when the request
            did not ask for them.
        finish_reason: `"stop"` or `"length"` (a sample that was aborted is an error, not a Rollout).
        weight_version: the engine's name for the weights of the last token.
        cached_tokens: how many prompt tokens came from the engine's prefix cache.
        latency_s: seconds from the engine's receipt of the request to its last token.
        top_logprobs_source: which rule made the sets, `"distribution"` (the threshold p) or `"sampler"`
            (what the sampler could draw); None where there are none, or somebody else made them.
        weight_spans: which weights the tokens came from, `((version, number of tokens), ...)` in order, T
            tokens in all; more than one where weights were changed while the engine was paused. None where
            that is not known: SGLang's own account can be a token off, so it is there only with the sets.
        routing_key: the client's name for the prompt before gateways (the header `X-SMG-Routing-Key`), and at
            its end for the server that made the sample: what goes on from it is sent there again, for the
            prefix cache. Empty where nobody knows: files of rollouts do not keep it.
    """

    prompt_index: int
    sample_index: int
    request_id: str
    prompt_ids: NDArray[np.int32]
    output_ids: NDArray[np.int32]
    text: str
    logprobs: NDArray[np.float32]
    candidates: CandidateSets | None
    finish_reason: str
    weight_version: str
    cached_tokens: int
    latency_s: float
    top_logprobs_source: str | None = None
    weight_spans: WeightSpans | None = None
    routing_key: str = ""

    @property
    def weight_versions(self) -> tuple[str, ...] | None:
        """T names: the weights that each token, and its candidate set, came from; None where `weight_spans`
        is."""
        return None if self.weight_spans is None else per_token(self.weight_spans)

    @property
    def masked_logprobs(self) -> NDArray[np.float32]:
        """float32 [T]: each token's log-prob under its candidate set, `logprobs - logprob_sum`."""
        if self.candidates is None:
            raise InvalidInputError("this rollout has no candidate sets: none were asked for")
        masked: NDArray[np.float32] = self.logprobs - self.candidates.logprob_sum
        return masked
