"""Join a partial rollout and its continuation into one rollout, as if nothing had interrupted the sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_topp import CandidateSets
from sglang_topp.errors import WireError
from sglang_topp_client.types.rollout import Rollout
from sglang_topp_client.types.weight_spans import WeightSpans, join_spans

__all__ = ["join_parts"]


def join_parts(first: Rollout, rest: Rollout) -> Rollout:
    """Return the rollout that consists of `first` and its continuation `rest`.

    Raises:
        WireError: the prompt of `rest` is not the prompt of `first` followed by the output of `first`, or
            only one of the two parts has candidate sets.
    """
    if rest.prompt_ids.tolist() != [*first.prompt_ids.tolist(), *first.output_ids.tolist()]:
        raise WireError("prompt_ids", "got other ids than those of the rollout that it continues")
    had_tokens, has_more = len(first.output_ids) > 0, len(rest.output_ids) > 0
    return replace(
        first,
        request_id=rest.request_id,
        output_ids=np.concatenate([first.output_ids, rest.output_ids]),
        # `rest.text` also covers the tokens in the last turn of `first`. The client told the engine, in the
        # request field `resumed_tokens`, how many such tokens are at the end of the prompt of `rest`.
        text=rest.text if has_more else first.text,
        logprobs=np.concatenate([first.logprobs, rest.logprobs]),
        candidates=_joined_sets(first, rest),
        finish_reason=rest.finish_reason,
        weight_version=rest.weight_version if has_more or not had_tokens else first.weight_version,
        cached_tokens=first.cached_tokens if had_tokens else min(rest.cached_tokens, len(first.prompt_ids)),
        latency_s=first.latency_s + rest.latency_s,
        top_logprobs_source=first.top_logprobs_source if had_tokens else rest.top_logprobs_source,
        weight_spans=_joined_spans(first, rest),
        routing_key=rest.routing_key,
    )


def _joined_sets(first: Rollout, rest: Rollout) -> CandidateSets | None:
    if not len(first.output_ids):
        return rest.candidates
    if first.candidates is None or rest.candidates is None:
        if first.candidates is not rest.candidates:
            raise WireError("candidates", "only one part of the rollout has sets, expected both or neither")
        return None
    return CandidateSets.concat([first.candidates, rest.candidates])


def _joined_spans(first: Rollout, rest: Rollout) -> WeightSpans | None:
    if not len(first.output_ids):
        return rest.weight_spans
    if not len(rest.output_ids):
        return first.weight_spans
    if first.weight_spans is None or rest.weight_spans is None:
        return None
    return join_spans(first.weight_spans, rest.weight_spans)
