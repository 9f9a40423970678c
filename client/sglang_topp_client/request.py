"""What a caller asks for, checked before anything is sent: one `SampleRequest` per prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_topp.errors import InvalidInputError

__all__ = ["Prompts", "SampleRequest", "SamplingParams", "TopLogprobsP", "plan"]

Prompts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
SamplingParams: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
TopLogprobsP: TypeAlias = float | Sequence[float | None] | None

_MAX_TOKEN_ID = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class SampleRequest:
    """One prompt, and which of its samples are wanted.

    Attributes:
        prompt_index: its place among the caller's prompts, from 0.
        prompt: text, or token ids.
        sampling_params: SGLang's sampling parameters, without `n`.
        samples: the sample indices that are wanted; a retry asks for those still missing.
        top_logprobs_p: the threshold in (0, 1], or None where no candidate sets are wanted.
    """

    prompt_index: int
    prompt: str | list[int]
    sampling_params: Mapping[str, Any]
    samples: tuple[int, ...]
    top_logprobs_p: float | None


def plan(
    prompts: Prompts, sampling_params: SamplingParams, top_logprobs_p: TopLogprobsP
) -> list[SampleRequest]:
    """Check a caller's arguments and spread them over the prompts.

    Args:
        prompts: one text, several texts, the token ids of one prompt, or of several. Integer arrays
            (NumPy, or anything `numpy.asarray` takes) stand for sequences of ids.
        sampling_params: SGLang's names; one mapping for all, or one per prompt. `n`, 1 by default, is
            the number of samples of each prompt.
        top_logprobs_p: one threshold for all, or one per prompt; None or 0 turns candidate sets off.

    Raises:
        InvalidInputError: an argument is wrong; the message names it.
    """
    all_prompts = _prompts(prompts)
    count = len(all_prompts)
    if sampling_params is None or isinstance(sampling_params, Mapping):
        # Checked once, shared by all.
        params = [_sampling_params("sampling_params", sampling_params or {})] * count
    else:
        params = [
            _sampling_params(f"sampling_params[{i}]", given)
            for i, given in enumerate(_one_each("sampling_params", sampling_params, count))
        ]
    if top_logprobs_p is None or isinstance(top_logprobs_p, float | int | np.number):
        thresholds = [_threshold("top_logprobs_p", top_logprobs_p)] * count
    else:
        thresholds = [
            _threshold(f"top_logprobs_p[{i}]", given)
            for i, given in enumerate(_one_each("top_logprobs_p", top_logprobs_p, count))
        ]
    return [
        SampleRequest(index, prompt, without_n, tuple(range(n)), threshold)
        for index, (prompt, (without_n, n), threshold) in enumerate(
            zip(all_prompts, params, thresholds, strict=True)
        )
    ]


def _prompts(prompts: Any) -> list[str | list[int]]:
    if isinstance(prompts, str):
        return [_text("prompts", prompts)]
    if not isinstance(prompts, Sequence):
        array = _array("prompts", prompts) if hasattr(prompts, "__array__") else None
        if array is None or not array.ndim:
            raise InvalidInputError(
                f"prompts: got {type(prompts).__name__}, expected text, texts, token ids, or lists of these"
            )
        prompts = array
    items = list(prompts)
    if not items:
        raise InvalidInputError("prompts: got none, expected at least one, of at least one token")
    if all(isinstance(item, str) for item in items):
        return [_text(f"prompts[{i}]", item) for i, item in enumerate(items)]
    if all(isinstance(item, int | np.integer) for item in items):
        return [_token_ids("prompts", prompts)]
    if any(isinstance(item, str) for item in items):
        raise InvalidInputError("prompts: got text and token ids in one request, expected one kind")
    return [_token_ids(f"prompts[{i}]", item) for i, item in enumerate(items)]


def _text(name: str, text: str) -> str:
    if not text:
        raise InvalidInputError(f"{name}: got an empty text, expected at least one token")
    return text


def _token_ids(name: str, values: Any) -> list[int]:
    # NumPy reads booleans among integers as 0 and 1.
    if isinstance(values, list | tuple) and bool in set(map(type, values)):
        raise InvalidInputError(f"{name}: got a boolean, expected token ids")
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
    except (TypeError, RuntimeError) as error:  # a tensor that NumPy cannot read
        raise InvalidInputError(f"{name}: cannot be read as token ids: {error}") from None


def _sampling_params(name: str, given: Any) -> tuple[Mapping[str, Any], int]:
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"{name}: got {type(given).__name__}, expected a mapping")
    params = dict(given)
    n = params.pop("n", 1)
    n = 1 if n is None else n
    if not isinstance(n, int | np.integer) or isinstance(n, bool) or n < 1:
        raise InvalidInputError(f"{name}: got n = {n!r}, expected an integer of 1 or more")
    try:
        json.dumps(params, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"{name}: cannot be sent as JSON: {error}") from None
    return params, int(n)


def _threshold(name: str, given: Any) -> float | None:
    if given is None:
        return None
    if not isinstance(given, float | int | np.number) or isinstance(given, bool):
        raise InvalidInputError(f"{name}: got {type(given).__name__}, expected a number from 0 to 1, or None")
    try:
        p = float(given)
    except OverflowError:
        raise InvalidInputError(
            f"{name}: got a number of {int(given).bit_length()} bits, expected one from 0 to 1, or None"
        ) from None
    if math.isnan(p) or not 0 <= p <= 1:
        raise InvalidInputError(f"{name}: got {p}, expected a number from 0 to 1, or None")
    return p or None


def _one_each(name: str, values: Any, count: int) -> Sequence[Any]:
    try:
        given = None if isinstance(values, str | bytes) else len(values)
    except TypeError:  # an iterator, or an array of no dimension
        given = None
    if given is None:
        raise InvalidInputError(f"{name}: got {type(values).__name__}, expected one value, or one per prompt")
    if given != count:
        raise InvalidInputError(f"{name}: got {given} values for {count} prompts")
    return list(values)
