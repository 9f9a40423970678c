"""The OpenAPI page: Pydantic models of the sidecar's answers and errors, and schemas of its bodies."""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field, create_model

from sglang_topp_client import Rollout, Score
from sglang_topp_client.protocols.sidecar import SERVICE
from sglang_topp_client.wire.records import JSON_FIELDS
from sglang_topp_server.settings import Limits


class ModelInfo(BaseModel):
    """The sizes of the engine's model, and the maximum length of a text prompt.

    `max_token_chars` is the number of characters in the tokenizer's longest token.
    """

    model_config = ConfigDict(from_attributes=True)

    vocab_size: int
    context_length: int
    max_token_chars: int
    max_text_chars: int = Field(description="Maximum characters of a text prompt.")


class EngineInfo(BaseModel):
    """The engine that the sidecar calls. Each field is null until the engine has reported a value.

    `weight_version` is the version at the time of this answer; a gateway reports that of one of its workers.
    """

    model_path: str | None
    sglang_version: str | None
    weight_version: str | None
    model: ModelInfo | None


class PatchInfo(BaseModel):
    """The state of the engine's plugin. The sidecar copies `version` and `seams` from the engine's report.

    The keys of `seams` are the names of the SGLang functions and classes that the plugin depends on. Each
    value is `"holds"` if the function or class is as the plugin expects, and otherwise describes the
    problem.
    """

    active: bool
    version: Any
    seams: Any
    problems: list[str]


class Info(BaseModel):
    """The answer to `GET /info`."""

    service: str = SERVICE
    version: str
    ready: bool
    reason: str = Field(description="Why the engine is not ready; empty if it is ready.")
    engine: EngineInfo
    patch: PatchInfo
    limits: Limits


class ErrorDetail(BaseModel):
    """The error: a `type` for programs to read, and a `message` for people."""

    type: str
    message: str
    status: int


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorDetail


def field_docstrings(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a class and of its bases in the same module."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one.__module__ != kind.__module__:
            continue
        (tree,) = ast.parse(inspect.getsource(one)).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in pairwise(tree.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found


def _record_model(result: type[Rollout | Score]) -> type[BaseModel]:
    """Return the model of a result's JSON record, with the types and the descriptions that its class
    declares."""
    docstrings = field_docstrings(result)
    declared: dict[str, Any] = {}
    for field, in_json in JSON_FIELDS[result]:
        description = docstrings[field.name] + (f" In JSON, {in_json.form}." if in_json.form else "")
        kind = in_json.json | None if field.is_optional else in_json.json
        declared[in_json.name] = (kind, Field(description=description))
        if field.count_name:
            declared[field.count_name] = (int, Field(description=f"The number of `{field.name}`."))
    return create_model(
        f"{result.__name__}Record",
        __config__=ConfigDict(extra="forbid"),
        __doc__=inspect.getdoc(result),
        **declared,
    )


RolloutRecord, ScoreRecord = _record_model(Rollout), _record_model(Score)
RolloutsAnswer = create_model(
    "RolloutsAnswer",
    __doc__="The answer to a request without `stream`: all samples, ordered by prompt, then by sample.",
    rollouts=(list[RolloutRecord], ...),  # type: ignore[valid-type]  # made above
)
ScoresAnswer = create_model(
    "ScoresAnswer",
    __doc__="The answer to a request without `stream`: all scores, in the order of the request's sequences.",
    scores=(list[ScoreRecord], ...),  # type: ignore[valid-type]  # made above
)


class AbortAnswer(BaseModel):
    """The answer to `POST /abort`, sent after the aborted requests have stopped.

    The sidecar answers `ok` even if no request has the given `request_id`.
    """

    status: str = "ok"
    aborted: int | None = Field(
        default=None,
        description="How many prompts of this sidecar's requests it aborted. Null for `all`, which also"
        " aborts requests that others sent to the engine.",
    )


def body_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the OpenAPI description of a request body."""
    schema: dict[str, Any] = msgspec.json.schema(kind)["$defs"][kind.__name__]
    for name, text in field_docstrings(kind).items():
        schema["properties"][name]["description"] = text
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
