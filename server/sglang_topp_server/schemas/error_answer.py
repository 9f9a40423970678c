"""Pydantic models of error responses, which the OpenAPI page shows."""

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
