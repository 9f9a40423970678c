"""Which weights each token came from, as SGLang's `weight_versions`, both ways.

`[{"version": name, "start": first token, "end": the one after the last}, ...]`: one object for each span of
tokens, in order. A sample without a token has one object that ends at 0, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any, TypeAlias

from sglang_topp.errors import WireError
from sglang_topp_client.checks import is_text, shown

__all__ = ["WeightSpans", "join_spans", "per_token", "spans_from_json", "spans_to_json"]

WeightSpans: TypeAlias = tuple[tuple[str, int], ...]
"""A version and how many tokens came from it, in the order of the tokens."""

_FIELD = "weight_versions"


def spans_to_json(spans: WeightSpans) -> list[dict[str, Any]]:
    """The spans in SGLang's form."""
    objects = []
    start = 0
    for version, count in spans:
        objects.append({"version": version, "start": start, "end": start + count})
        start += count
    return objects


def spans_from_json(value: Any, num_tokens: int) -> WeightSpans | None:
    """The spans that `value`, in SGLang's form, tells; None where it is null.

    Raises:
        WireError: it is of another form, or does not tell of each of the `num_tokens` tokens once.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise WireError(_FIELD, f"got {type(value).__name__}, expected a list")
    spans: list[tuple[str, int]] = []
    position = 0
    for each in value:
        if not isinstance(each, Mapping):
            raise WireError(_FIELD, f"got {shown(each)}, expected an object with version, start and end")
        version, start, end = (each.get(name) for name in ("version", "start", "end"))
        if not isinstance(version, str) or not is_text(version):
            raise WireError(_FIELD, f"got {shown(version)} as a version, expected text")
        if type(start) is not int or type(end) is not int or start != position or end < start:
            raise WireError(
                _FIELD, f"got tokens {shown(start)} to {shown(end)}, expected those from {position} on"
            )
        if end > start:
            spans.append((version, end - start))
        position = end
    if position != num_tokens:
        raise WireError(_FIELD, f"tells of {shown(position)} tokens; the output has {num_tokens}")
    return tuple(spans)


def join_spans(first: WeightSpans, second: WeightSpans) -> WeightSpans:
    """The spans of the tokens of both, one after the other."""
    if first and second and first[-1][0] == second[0][0]:
        (version, count), *rest = second
        return (*first[:-1], (version, first[-1][1] + count), *rest)
    return (*first, *second)


def per_token(spans: WeightSpans) -> tuple[str, ...]:
    """Each token's version."""
    return tuple(chain.from_iterable(repeat(version, count) for version, count in spans))
