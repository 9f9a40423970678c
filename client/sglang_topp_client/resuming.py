"""Resuming: what is asked of an engine that is to go on with a rollout, and the rollout that comes of it.

The prompt is then the old prompt and what is there, as ids, and the engine is told how many of them begin
the answer (`resumed_tokens`): stop strings and the text are what they would have been without the cut. What
cannot be exact across a cut is refused (`sglang_topp.resumable`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from sglang_topp import CandidateSets
from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp.resumable import cut_problem
from sglang_topp_client.checks import shown
from sglang_topp_client.request import SampleRequest, SamplingParams, TopLogprobsP, TopLogprobsSource, plan
from sglang_topp_client.rollout import ABORT, Rollout
from sglang_topp_client.versions import WeightSpans, join_spans

__all__ = [
    "OnAbort",
    "check_on_abort",
    "check_resumable",
    "continuation",
    "ended",
    "interruptible",
    "join",
    "nothing_generated",
    "plan_resume",
]

OnAbort: TypeAlias = Literal["raise", "return", "resume"]
"""What becomes of a sample that the engine is told to abort."""


def check_on_abort(on_abort: Any) -> None:
    """Raise InvalidInputError unless it is one of `OnAbort`."""
    if not isinstance(on_abort, str) or on_abort not in get_args(OnAbort):
        raise InvalidInputError(f"on_abort: got {shown(on_abort)}, expected 'raise', 'return' or 'resume'")


def interruptible(wanted: Sequence[SampleRequest], on_abort: OnAbort) -> list[SampleRequest]:
    """The same samples, asked for so that they may be interrupted, where `on_abort` lets them.

    Raises:
        InvalidInputError: they are to be resumed, and could not be, exactly.
    """
    if on_abort == "raise":
        return list(wanted)
    if on_abort == "resume":
        for one in wanted:
            check_resumable(f"sampling_params of prompt {one.prompt_index}", one.sampling_params)
    return [replace(one, resumed_tokens=one.resumed_tokens or 0, is_interruptible=True) for one in wanted]


def check_resumable(name: str, params: Mapping[str, Any]) -> None:
    """Raise InvalidInputError unless a sample under these sampling parameters can be resumed exactly."""
    if problem := cut_problem(params):
        raise InvalidInputError(f"{name}: {problem}")
    for field in ("max_new_tokens", "min_new_tokens"):
        limit = params.get(field)
        if limit is not None and (type(limit) is not int or limit < 0):
            raise InvalidInputError(
                f"{name}: {field}: got {shown(limit)}, expected a whole number of 0 or more"
            )
    if "max_new_tokens" not in params:
        raise InvalidInputError(
            f"{name}: max_new_tokens: got none, expected a number, or None for as many as fit: what is left"
            " of an engine's own default is not known"
        )


def plan_resume(
    rollouts: Any,
    sampling_params: SamplingParams,
    top_logprobs_p: TopLogprobsP = None,
    top_logprobs_source: TopLogprobsSource = None,
) -> tuple[list[SampleRequest], list[Rollout]]:
    """Check what a caller wants resumed.

    Args:
        rollouts: one or more `Rollout`.
        sampling_params: as for `plan`, those that the rollouts were made with; `n` is passed over.
        top_logprobs_p: as for `plan`.
        top_logprobs_source: as for `plan`.

    Returns:
        One request for each rollout, as if it had no token yet, its prompt index the place in `rollouts`; and
        the rollouts.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
    """
    if isinstance(rollouts, Rollout):
        rollouts = [rollouts]
    if not isinstance(rollouts, Sequence) or isinstance(rollouts, str | bytes):
        raise InvalidInputError(f"rollouts: got {type(rollouts).__name__}, expected rollouts")
    rollouts = list(rollouts)
    if not rollouts:
        raise InvalidInputError("rollouts: got none, expected at least one")
    for i, rollout in enumerate(rollouts):
        if not isinstance(rollout, Rollout):
            raise InvalidInputError(f"rollouts[{i}]: got {type(rollout).__name__}, expected a Rollout")
        _check_whole(f"rollouts[{i}]", rollout)
    prompts = [rollout.prompt_ids for rollout in rollouts]
    wanted = plan(prompts, _without_n(sampling_params), top_logprobs_p, top_logprobs_source)
    for one, rollout in zip(wanted, rollouts, strict=True):
        _check_sets(f"rollouts[{one.prompt_index}]", rollout, one)
        if rollout.turn_start < len(rollout.output_ids) and rollout.finish_reason != "stop":
            check_resumable(f"sampling_params of rollouts[{one.prompt_index}]", one.sampling_params)
    return wanted, rollouts


def ended(rollout: Rollout, wanted: SampleRequest) -> Rollout | None:
    """The rollout as it is returned where nothing is left to generate, or None.

    One that finished with `"stop"` is returned as it is. One whose last turn has `max_new_tokens` tokens or
    more has finished with `"length"`, whatever it was interrupted by.
    """
    if rollout.finish_reason == "stop":
        return rollout
    limit = wanted.sampling_params.get("max_new_tokens")
    num_tokens = len(rollout.output_ids) - rollout.turn_start
    if num_tokens and limit is not None and num_tokens >= limit:
        return replace(rollout, finish_reason="length")
    return None


def continuation(rollout: Rollout, wanted: SampleRequest, sample: int) -> SampleRequest:
    """The request that goes on with a rollout that has not `ended`.

    Args:
        rollout: what is there.
        wanted: what was asked for when there was nothing.
        sample: which of its samples the rollout is.
    """
    start = rollout.turn_start
    num_tokens = len(rollout.output_ids) - start
    # What was asked for may itself have gone on with something.
    num_before = 0 if start else wanted.resumed_tokens or 0
    params = dict(wanted.sampling_params)
    if num_tokens:
        for name in ("max_new_tokens", "min_new_tokens"):
            if params.get(name) is not None:
                params[name] = max(params[name] - num_tokens, 0)
    return replace(
        wanted,
        prompt=[*rollout.prompt_ids.tolist(), *rollout.output_ids.tolist()],
        sampling_params=params,
        samples=(sample,),
        resumed_tokens=num_tokens + num_before,
        routing_key=rollout.routing_key,
    )


def join(first: Rollout, rest: Rollout) -> Rollout:
    """The rollout that `first` becomes with what a request for its `continuation` gave.

    Raises:
        WireError: `rest` has another prompt, or sets where `first` has none.
    """
    if rest.prompt_ids.tolist() != [*first.prompt_ids.tolist(), *first.output_ids.tolist()]:
        raise WireError("prompt_ids", "are not those that the rollout was to go on from")
    had_tokens, has_more = len(first.output_ids) > 0, len(rest.output_ids) > 0
    return replace(
        first,
        request_id=rest.request_id,
        output_ids=np.concatenate([first.output_ids, rest.output_ids]),
        # The engine's text begins where the turn does.
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


def nothing_generated(wanted: SampleRequest, sample: int, request_id: str) -> Rollout | None:
    """A sample that was aborted before anything of it came; None where the prompt is a text, whose ids nobody
    has told."""
    if isinstance(wanted.prompt, str):
        return None
    has_sets = wanted.top_logprobs_source is not None
    return Rollout(
        prompt_index=wanted.prompt_index,
        sample_index=sample,
        request_id=request_id,
        prompt_ids=np.array(wanted.prompt, np.int32),
        output_ids=np.empty(0, np.int32),
        text="",
        logprobs=np.empty(0, np.float32),
        candidates=CandidateSets.empty(0) if has_sets else None,
        finish_reason=ABORT,
        weight_version="",
        cached_tokens=0,
        latency_s=0.0,
        top_logprobs_source=wanted.top_logprobs_source,
        weight_spans=() if has_sets else None,
    )


def _without_n(params: Any) -> Any:
    """The same without the number of samples; what is no mapping is left to be refused."""
    if isinstance(params, Mapping):
        return {name: value for name, value in params.items() if name != "n"}
    if isinstance(params, list | tuple):
        return [_without_n(one) if isinstance(one, Mapping) else one for one in params]
    return params


def _check_whole(name: str, rollout: Rollout) -> None:
    if not len(rollout.prompt_ids):
        raise InvalidInputError(f"{name}.prompt_ids: got none, expected at least one token")
    num_tokens = len(rollout.output_ids)
    lengths: dict[str, int] = {"logprobs": len(rollout.logprobs)}
    if rollout.candidates is not None:
        lengths["candidates"] = len(rollout.candidates)
    if rollout.weight_spans is not None:
        lengths["weight_spans"] = sum(count for _, count in rollout.weight_spans)
    for field, length in lengths.items():
        if length != num_tokens:
            raise InvalidInputError(f"{name}.{field}: got {length} for {num_tokens} output_ids")


def _check_sets(name: str, rollout: Rollout, wanted: SampleRequest) -> None:
    """Raise where some tokens of the whole would have sets of a kind, and others not."""
    if not len(rollout.output_ids):
        return
    if (rollout.candidates is None) != (wanted.top_logprobs_source is None):
        there, asked = ("no sets", "some") if rollout.candidates is None else ("sets", "none")
        raise InvalidInputError(
            f"{name}.candidates: got {there}, and {asked} are asked for by top_logprobs_p and"
            " top_logprobs_source; expected what the rollout was made with"
        )
    if rollout.candidates is not None and rollout.top_logprobs_source != wanted.top_logprobs_source:
        raise InvalidInputError(
            f"{name}.top_logprobs_source: got {rollout.top_logprobs_source!r}, and"
            f" {wanted.top_logprobs_source!r} is asked for; expected the same"
        )


def _joined_sets(first: Rollout, rest: Rollout) -> CandidateSets | None:
    if not len(first.output_ids):
        return rest.candidates
    if first.candidates is None or rest.candidates is None:
        if first.candidates is not rest.candidates:
            raise WireError("candidates", "some tokens of the rollout would have sets, and others not")
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
