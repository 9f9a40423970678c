"""Requests for `generate`: check a caller's arguments, and build one `SampleRequest` per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from sglang_topp.errors import InvalidInputError, WireError, describe
from sglang_topp_client.argument_checks import find_json_problem
from sglang_topp_client.requests.prompts import Prompt, Prompts, find_media, prompts_of
from sglang_topp_client.types.rollout import DISTRIBUTION, SAMPLER

__all__ = [
    "SampleRequest",
    "SamplingParams",
    "TopLogprobsP",
    "TopLogprobsSource",
    "check_source",
    "one_each",
    "plan",
    "thresholds_of",
]

SamplingParams: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
TopLogprobsP: TypeAlias = float | Sequence[float | None] | None
TopLogprobsSource: TypeAlias = str | Sequence[str | None] | None

# The client creates a few objects per sample before it sends the first request. A huge `n` would exhaust the
# memory of the process.
_MAX_SAMPLES = 1 << 20


@dataclass(frozen=True)
class SampleRequest:
    """One prompt and the samples to generate from it.

    Attributes:
        prompt_index: the index of the prompt in the caller's request, from 0.
        prompt: text, token ids, or chat messages.
        sampling_params: SGLang's sampling parameters, without `n`.
        samples: the indices of the samples to generate. A retry asks only for the missing samples.
        top_logprobs_p: the threshold in (0, 1], or None for no threshold.
        top_logprobs_source: `DISTRIBUTION` or `SAMPLER`, or None for no candidate sets.
        routing_key: the `Rollout.routing_key` of the rollout that this request continues, or empty.
        resumed_tokens: how many of the last prompt tokens already belong to the answer. 0 means a new answer
            that may be resumed later. None means an answer that may not be resumed.
        is_interruptible: whether an aborted sample is returned as a partial rollout. Otherwise an abort is an
            error.
    """

    prompt_index: int
    prompt: Prompt
    sampling_params: Mapping[str, Any]
    samples: tuple[int, ...]
    top_logprobs_p: float | None
    top_logprobs_source: str | None
    routing_key: str = ""
    resumed_tokens: int | None = None
    is_interruptible: bool = False


def plan(
    prompts: Prompts,
    sampling_params: SamplingParams,
    top_logprobs_p: TopLogprobsP = None,
    top_logprobs_source: TopLogprobsSource = None,
) -> list[SampleRequest]:
    """Check a caller's arguments and split them into one request per prompt.

    Args:
        prompts: one prompt or several. A prompt is text, token ids, or chat messages. Token ids may also be
            an integer array that `numpy.asarray` accepts.
        sampling_params: SGLang's sampling parameters; one mapping for all prompts, or one per prompt. `n` is
            the number of samples of each prompt, 1 by default.
        top_logprobs_p: one threshold for all prompts, or one per prompt; None or 0 requests no sets.
        top_logprobs_source: one rule for all prompts, or one per prompt. With `SAMPLER`, each set has the
            tokens that the sampler could draw, without a threshold. `DISTRIBUTION` and None use the
            threshold.

    Raises:
        InvalidInputError: an argument is wrong; the error names the argument.
    """
    all_prompts = prompts_of("prompts", prompts, takes_messages=True)
    count = len(all_prompts)
    if sampling_params is None or isinstance(sampling_params, Mapping):
        # Check the parameters once, and share them between all prompts.
        params = [_sampling_params("sampling_params", sampling_params or {})] * count
    else:
        params = [
            _sampling_params(f"sampling_params[{i}]", given)
            for i, given in enumerate(one_each("sampling_params", sampling_params, count))
        ]
    if (num_samples := sum(n for _, n in params)) > _MAX_SAMPLES:
        raise InvalidInputError(
            f"sampling_params: n makes {describe(num_samples)} samples in all, expected {_MAX_SAMPLES} at"
            " most; ask for more in several calls"
        )
    thresholds = thresholds_of(top_logprobs_p, count)
    if top_logprobs_source is None or isinstance(top_logprobs_source, str):
        given_sources: Sequence[Any] = [top_logprobs_source] * count
    else:
        given_sources = one_each("top_logprobs_source", top_logprobs_source, count)
    sources = [
        _source("top_logprobs_source", given, threshold)
        for given, threshold in zip(given_sources, thresholds, strict=True)
    ]
    return [
        SampleRequest(index, prompt, without_n, tuple(range(n)), threshold, source)
        for index, (prompt, (without_n, n), threshold, source) in enumerate(
            zip(all_prompts, params, thresholds, sources, strict=True)
        )
    ]


def check_source(wanted: SampleRequest, source: Any) -> None:
    """Raise WireError unless `source`, the rule of the answer's sets, is the requested rule."""
    if source != wanted.top_logprobs_source:
        raise WireError(
            "top_logprobs_source",
            f"got {describe(source)}, expected {wanted.top_logprobs_source!r}, as requested",
        )


def _sampling_params(name: str, given: Any) -> tuple[Mapping[str, Any], int]:
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{name}: got {type(given).__name__}, expected a mapping")
    params = dict(given)
    if wrong := [key for key in params if not isinstance(key, str)]:
        raise InvalidInputError(f"{name}: got the name {describe(wrong[0])}, expected text")
    n = params.pop("n", 1)
    n = 1 if n is None else n
    if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
        raise InvalidInputError(f"{name}: got n = {describe(n)}, expected an integer of 1 or more")
    if (problem := find_media(params) or find_json_problem(params)) is not None:
        raise InvalidInputError(f"{name}: {problem}")
    return params, int(n)


def thresholds_of(given: Any, count: int, *, per: str = "prompt") -> list[float | None]:
    """Return one threshold per prompt, or None for each prompt without candidate sets.

    Args:
        given: one threshold for all prompts, or one per prompt; None and 0 mean no sets.
        count: the number of prompts.
        per: the name of a prompt in error messages.

    Raises:
        InvalidInputError: a threshold is not a number from 0 to 1, or the number of thresholds is not
            `count`.
    """
    if given is None or isinstance(given, Real | np.number):
        return [_threshold("top_logprobs_p", given)] * count
    return [
        _threshold(f"top_logprobs_p[{i}]", one)
        for i, one in enumerate(one_each("top_logprobs_p", given, count, per=per))
    ]


def _threshold(name: str, given: Any) -> float | None:
    if given is None:
        return None
    if not isinstance(given, Real) or isinstance(given, bool):
        raise InvalidInputError(f"{name}: got {type(given).__name__}, expected a number from 0 to 1, or None")
    # Compare before the conversion, because an integer with hundreds of digits does not fit into a float.
    value: Any = given
    if not 0 <= value <= 1:
        raise InvalidInputError(f"{name}: got {describe(given)}, expected a number from 0 to 1, or None")
    return float(value) or None


def _source(name: str, given: Any, threshold: float | None) -> str | None:
    if given not in (None, DISTRIBUTION, SAMPLER):
        raise InvalidInputError(f"{name}: got {describe(given)}, expected {DISTRIBUTION!r} or {SAMPLER!r}")
    if given != SAMPLER:
        return None if threshold is None else DISTRIBUTION
    if threshold is not None:
        raise InvalidInputError(
            f"{name}: got {SAMPLER!r} and top_logprobs_p {threshold:g}, expected one of them: the sampler's"
            " sets follow top_k, top_p, and min_p of sampling_params"
        )
    return SAMPLER


def one_each(name: str, values: Any, count: int, *, per: str = "prompt") -> Sequence[Any]:
    """Return `values` as a list of `count` values, one for each prompt.

    Raises:
        InvalidInputError: the number of values is not `count`. The message calls the values `name` and a
            prompt `per`.
    """
    try:
        given = None if isinstance(values, str | bytes | Mapping | Set) else len(values)
    except TypeError:  # iterators and zero-dimensional arrays have no length
        given = None
    if given is None:
        raise InvalidInputError(f"{name}: got {type(values).__name__}, expected one value, or one per {per}")
    if given != count:
        raise InvalidInputError(f"{name}: got {given} values for {count} {per}s")
    return list(values)
