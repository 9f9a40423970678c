"""Rollout: one generated sample of a prompt, with its log-probs, candidate sets, and weight versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError
from sglang_topp_client.argument_checks import as_token_ids
from sglang_topp_client.types.rollout_html import rollout_to_html
from sglang_topp_client.types.weight_spans import WeightSpans, expand_spans, join_spans

__all__ = ["ABORT", "DISTRIBUTION", "EXTENDED", "SAMPLER", "Rollout"]

ABORT, EXTENDED = "abort", "extended"
"""The finish reasons of a sample that the engine aborted, and of a sample extended by `Rollout.extend`."""

DISTRIBUTION, SAMPLER = "distribution", "sampler"
"""The values of `top_logprobs_source`, a field that says which tokens a candidate set holds.

With `DISTRIBUTION`, a token is in the set if all more likely tokens have a total probability below the
threshold `top_logprobs_p`. With `SAMPLER`, a set holds all tokens that the engine's sampler could draw.
"""


@dataclass(frozen=True, eq=False)
class Rollout:
    """A sample that an engine generated from a prompt, and the candidate sets of the sample's tokens.

    T is the number of output tokens: the tokens that the engine generated, and those that `extend` appended.
    P is the number of prompt tokens.

    Attributes:
        prompt_index: the index of the prompt in the caller's request, from 0.
        sample_index: the index of the sample among the prompt's `n` samples, from 0.
        request_id: the engine's id of the request.
        prompt_ids: int32 [P], the prompt's token ids as the engine saw them.
        output_ids: int32 [T], the generated token ids, and the token ids that `extend` appended.
        text: the generated text as the engine detokenized it. If `extend` appended tokens, `text` covers only
            the turn after the last appended token.
        logprobs: float32 [T], natural log-prob of each generated token over the full vocabulary, and 0 for
            each token that `extend` appended.
        candidates: the candidate set of each token, T sets, or None if the request did not ask for sets. A
            token that `extend` appended has an empty set.
        finish_reason: `"stop"` or `"length"` if the engine finished the sample, `"abort"` if the sample was
            interrupted and the request had `on_abort="return"`, or `"extended"` if `extend` appended the last
            tokens.
        weight_version: the weight version of the last token, as the engine reports it, or None if the engine
            reports no version.
        cached_tokens: how many prompt tokens came from the engine's prefix cache. For a resumed sample,
            `cached_tokens` covers only the first request that generated tokens.
        latency_s: seconds from the engine's receipt of the request to the last token. For a resumed sample,
            the latencies of all its requests are summed, without the time between the requests.
        top_logprobs_source: the kind of the sets, `"distribution"` (the nucleus at the threshold
            `top_logprobs_p`) or `"sampler"` (the tokens that the sampler could draw). This attribute is None
            for a rollout without sets, and for a rollout whose sets come from another inference engine.
        weight_spans: pairs `(version, number of tokens)` in output order, one for each run of tokens with the
            same weight version. The numbers add up to T. Tokens that `extend` appended have the version "".
            The generated tokens have several versions if weights were pushed while the engine was paused, or
            before the sample was resumed. A rollout without sets has None instead of spans, because SGLang's
            own field `weight_versions` can be off by one token for a request without sets.
        routing_key: a key that the client chose for the sample's prompt. The client sends the key as the
            header `X-SMG-Routing-Key` of HTTP requests that hold only this prompt. Gateways send requests
            with the same key to the same worker. The key's suffix identifies the server that generated the
            sample, so that `resume` can use that server's prefix cache. If the key is unknown, `routing_key`
            is an empty string.
        top_logprobs_p: the requested threshold p of the sets, or None if no threshold was requested.
        sampling_params: the sampling parameters that were sent, without `n`, or None if unknown. For a
            resumed sample, this attribute holds the parameters given to `resume`.
        appended_spans: `((start, end), ...)`, the ranges of `output_ids` that `extend` appended.
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
    weight_version: str | None
    cached_tokens: int
    latency_s: float
    top_logprobs_source: str | None = None
    weight_spans: WeightSpans | None = None
    routing_key: str = ""
    top_logprobs_p: float | None = None
    sampling_params: Mapping[str, Any] | None = None
    appended_spans: tuple[tuple[int, int], ...] = ()

    @property
    def weight_versions(self) -> tuple[str, ...] | None:
        """The versions of the weights that generated the tokens and their sets, one version per token.

        This property is None if `weight_spans` is None.
        """
        return None if self.weight_spans is None else expand_spans(self.weight_spans)

    @property
    def loss_mask(self) -> NDArray[np.int8]:
        """int8 [T]: 1 for generated tokens, 0 for tokens that `extend` appended.

        Count the ones with `loss_mask.sum()`. Python's built-in `sum` overflows above 127.

        The mask is also 0 for a generated token with an empty candidate set. Pass the mask to
        `sglang_topp.batch.collate_rl`, which collates samples into a training batch.
        """
        mask = np.ones(len(self.output_ids), np.int8)
        for start, end in self.appended_spans:
            mask[start:end] = 0
        if self.candidates is not None:
            mask[self.candidates.sizes == 0] = 0
        return mask

    @property
    def turn_start(self) -> int:
        """The index of the last turn's first token in `output_ids`.

        If `extend` has appended no tokens, the index is 0. Otherwise, the index is one past the last appended
        token.
        """
        return self.appended_spans[-1][1] if self.appended_spans else 0

    def extend(self, token_ids: Sequence[int] | NDArray[np.integer]) -> Rollout:
        """Return a copy of this rollout with the token ids of a tool or an environment appended.

        Appended tokens get empty candidate sets, the log-prob 0, and the weight version "". Replay
        (`sglang_topp.replay`) and the loss skip appended tokens. To generate the next turn, pass the copy to
        the client's `resume`. `max_new_tokens`, stop strings, and `text` apply only to the turn that `resume`
        generates.

        Args:
            token_ids: one or more token ids.

        Raises:
            InvalidInputError: the argument `token_ids` is empty, or holds anything other than token ids.
        """
        ids = np.array(as_token_ids("token_ids", token_ids), np.int32)
        start, end = len(self.output_ids), len(self.output_ids) + len(ids)
        before = self.appended_spans
        if before and before[-1][1] == start:
            (start, _), before = before[-1], before[:-1]
        candidates, spans = self.candidates, self.weight_spans
        if candidates is not None:
            nothing = np.empty(0, np.float32) if candidates.has_logprobs else None
            empty = CandidateSets(np.empty(0, np.int32), nothing, np.zeros(len(ids) + 1, np.int64), ids)
            candidates = CandidateSets.concat([candidates, empty])
        return replace(
            self,
            output_ids=np.concatenate([self.output_ids, ids]),
            logprobs=np.concatenate([self.logprobs, np.zeros(len(ids), np.float32)]),
            candidates=candidates,
            text="",
            finish_reason=EXTENDED,
            weight_spans=None if spans is None else join_spans(spans, (("", len(ids)),)),
            appended_spans=(*before, (start, end)),
        )

    @property
    def masked_logprobs(self) -> NDArray[np.float32]:
        """float32 [T]: each token's log-prob, renormalized over its candidate set.

        This property returns `candidates.masked_logprobs`.
        """
        if self.candidates is None:
            raise InvalidInputError("this rollout has no candidate sets: none were requested")
        return self.candidates.masked_logprobs

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show for this rollout; see `rollout_to_html`."""
        return rollout_to_html(self)
