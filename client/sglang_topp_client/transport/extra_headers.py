"""Check the HTTP headers that a caller adds to every request, and define the routing-key header's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sglang_topp.errors import InvalidInputError, describe

__all__ = ["ROUTING_KEY", "as_headers"]

ROUTING_KEY = "X-SMG-Routing-Key"
"""The HTTP header that holds a routing key. Gateways send requests with the same key to the same worker."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Headers that only the client may set. A caller's value would break the connection, the decoding of the
# answer, or the routing.
_RESERVED = {
    "accept",
    "accept-encoding",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "transfer-encoding",
    ROUTING_KEY.lower(),
}


def as_headers(headers: Any) -> dict[str, str]:
    """Return a copy of a caller's headers with lowercase names.

    Raises:
        InvalidInputError: a name or a value is invalid in HTTP, or a name belongs to a header that only the
            client may set. The error message hides the values, because a value may be a secret.
    """
    if not isinstance(headers, Mapping):
        raise InvalidInputError(
            f"headers: got {type(headers).__name__}, expected a mapping of names to values"
        )
    for name, value in headers.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidInputError(f"headers: got the name {describe(name)}, expected a header's name")
        if name.lower() in _RESERVED:
            raise InvalidInputError(f"headers: got {name}, which the client sets itself; leave it out")
        if not (
            isinstance(value, str) and value.isascii() and value.isprintable() and value.strip() == value
        ):
            raise InvalidInputError(
                f"headers: the value of {name}: expected printable ASCII text without a space or line end"
                " around it"
            )
    return {name.lower(): value for name, value in headers.items()}
