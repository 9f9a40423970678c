"""What a caller asks for, checked before anything is sent: one `SampleRequest` per prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError, WireError
from sglang_topp_client.checks import is_text, shown

__all__ = [
    "DISTRIBUTION",
    "SAMPLER",
    "Prompts",
    "SampleRequest",
    "SamplingParams",
    "TopLogprobsP",
    "TopLogprobsSource",
    "as_token_ids",
    "check_source",
    "one_each",
    "plan",
    "prompts_of",
    "thresholds_of",
]

Prompts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
SamplingParams: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
TopLogprobsP: TypeAlias = float | Sequence[float | None] | None
TopLogprobsSource: TypeAlias = str | Sequence[str | None] | None

DISTRIBUTION, SAMPLER = "distribution", "sampler"
"""Which rule makes the sets: the threshold p, or what the engine's sampler could draw."""

_MAX_TOKEN_ID = int(np.iinfo(np.int32).max)
# Each is a few objects here, before anything is sent.
_MAX_SAMPLES = 1 << 20
# Python's own reading and writing of JSON gives up at some 900 levels, wherever it is called from.
_MAX_NESTING = 100


@dataclass(frozen=True)
class SampleRequest:
    """One prompt, and which of its samples are wanted.

    Attributes:
        prompt_index: its place among the caller's prompts, from 0.
        prompt: text, or token ids.
        sampling_params: SGLang's sampling parameters, without `n`.
        samples: the sample indices that are wanted; a retry asks for those still missing.
        top_logprobs_p: the threshold in (0, 1], or None where the sets are not made by one.
        top_logprobs_source: `DISTRIBUTION` or `SAMPLER`; None where no candidate sets are wanted.
        routing_key: of the rollout that this goes on from (`Rollout.routing_key`), or empty.
        resumed_tokens: how many of the last prompt tokens begin the answer, where it goes on with one or may
            be gone on with; else None.
        is_interruptible: whether a sample that is aborted is one all the same; else it is an error.
    """

    prompt_index: int
    prompt: str | list[int]
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
    """Check a caller's arguments and spread them over the prompts.

    Args:
        prompts: one text, several texts, the token ids of one prompt, or of several. Integer arrays
            (NumPy, or anything `numpy.asarray` takes) stand for sequences of ids.
        sampling_params: SGLang's names; one mapping for all, or one per prompt. `n`, 1 by default, is
            the number of samples of each prompt.
        top_logprobs_p: one threshold for all, or one per prompt; None or 0 turns candidate sets off.
        top_logprobs_source: `SAMPLER` for what the sampler could draw, without a threshold then;
            `DISTRIBUTION` or None where a threshold makes the sets. One for all, or one per prompt.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
    """
    all_prompts = prompts_of("prompts", prompts)
    count = len(all_prompts)
    if sampling_params is None or isinstance(sampling_params, Mapping):
        # Checked once, shared by all.
        params = [_sampling_params("sampling_params", sampling_params or {})] * count
    else:
        params = [
            _sampling_params(f"sampling_params[{i}]", given)
            for i, given in enumerate(one_each("sampling_params", sampling_params, count))
        ]
    if (num_samples := sum(n for _, n in params)) > _MAX_SAMPLES:
        raise InvalidInputError(
            f"sampling_params: n makes {shown(num_samples)} samples in all, expected {_MAX_SAMPLES} at most;"
            " ask for more in several calls"
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
    """Raise WireError where an answer's sets were made by another rule than the one that was asked for."""
    if source != wanted.top_logprobs_source:
        raise WireError(
            "top_logprobs_source", f"got {shown(source)}, and {wanted.top_logprobs_source!r} was asked for"
        )


def prompts_of(name: str, prompts: Any) -> list[str | list[int]]:
    """Each of a caller's prompts, text or token ids, checked; `name` is theirs in messages.

    Raises:
        InvalidInputError: they are none, or of no kind that is taken.
    """
    if isinstance(prompts, str):
        return [_text(name, prompts)]
    if isinstance(prompts, bytes | bytearray | memoryview) or not isinstance(prompts, Sequence):
        array = _array(name, prompts) if hasattr(prompts, "__array__") else None
        if array is None or not array.ndim:
            raise InvalidInputError(
                f"{name}: got {type(prompts).__name__}, expected text, texts, token ids, or lists of these"
            )
        prompts = array
    items = list(prompts)
    if not items:
        raise InvalidInputError(f"{name}: got none, expected at least one, of at least one token")
    if all(isinstance(item, str) for item in items):
        return [_text(f"{name}[{i}]", item) for i, item in enumerate(items)]
    if all(isinstance(item, int | np.integer) for item in items):
        return [as_token_ids(name, prompts)]
    if any(isinstance(item, str) for item in items):
        raise InvalidInputError(f"{name}: got text and token ids in one request, expected one kind")
    return [as_token_ids(f"{name}[{i}]", item) for i, item in enumerate(items)]


def _text(name: str, text: str) -> str:
    if not text:
        raise InvalidInputError(f"{name}: got an empty text, expected at least one token")
    if not is_text(text):
        raise InvalidInputError(f"{name}: got text with a lone surrogate, which is no Unicode text")
    return text


def as_token_ids(name: str, values: Any) -> list[int]:
    """One token id or more, as plain integers.

    Raises:
        InvalidInputError: `values` are none.
    """
    # NumPy reads booleans among integers as 0 and 1, and a buffer of bytes as integers.
    if isinstance(values, list | tuple) and not {bool, np.bool_}.isdisjoint(map(type, values)):
        raise InvalidInputError(f"{name}: got a boolean, expected token ids")
    if isinstance(values, bytes | bytearray | memoryview):
        raise InvalidInputError(f"{name}: got {type(values).__name__}, expected text or token ids")
    ids = _array(name, values)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise InvalidInputError(
            f"{name}: got {ids.dtype} of shape {list(ids.shape)}, expected one or more token ids"
        )
    if ids.min() < 0 or ids.max() > _MAX_TOKEN_ID:
        raise InvalidInputError(
            f"{name}: got ids from {ids.min()} to {ids.max()}, expected 0 to {_MAX_TOKEN_ID}"
        )
    plain: list[int] = ids.tolist()
    return plain


def _array(name: str, values: Any) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError:
        raise InvalidInputError(f"{name}: got a ragged nesting, expected token ids") from None
    except Exception as error:  # a tensor that NumPy cannot read, for example
        raise InvalidInputError(f"{name}: cannot be read as token ids: {error}") from None


def _sampling_params(name: str, given: Any) -> tuple[Mapping[str, Any], int]:
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{name}: got {type(given).__name__}, expected a mapping")
    params = dict(given)
    if wrong := [key for key in params if not isinstance(key, str)]:
        raise InvalidInputError(f"{name}: got the name {shown(wrong[0])}, expected text")
    n = params.pop("n", 1)
    n = 1 if n is None else n
    if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
        raise InvalidInputError(f"{name}: got n = {shown(n)}, expected an integer of 1 or more")
    if (problem := _problem(params)) is not None:
        raise InvalidInputError(f"{name}: {problem}")
    try:
        json.dumps(params, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{name}: cannot be sent as JSON: {error}") from None
    return params, int(n)


def _problem(params: dict[Any, Any]) -> str | None:
    """Why these cannot be sent, though JSON could be made of them; None where they can."""
    level: list[Any] = [params]
    for _ in range(_MAX_NESTING):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value
                below += value.values()
            elif isinstance(value, list | tuple):
                below += value
            elif isinstance(value, str):
                if not is_text(value):
                    return f"got text with a lone surrogate, which is no Unicode text: {shown(ascii(value))}"
            elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
                return f"got the integer {shown(value)}, expected integers of 64 bits"
        if not below:
            return None
        level = below
    return f"got values nested in more than {_MAX_NESTING} levels"


def thresholds_of(given: Any, count: int, *, per: str = "prompt") -> list[float | None]:
    """The threshold of each of `count` prompts, None where there is none.

    Args:
        given: one for all, or one each; None or 0 is none.
        count: how many there are to be.
        per: what there is one for each of, for messages.

    Raises:
        InvalidInputError: one is no number from 0 to 1, or there are not `count`.
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
    # Compared before it is made a float, which an integer of hundreds of digits cannot be.
    value: Any = given
    if not 0 <= value <= 1:
        raise InvalidInputError(f"{name}: got {shown(given)}, expected a number from 0 to 1, or None")
    return float(value) or None


def _source(name: str, given: Any, threshold: float | None) -> str | None:
    if given not in (None, DISTRIBUTION, SAMPLER):
        raise InvalidInputError(f"{name}: got {shown(given)}, expected {DISTRIBUTION!r} or {SAMPLER!r}")
    if given != SAMPLER:
        return None if threshold is None else DISTRIBUTION
    if threshold is not None:
        raise InvalidInputError(
            f"{name}: got {SAMPLER!r} and top_logprobs_p {threshold:g}, expected one of them: the sampler's"
            " sets follow top_k, top_p and min_p of sampling_params"
        )
    return SAMPLER


def one_each(name: str, values: Any, count: int, *, per: str = "prompt") -> Sequence[Any]:
    """`values` as a list, where they are `count`, one for each prompt.

    Raises:
        InvalidInputError: they are not; the message names `name`, and `per` as what there is one for each of.
    """
    try:
        given = None if isinstance(values, str | bytes | Mapping | Set) else len(values)
    except TypeError:  # an iterator, or an array of no dimension
        given = None
    if given is None:
        raise InvalidInputError(f"{name}: got {type(values).__name__}, expected one value, or one per {per}")
    if given != count:
        raise InvalidInputError(f"{name}: got {given} values for {count} {per}s")
    return list(values)
