"""Types, JSON schemas, and descriptions of the fields that several request bodies share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Protocol, TypeAlias

from pydantic import Field, StrictBool, StrictStr, WithJsonSchema

from sglang_topp_client.argument_checks import MAX_REQUEST_ID
from sglang_topp_client.requests import SampleRequest
from sglang_topp_client.types.rollout import DISTRIBUTION, SAMPLER

__all__ = [
    "Counts",
    "Prompts",
    "Records",
    "RequestId",
    "SampleBody",
    "Sequences",
    "Source",
    "Start",
    "Stream",
    "Threshold",
    "TimeoutS",
]

# Fields that may hold millions of ids have the type `Any`, so that Pydantic does not check each element.
# `sglang_topp_client.requests` checks the elements, and names the invalid prompt in its error.
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_TEXTS_OR_IDS = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    _TOKEN_IDS,
    {"type": "array", "items": _TOKEN_IDS},
]
_MESSAGES = {"type": "array", "items": {"type": "object", "required": ["role"]}}
Prompts: TypeAlias = Annotated[
    Any, WithJsonSchema({"anyOf": [*_TEXTS_OR_IDS, _MESSAGES, {"type": "array", "items": _MESSAGES}]})
]
Sequences: TypeAlias = Annotated[Any, WithJsonSchema({"anyOf": _TEXTS_OR_IDS})]


def _one_or_each(item: dict[str, Any]) -> WithJsonSchema:
    """Return the schema of a field with one value for all prompts, or a list with one value per prompt."""
    each = {"type": "array", "items": {"anyOf": [item, {"type": "null"}]}}
    return WithJsonSchema({"anyOf": [item, each, {"type": "null"}]})


Threshold: TypeAlias = Annotated[Any, _one_or_each({"type": "number", "minimum": 0, "maximum": 1})]
Source: TypeAlias = Annotated[Any, _one_or_each({"type": "string", "enum": [DISTRIBUTION, SAMPLER]})]
Counts: TypeAlias = Annotated[Any, _one_or_each({"type": "integer", "minimum": 0})]
Start: TypeAlias = Annotated[Any, _one_or_each({"type": "integer", "minimum": 1})]
Records: TypeAlias = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]})
]

Stream: TypeAlias = Annotated[
    StrictBool, Field(description="Send one message per sample as it finishes, instead of one JSON object.")
]
RequestId: TypeAlias = Annotated[
    StrictStr | None,
    Field(
        description="The prefix of the request's ids in the engine's log: printable, at most"
        f" {MAX_REQUEST_ID} characters."
    ),
]
TimeoutS: TypeAlias = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True)] | None,
    Field(description="Seconds after which the samples are aborted with a 504. The server also has a limit."),
]


class SampleBody(Protocol):
    """The fields that the bodies of `POST /rollouts` and `POST /scores` share."""

    stream: bool
    request_id: str | None
    timeout_s: float | None

    @property
    def wanted(self) -> Sequence[SampleRequest]:
        """One `SampleRequest` for each prompt, or for each sequence to score."""
