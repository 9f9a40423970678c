"""The settings of one sidecar: addresses, keys, limits, and timeouts."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_topp_server.limits.settings import Limits

__all__ = ["Settings"]


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
