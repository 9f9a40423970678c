"""Weight spans: the weight version of each token, run-length encoded, and converters for SGLang's JSON.

SGLang's field `weight_versions` has one object for each span, in order::

    [{"version": name, "start": first token, "end": one past the last token}, ...]

A sample without tokens has no object, or one object that ends at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any, TypeAlias

from sglang_topp.errors import WireError, describe
from sglang_topp_client.argument_checks import is_text

__all__ = ["WeightSpans", "expand_spans", "join_spans", "spans_from_json", "spans_to_json"]

WeightSpans: TypeAlias = tuple[tuple[str, int], ...]
"""`((version, number of tokens), ...)`, in the order of the tokens."""

_FIELD = "weight_versions"


def spans_to_json(spans: WeightSpans) -> list[dict[str, Any]]:
    """Convert spans to the JSON value of SGLang's field `weight_versions`."""
    objects = []
    start = 0
    for version, count in spans:
        objects.append({"version": version, "start": start, "end": start + count})
        start += count
    return objects


def spans_from_json(value: Any, num_tokens: int) -> WeightSpans | None:
    """Convert the JSON value of SGLang's field `weight_versions` to spans. Return None for null.

    Raises:
        WireError: `value` is malformed, or does not cover each of the `num_tokens` tokens exactly once.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise WireError(_FIELD, f"got {type(value).__name__}, expected a list")
    spans: list[tuple[str, int]] = []
    position = 0
    for each in value:
        if not isinstance(each, Mapping):
            raise WireError(_FIELD, f"got {describe(each)}, expected an object with version, start, and end")
        version, start, end = (each.get(name) for name in ("version", "start", "end"))
        if not isinstance(version, str) or not is_text(version):
            raise WireError(_FIELD, f"got {describe(version)} as a version, expected text")
        if type(start) is not int or type(end) is not int or start != position or end < start:
            raise WireError(
                _FIELD, f"got tokens {describe(start)} to {describe(end)}, expected those from {position} on"
            )
        if end > start:
            spans.append((version, end - start))
        position = end
    if position != num_tokens:
        raise WireError(_FIELD, f"got versions of {describe(position)} tokens, expected {num_tokens}")
    return tuple(spans)


def join_spans(first: WeightSpans, second: WeightSpans) -> WeightSpans:
    """Concatenate the spans of two parts. Adjacent spans of the same version are merged."""
    if first and second and first[-1][0] == second[0][0]:
        (version, count), *rest = second
        return (*first[:-1], (version, first[-1][1] + count), *rest)
    return (*first, *second)


def expand_spans(spans: WeightSpans) -> tuple[str, ...]:
    """Return the version of each token."""
    return tuple(chain.from_iterable(repeat(version, count) for version, count in spans))
