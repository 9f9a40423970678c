"""Requests of `resume`: check the caller's rollouts, and build the requests for their remaining tokens.

The prompt of a resume request consists of the original prompt's ids and the rollout's output ids. The request
field `resumed_tokens` tells the engine how many ids at the prompt's end were generated before the
interruption. The returned text includes the text of these ids, and the engine also searches these ids for
stop strings, as in an uninterrupted sample.

Some sampling parameters, such as penalties, would act differently on a resumed sample than on an
uninterrupted sample. The client refuses to resume a sample that uses such a parameter. The module
`sglang_topp.engine_contract` lists these parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from sglang_topp import CandidateSets
from sglang_topp.engine_contract import find_resume_problem
from sglang_topp.errors import InvalidInputError, describe
from sglang_topp_client.requests import (
    SampleRequest,
    SamplingParams,
    TopLogprobsP,
    TopLogprobsSource,
    one_each,
    plan,
)
from sglang_topp_client.rollout import ABORT, Rollout, find_problems

__all__ = [
    "OnAbort",
    "OnTimeout",
    "as_finished",
    "check_resumable",
    "continuation_request",
    "empty_rollout",
    "mark_interruptible",
    "plan_resume",
]

OnAbort: TypeAlias = Literal["raise", "return", "resume"]
"""The client's reaction to a sample that the engine aborts.

The client raises an error, returns the partial sample, or resumes the sample.
"""

OnTimeout: TypeAlias = Literal["raise", "return"]

# Sampling parameters that change the distribution of a token. They are the same for all tokens of a rollout.
_DISTRIBUTION_PARAMS = ("temperature", "top_p", "top_k", "min_p", "logit_bias")


def mark_interruptible(
    wanted: Sequence[SampleRequest], on_abort: OnAbort, on_timeout: OnTimeout = "raise"
) -> list[SampleRequest]:
    """Return the requests, marked as interruptible if the caller, or the client, takes partial samples.

    Raises:
        InvalidInputError: `on_abort` or `on_timeout` is none of its values, or `on_abort` is `"resume"` and a
            sampling parameter does not allow an exact resume.
    """
    if not isinstance(on_abort, str) or on_abort not in get_args(OnAbort):
        raise InvalidInputError(
            f"on_abort: got {describe(on_abort)}, expected 'raise', 'return', or 'resume'"
        )
    if on_timeout not in ("raise", "return"):
        raise InvalidInputError(f"on_timeout: got {describe(on_timeout)}, expected 'raise' or 'return'")
    if on_abort == on_timeout == "raise":
        return list(wanted)
    if on_abort == "resume":
        for one in wanted:
            check_resumable(f"sampling_params of prompt {one.prompt_index}", one.sampling_params)
    return [replace(one, resumed_tokens=one.resumed_tokens or 0, is_interruptible=True) for one in wanted]


def check_resumable(name: str, params: Mapping[str, Any]) -> None:
    """Raise InvalidInputError if a sample with these sampling parameters cannot be resumed exactly."""
    if problem := find_resume_problem(params):
        raise InvalidInputError(f"{name}: {problem}")
    for field in ("max_new_tokens", "min_new_tokens"):
        limit = params.get(field)
        if limit is not None and (type(limit) is not int or limit < 0):
            raise InvalidInputError(
                f"{name}: {field}: got {describe(limit)}, expected a whole number of 0 or more"
            )
    if "max_new_tokens" not in params:
        raise InvalidInputError(
            f"{name}: max_new_tokens: got none, expected a number, or None for as many as fit: the client"
            " does not know the engine's default"
        )


def plan_resume(
    rollouts: Any,
    sampling_params: SamplingParams = None,
    top_logprobs_p: TopLogprobsP = None,
    top_logprobs_source: TopLogprobsSource = None,
) -> tuple[list[SampleRequest], list[Rollout]]:
    """Check the rollouts that a caller wants to resume, and build one request for each.

    Args:
        rollouts: one `Rollout` or several.
        sampling_params, top_logprobs_p, top_logprobs_source: as for `AsyncRolloutClient.resume`: one value
            for all rollouts, or one per rollout. What is None, or not in `sampling_params`, is as the rollout
            records it.

    Returns:
        Two lists of the same length: a list of SampleRequests, one per rollout, and the list of rollouts.
        Each SampleRequest asks for a complete sample of the rollout's original prompt. `continuation_request`
        converts such a SampleRequest to a request for the missing tokens only. A SampleRequest's prompt index
        is the rollout's index in `rollouts`.

    Raises:
        InvalidInputError: an argument is wrong, or contradicts the request that generated the rollout; the
            error names the argument.
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

    def given(name: str, values: Any) -> list[Any]:
        return one_each(name, values, len(rollouts), lambda _, one: one, per="rollout")

    params = [
        {**(rollout.sampling_params or {}), **(one or {}), "n": 1} if isinstance(one, Mapping | None) else one
        for one, rollout in zip(given("sampling_params", sampling_params), rollouts, strict=True)
    ]
    thresholds = given("top_logprobs_p", top_logprobs_p)
    sources = given("top_logprobs_source", top_logprobs_source)
    for i, rollout in enumerate(rollouts):
        if thresholds[i] is None and sources[i] is None:
            thresholds[i], sources[i] = rollout.top_logprobs_p, rollout.top_logprobs_source
    wanted = plan([rollout.prompt_ids for rollout in rollouts], params, thresholds, sources)
    for one, rollout in zip(wanted, rollouts, strict=True):
        _check_same(f"rollouts[{one.prompt_index}]", rollout, one)
        if rollout.turn_start < len(rollout.output_ids) and rollout.finish_reason != "stop":
            check_resumable(f"sampling_params of rollouts[{one.prompt_index}]", one.sampling_params)
    return wanted, rollouts


def as_finished(rollout: Rollout, wanted: SampleRequest) -> Rollout | None:
    """Return the rollout if it is finished, or None if tokens are left to generate.

    A rollout that finished with `"stop"` is returned unchanged. A rollout with another finish reason counts
    as finished if its last turn has `max_new_tokens` tokens or more. The last turn begins at
    `Rollout.turn_start`. For a rollout that reached `max_new_tokens`, this function returns a copy with the
    finish reason `"length"`.
    """
    if rollout.finish_reason == "stop":
        return rollout
    limit = wanted.sampling_params.get("max_new_tokens")
    num_tokens = len(rollout.output_ids) - rollout.turn_start
    if num_tokens and limit is not None and num_tokens >= limit:
        return replace(rollout, finish_reason="length")
    return None


def continuation_request(rollout: Rollout, wanted: SampleRequest, sample: int) -> SampleRequest:
    """Return the request that continues a rollout.

    Args:
        rollout: the unfinished rollout, for which `as_finished` returned None.
        wanted: the request for a complete sample of the original prompt.
        sample: the rollout's sample index, one of the elements of `wanted.samples`.
    """
    start = rollout.turn_start
    num_tokens = len(rollout.output_ids) - start
    # The request `wanted` may itself resume an earlier sample. The prompt of `wanted` then ends with the
    # tokens of the earlier sample, and the new `resumed_tokens` must count these tokens too.
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


def empty_rollout(wanted: SampleRequest, sample: int, request_id: str) -> Rollout | None:
    """Return a rollout without tokens for a sample that was aborted before its first token.

    Return None if the prompt is text or chat messages, because the client does not know the prompt's token
    ids.
    """
    if not isinstance(wanted.prompt, list):
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
        weight_version=None,
        cached_tokens=0,
        latency_s=0.0,
        top_logprobs_source=wanted.top_logprobs_source,
        weight_spans=() if has_sets else None,
        top_logprobs_p=wanted.top_logprobs_p,
        sampling_params=wanted.sampling_params,
    )


def _check_whole(name: str, rollout: Rollout) -> None:
    if not len(rollout.prompt_ids):
        raise InvalidInputError(f"{name}.prompt_ids: got none, expected at least one token")
    for field, problem in find_problems(rollout):
        raise InvalidInputError(f"{name}.{field}: {problem}")


def _check_same(name: str, rollout: Rollout, wanted: SampleRequest) -> None:
    """Raise InvalidInputError if the request asks for other sets, or of another distribution."""
    if not len(rollout.output_ids):
        return
    if (rollout.candidates is None) != (wanted.top_logprobs_source is None):
        there, asked = ("no sets", "some") if rollout.candidates is None else ("sets", "none")
        raise InvalidInputError(
            f"{name}.candidates: got {there}, but top_logprobs_p and top_logprobs_source request {asked};"
            " expected the values of the rollout's own request"
        )
    if rollout.candidates is not None and rollout.top_logprobs_source != wanted.top_logprobs_source:
        raise InvalidInputError(
            f"{name}.top_logprobs_source: got {rollout.top_logprobs_source!r}, but"
            f" {wanted.top_logprobs_source!r} is requested; expected the same"
        )
    if rollout.top_logprobs_p is not None and rollout.top_logprobs_p != wanted.top_logprobs_p:
        raise InvalidInputError(
            f"{name}.top_logprobs_p: got {rollout.top_logprobs_p:g}, but {describe(wanted.top_logprobs_p)} is"
            " requested; expected the same"
        )
    if rollout.sampling_params is None:
        return
    for field in _DISTRIBUTION_PARAMS:
        before, now = rollout.sampling_params.get(field), wanted.sampling_params.get(field)
        if before != now:
            raise InvalidInputError(
                f"{name}.sampling_params.{field}: got {describe(before)}, but {describe(now)} is requested;"
                " expected the same: log-probs and sets of one rollout are of one distribution"
            )
