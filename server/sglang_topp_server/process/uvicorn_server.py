"""The sidecar's uvicorn server, and the sidecar's settings: addresses, keys, limits, and timeouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from sglang_topp.malloc_trim import return_large_blocks_at_once
from sglang_topp_server.api.app import create_app
from sglang_topp_server.engine.client import EngineClient
from sglang_topp_server.limits.settings import Limits

__all__ = ["Server", "Settings"]

# This timeout is longer than the keep-alive timeouts of clients and load balancers. So the client or the load
# balancer closes an idle connection first.
_KEEP_ALIVE_S = 75


@dataclass(frozen=True)
class Settings:
    """The settings of one sidecar.

    Attributes:
        host, port: the sidecar's address; port 0 takes a free port.
        engine_url: the engine's address.
        api_key: the key that callers of the sidecar must send, or None if they need no key.
        engine_api_key: the key that the sidecar sends to the engine, or None if the engine needs no key.
        limits: the sidecar's limits.
        ready_timeout_s: the time limit in seconds for an engine that `serve` starts to become ready.
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


class Server(uvicorn.Server):
    """The sidecar's uvicorn server. On a signal, `launch.run` stops this server and the engine.

    Args:
        settings: the sidecar's settings.
    """

    def __init__(self, settings: Settings) -> None:
        return_large_blocks_at_once()
        self.engine = EngineClient(settings.engine_url, api_key=settings.engine_api_key)
        app = create_app(self.engine, limits=settings.limits, api_key=settings.api_key, view=settings.view)
        super().__init__(
            uvicorn.Config(
                app,
                ws="none",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(settings.grace_s)),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install none of uvicorn's signal handlers, because `launch.run` handles signals."""
        yield

    def stop(self) -> None:
        """Stop the server after the requests in flight have ended. A second call stops the server at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
