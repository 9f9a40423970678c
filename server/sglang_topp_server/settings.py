"""The settings of one sidecar, which are also the options of `sglang-topp serve` and `sidecar`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, what: str) -> Any:
    """Declare a setting that is also an option of the command; `what` is its help."""
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True)
class Limits:
    """The limits of one sidecar on requests and memory. The time limit of a request is its caller's alone.

    A sample is in flight from the last byte of its request's body to the last byte of the answer. If the
    finished samples of all requests together exceed `max_held_bytes`, the request that holds the most ends
    with an error.
    """

    max_in_flight: int = _option(8192, "samples at once from which on requests get a 429")
    max_samples: int = _option(8192, "maximum samples of one request: prompts times n, or sequences to score")
    max_body_bytes: int = _option(64 * 2**20, "maximum bytes of one request body")
    io_timeout_s: float = _option(
        60.0,
        "seconds that a caller has to send its body before it gets a 408, and that it may leave its answer"
        " unread before its connection is reset (Linux)",
    )
    max_held_bytes: int = _option(4 * 2**30, "maximum bytes of finished samples that wait for their callers")


@dataclass(frozen=True)
class Settings:
    """The settings of one sidecar.

    Attributes:
        engine_url: the engine's address.
        api_key: the key that callers of the sidecar must send, or None if they need no key.
        engine_api_key: the key that the sidecar sends to the engine, or None if the engine needs no key.
        limits: the sidecar's limits.
        host, port: the sidecar's address.
        grace_s: after the sidecar has stopped, the engine has another `grace_s` seconds to end.
        ready_timeout_s: applies only to an engine that `sglang-topp serve` starts.
    """

    engine_url: str
    api_key: str | None = field(default=None, repr=False)
    engine_api_key: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
    host: str = _option("127.0.0.1", "the sidecar's listen address")
    port: int = _option(30010, "the sidecar's port; 0: a free one")
    grace_s: float = _option(
        20.0, "seconds that requests in flight have to end after a signal, and then the engine"
    )
    view: int = _option(0, "how many of the last rollouts are in memory and shown at GET /view")
    ready_timeout_s: float = _option(1800.0, "seconds until SGLang must be ready")
