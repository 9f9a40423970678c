"""The settings of one sidecar: addresses, keys, timeouts, and the limits on requests, time, and memory."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Limits", "Settings"]


@dataclass(frozen=True)
class Limits:
    """The limits of one sidecar on requests and memory. The time limit of a request is its caller's alone.

    Attributes:
        max_in_flight: number of samples in flight, over all requests, from which on requests get a 429. A
            sample is in flight from the last byte of its request's body to the last byte of the answer.
        max_samples: maximum number of samples per rollout request, over all prompts. Also the maximum number
            of sequences per score request.
        max_body_bytes: maximum bytes of one request body. At most four bodies of more than 64 KiB are in
            memory at once; others wait.
        io_timeout_s: maximum seconds that a caller may take to send its request body, before it gets a 408.
            Also the maximum seconds for which a caller may leave its answer unread, before the kernel resets
            the connection (Linux only).
        max_held_bytes: maximum bytes of finished samples that are not sent yet, over all requests. If all
            requests together exceed this maximum, the request that holds the most bytes ends with an error.
    """

    max_in_flight: int = 8192
    max_samples: int = 8192
    max_body_bytes: int = 64 * 2**20
    io_timeout_s: float = 60.0
    max_held_bytes: int = 4 * 2**30


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
