"""HTTP errors: turn aiohttp's exceptions and the answers of servers into this project's exceptions."""

from __future__ import annotations

import errno
import json
import math
import time
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from sglang_topp import errors
from sglang_topp.errors import (
    AuthenticationError,
    BadRequestError,
    OverloadedError,
    ResponseError,
    ServerError,
    SglangToppError,
    TransportError,
)
from sglang_topp_client.argument_checks import MAX_BODY_CHARS, MAX_MESSAGE_CHARS, truncate
from sglang_topp_client.transport import fd_limit
from sglang_topp_client.transport.fd_limit import FileLimitError
from sglang_topp_client.wire.error_json import error_from_json

__all__ = ["CONNECT_TIMEOUT_S", "response_error", "transport_error"]

CONNECT_TIMEOUT_S = 10.0

_MAX_ERROR_BYTES = 1 << 16


def transport_error(url: str, error: aiohttp.ClientError | OSError) -> TransportError:
    """Return the error of a request that got no complete answer."""
    if isinstance(error, TimeoutError):
        return TransportError(f"{url}: no connection in {CONNECT_TIMEOUT_S:g} s")
    is_connecting = isinstance(error, aiohttp.ClientConnectorError | OSError)
    if is_connecting and (sentence := fd_limit.shortage(error)) is not None:
        return FileLimitError(f"{url}: {sentence}")
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED:
        return TransportError(
            f"{url}: nothing listens at {error.host}:{error.port} (connection refused); start one, for"
            f" example with `sglang-topp serve --model-path MODEL --port {error.port}`, or give the address"
            " of a server that runs"
        )
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return TransportError(
            f"{url}: the server's certificate is not trusted: {error.certificate_error}; name its CA in the"
            " SSLContext that you pass as ssl=, or in the file of SSL_CERT_FILE"
        )
    return TransportError(f"{url}: {type(error).__name__}: {error}")


async def response_error(response: aiohttp.ClientResponse) -> SglangToppError:
    """Return the error that an answer with another status than 200 reports."""
    raw = b""
    async for data in response.content.iter_any():
        raw += data
        if len(raw) > _MAX_ERROR_BYTES:
            break
    body = raw[:MAX_BODY_CHARS].decode("utf-8", "replace")
    status = response.status
    reported = _reported(raw)
    sentence = reported.get("message") or reported.get("detail") or body
    words = truncate(sentence, MAX_MESSAGE_CHARS)
    message = f"{response.method} {response.url}: HTTP {status}: {words}"
    if status in (401, 403):
        return AuthenticationError(message, status=status, body=body)
    if status == 429:
        return OverloadedError(
            message,
            status=status,
            body=body,
            retry_after_s=_retry_after_s(response.headers.get("Retry-After")),
        )
    if 400 <= status < 500:
        return BadRequestError(message, status=status, body=body)
    if status >= 500:
        # A sidecar names the class of the error in its 5xx answers, because the client must not retry every
        # 5xx error.
        if isinstance(reported.get("type"), str) and reported["type"] in errors.__all__:
            return error_from_json(reported | {"status": status})
        return ServerError(message, status=status, body=body)
    if 300 <= status < 400:
        message += f" (a redirect to {response.headers.get('Location')}; not followed, use it as base_url)"
    return ResponseError(message, status=status, body=body)


def _reported(raw: bytes) -> dict[str, Any]:
    """Return the fields of an error answer's body, or an empty dict if the body has none of the known forms.

    The known forms of a body are `{"error": {...}}`, `{"error": "..."}`, and an object without `error`.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    if isinstance(body, dict) and "error" in body:
        body = body["error"]
    if isinstance(body, str):
        return {"message": body}
    return body if isinstance(body, dict) else {}


def _retry_after_s(value: str | None) -> float | None:
    if value is None:
        return None
    try:
        wait_s = max(0.0, float(value))
        return wait_s if wait_s < math.inf else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError, OSError):
        return None
