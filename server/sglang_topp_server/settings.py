"""The settings of one sidecar: addresses, keys, timeouts, and the limits on requests, time, and memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Limits", "Settings"]


def _limit(default: Any, what: str) -> Any:
    """Declare a limit, which is also an option of `sglang-topp serve` and `sidecar`; `what` is its help."""
    return field(default=default, metadata={"help": what})


@dataclass(frozen=True)
class Limits:
    """The limits of one sidecar on requests and memory. The time limit of a request is its caller's alone.

    A sample is in flight from the last byte of its request's body to the last byte of the answer. If the
    finished samples of all requests together exceed `max_held_bytes`, the request that holds the most ends
    with an error.
    """

    max_in_flight: int = _limit(8192, "samples at once from which on requests get a 429")
    max_samples: int = _limit(8192, "maximum samples of one request: prompts times n, or sequences to score")
    max_body_bytes: int = _limit(64 * 2**20, "maximum bytes of one request body")
    io_timeout_s: float = _limit(
        60.0,
        "seconds that a caller has to send its body before it gets a 408, and that it may leave its answer"
        " unread before its connection is reset (Linux)",
    )
    max_held_bytes: int = _limit(4 * 2**30, "maximum bytes of finished samples that wait for their callers")


@dataclass(frozen=True)
class Settings:
    """The settings of one sidecar.

    Attributes:
        host, port: the sidecar's address; port 0 selects any free port.
        engine_url: the engine's address.
        api_key: the key that callers of the sidecar must send, or None if they need no key.
        engine_api_key: the key that the sidecar sends to the engine, or None if the engine needs no key.
        limits: the sidecar's limits.
        ready_timeout_s: maximum seconds from the engine's start until the engine is ready. The limit applies
            only to an engine that `sglang-topp serve` starts.
        grace_s: seconds that requests in flight may continue after a signal. After the sidecar has stopped,
            the engine has another `grace_s` seconds to end.
        view: how many recent rollouts `GET /view` shows; 0 turns the route off.
    """

    host: str
    port: int
    engine_url: str
    api_key: str | None = field(default=None, repr=False)
    engine_api_key: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
    ready_timeout_s: float = 1800.0
    grace_s: float = 20.0
    view: int = 0
