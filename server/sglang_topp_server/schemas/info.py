"""Pydantic models of the answer to `GET /info`: engine, plugin, and limits."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, Field

from sglang_topp.engine_contract import Model
from sglang_topp_client.protocols.sidecar import SERVICE
from sglang_topp_server.settings import Limits

__all__ = ["EngineInfo", "Info", "ModelInfo", "PatchInfo"]


class ModelInfo(BaseModel):
    """The sizes of the engine's model, and the maximum length of a text prompt.

    `max_token_chars` is the number of characters in the tokenizer's longest token.
    """

    vocab_size: int
    context_length: int
    max_token_chars: int
    max_text_chars: int = Field(description="Maximum characters of a text prompt.")

    @classmethod
    def of(cls, model: Model) -> ModelInfo:
        """Build a `ModelInfo` from the vocabulary size and the other sizes that the engine reported."""
        return cls(**asdict(model), max_text_chars=model.max_text_chars)


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
