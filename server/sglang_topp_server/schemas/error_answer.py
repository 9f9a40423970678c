"""Pydantic models of the sidecar's error responses, for the OpenAPI page."""

from __future__ import annotations

from pydantic import BaseModel

__all__ = ["ErrorAnswer"]


class ErrorDetail(BaseModel):
    """The error: a `type` for programs to read, and a `message` for people."""

    type: str
    message: str


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorDetail
