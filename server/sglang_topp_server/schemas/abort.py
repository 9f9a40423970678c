"""Pydantic models of `POST /abort`, and the parser of its body."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from sglang_topp.errors import BadRequestError
from sglang_topp_client.argument_checks import check_request_id
from sglang_topp_server.schemas.body_parsing import read_body

__all__ = ["AbortAnswer", "AbortBody", "parse_abort"]


class AbortBody(BaseModel):
    """The body of `POST /abort`. A body must set exactly one of `request_id` and `all`."""

    model_config = ConfigDict(extra="forbid")

    request_id: StrictStr | None = Field(
        default=None,
        description="The request's `request_id` in `POST /rollouts`, or its id in the engine's log.",
    )
    all: StrictBool = Field(default=False, description="Abort all requests in the engine, of all callers.")


def parse_abort(body: bytes | bytearray) -> AbortBody:
    """Parse and check the body of `POST /abort`.

    Raises:
        BadRequestError, InvalidInputError: the body is invalid (400). The message names the field, the
            value, and the accepted values.
    """
    order = read_body(body, AbortBody)
    if (order.request_id is None) != order.all:
        raise BadRequestError(
            "request_id: got both request_id and all, or neither; expected exactly one", status=400
        )
    if order.request_id is not None:
        check_request_id(order.request_id)
    return order


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
