"""ServerConfig: the address, key, headers, TLS settings, and limits of one server, and their checks."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from sglang_topp.errors import InvalidInputError, describe
from sglang_topp_client.value_checks import whole_number

Kind: TypeAlias = Literal["sidecar", "sglang"]
"""What a server is: a sidecar, or a patched SGLang."""

ROUTING_KEY = "X-SMG-Routing-Key"
"""The HTTP header that holds a routing key. Gateways send requests with the same key to the same worker."""

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NO_HEADER_VALUE = "expected printable ASCII text without a space or line end around it"
# Headers that only the client may set. A caller's value would break the connection, the decoding of the
# answer, or the routing.
_RESERVED = {
    *("accept", "accept-encoding", "connection", "transfer-encoding", ROUTING_KEY.lower()),
    *("content-encoding", "content-length", "content-type"),
}


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of one server's connections: address, key, headers, TLS settings, and limits.

    `throttle` passes on the bytes of each streamed answer, and may delay the reading of more.

    The client ignores the proxy settings of the environment, because the servers usually run in the client's
    own cluster, and need no proxy.

    Raises:
        InvalidInputError: the value of `base_url` is not an http(s) address, `api_key` or `headers` cannot be
            sent, `ssl` is not an SSLContext, or a limit is not a positive number.
    """

    base_url: str
    max_connections: int = 1024
    max_message_bytes: int = 512 * 2**20
    api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    ssl: SSLContext | None = None
    throttle: Callable[[AsyncGenerator[bytes, None]], AsyncGenerator[bytes, None]] | None = None

    def __post_init__(self) -> None:
        _check_url("base_url", self.base_url)
        check_key("api_key", self.api_key)
        object.__setattr__(self, "headers", _checked_headers(self.headers))
        if self.api_key is not None and "authorization" in self.headers:
            raise InvalidInputError(
                "headers: got Authorization beside an API key, which is sent in that header; expected one"
            )
        if self.ssl is not None and not isinstance(self.ssl, SSLContext):
            raise InvalidInputError(f"ssl: got {type(self.ssl).__name__}, expected an ssl.SSLContext")
        whole_number("max_connections", self.max_connections, 1)
        whole_number("max_message_bytes", self.max_message_bytes, 1)


def check_key(name: str, key: Any) -> None:
    """Raise InvalidInputError unless `key` is None or valid in an HTTP header. The message omits `key`."""
    if key is not None and not (_is_header_value(key) and key):
        raise InvalidInputError(f"{name}: {_NO_HEADER_VALUE}")


def _is_header_value(value: Any) -> bool:
    return isinstance(value, str) and value.isascii() and value.isprintable() and value.strip() == value


def server_urls(name: str, urls: Any) -> list[str]:
    """Check the URLs, and return them without their last slash, as a list with one URL per server.

    Raises:
        InvalidInputError: no URL is given, a URL is given twice, or a URL is not an http(s) address.
    """
    if isinstance(urls, str | bytes) or not isinstance(urls, Sequence):
        urls = [urls]
    if not urls:
        raise InvalidInputError(f"{name}: got none, expected at least one")
    for url in urls:
        _check_url(name, url)
    plain = [url.rstrip("/") for url in urls]
    if twice := [url for i, url in enumerate(plain) if url in plain[:i]]:
        raise InvalidInputError(f"{name}: got {describe(twice[0])} twice, expected different servers")
    return plain


def _check_url(name: str, value: Any) -> None:
    """Raise InvalidInputError unless `value` is the http(s) address of a server."""
    if not isinstance(value, str):
        raise InvalidInputError(f"{name}: got {type(value).__name__}, expected text")
    try:
        url = urlsplit(value)
        is_address = url.scheme in ("http", "https") and url.hostname and (url.port is None or url.port > 0)
        is_address = is_address and value.isprintable() and " " not in value
    except ValueError as error:
        raise InvalidInputError(f"{name}: got {describe(value)}: {error}") from None
    if not is_address or url.query or url.fragment or url.username is not None:
        raise InvalidInputError(
            f"{name}: got {describe(value)}, expected http://host:port or https://…, without a query"
            " or a user name"
        )


def _checked_headers(headers: Any) -> dict[str, str]:
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
        if not _is_header_value(value):
            raise InvalidInputError(f"headers: the value of {name}: {_NO_HEADER_VALUE}")
    return {name.lower(): value for name, value in headers.items()}
