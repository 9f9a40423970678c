"""Pydantic models of error responses, for the OpenAPI page."""

from __future__ import annotations

from pydantic import BaseModel

__all__ = ["ErrorAnswer"]


class ErrorDetail(BaseModel):
    """The error. Programs read its `type`, and people read its `message`."""

    type: str
    message: str


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorDetail
