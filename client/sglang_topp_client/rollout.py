"""Rollout: one sample, as every server's answer becomes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp_client.request import as_token_ids
from sglang_topp_client.versions import WeightSpans, join_spans, per_token

__all__ = ["ABORT", "EXTENDED", "Rollout"]

ABORT, EXTENDED = "abort", "extended"
"""Of the finish reasons, those of a sample that may go on."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One sample of one prompt. T is the number of generated tokens.

    Attributes:
        prompt_index: which of the request's prompts, from 0.
        sample_index: which of the prompt's `n` samples, from 0.
        request_id: the engine's id of the request.
        prompt_ids: int32 [P], the prompt's token ids as the engine saw them.
        output_ids: int32 [T], the generated token ids, and those that `extend` appended.
        text: the generated text, as the engine detokenised it; of what came behind the last tokens that
            `extend` appended.
        logprobs: float32 [T], natural log-prob of each generated token under the full vocabulary; 0 of
            appended ones.
        candidates: the candidate set of each generated token, T positions, empty ones of appended tokens;
            None when the request did not ask for them.
        finish_reason: `"stop"`, `"length"`; `"abort"`, where the sample was interrupted and the request
            had `on_abort="return"`; `"extended"`, where `extend` appended the last tokens.
        weight_version: the engine's name for the weights of the last token.
        cached_tokens: how many prompt tokens came from the engine's prefix cache; of a sample that was
            resumed, when its first token was made.
        latency_s: seconds from the engine's receipt of the request to its last token; of a sample that was
            resumed, the sum over its requests, without the time between them.
        top_logprobs_source: which rule made the sets, `"distribution"` (the threshold p) or `"sampler"`
            (what the sampler could draw); None where there are none, or somebody else made them.
        weight_spans: which weights the tokens came from, `((version, number of tokens), ...)` in order, T
            tokens in all, appended ones under the name ""; more than one where weights were changed while
            the engine was paused, or before the sample was resumed. None where that is not known: SGLang's
            own account can be a token off, so it is there only with the sets.
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
    def loss_mask(self) -> NDArray[np.int8]:
        """int8 [T]: 1 of generated tokens, 0 of those that `extend` appended; what `collate_rl` takes."""
        mask = np.ones(len(self.output_ids), np.int8)
        if self.candidates is not None:
            mask[self.candidates.sizes == 0] = 0
        return mask

    @property
    def turn_start(self) -> int:
        """Where the last turn's tokens begin: behind the last that `extend` appended; 0 without any."""
        given = np.flatnonzero(self.loss_mask == 0)
        return int(given[-1]) + 1 if len(given) else 0

    def extend(self, token_ids: Sequence[int] | NDArray[np.integer]) -> Rollout:
        """This rollout with tokens of a tool, or of the environment, behind it, as they are: exact in ids.

        They get empty candidate sets (no replay, and no loss), the log-prob 0 and no weights. `resume`
        generates the next turn from there: its limits and stop strings are of that turn alone, and so is
        `text` from here on.

        Args:
            token_ids: one id or more.

        Raises:
            InvalidInputError: these are no ids, or the rollout has no sets, which are what tells generated
                tokens from others.
        """
        if self.candidates is None:
            raise InvalidInputError(
                "extend: this rollout has no candidate sets, which tell generated tokens from others; ask for"
                " top_logprobs_p or top_logprobs_source"
            )
        ids = np.array(as_token_ids("token_ids", token_ids), np.int32)
        nothing = np.empty(0, np.float32) if self.candidates.has_logprobs else None
        sets = CandidateSets(np.empty(0, np.int32), nothing, np.zeros(len(ids) + 1, np.int64), ids)
        spans = self.weight_spans
        return replace(
            self,
            output_ids=np.concatenate([self.output_ids, ids]),
            logprobs=np.concatenate([self.logprobs, np.zeros(len(ids), np.float32)]),
            candidates=CandidateSets.concat([self.candidates, sets]),
            text="",
            finish_reason=EXTENDED,
            weight_spans=None if spans is None else join_spans(spans, (("", len(ids)),)),
        )

    @property
    def masked_logprobs(self) -> NDArray[np.float32]:
        """float32 [T]: each token's log-prob under its candidate set, `logprobs - logprob_sum`."""
        if self.candidates is None:
            raise InvalidInputError("this rollout has no candidate sets: none were asked for")
        masked: NDArray[np.float32] = self.logprobs - self.candidates.logprob_sum
        return masked
