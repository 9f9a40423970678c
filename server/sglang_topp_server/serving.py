"""Serving: the sidecar's uvicorn, in the only process that there is, or in one of several."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import uvicorn

from sglang_topp_server.app import Siblings, create_app
from sglang_topp_server.connection import http_protocol
from sglang_topp_server.engine import Engine
from sglang_topp_server.heap import return_large_blocks
from sglang_topp_server.limits import Limits
from sglang_topp_server.metrics import Metrics

__all__ = ["Server", "Settings"]

# Longer than clients and load balancers keep idle connections, so that they are the ones to close them.
_KEEP_ALIVE_S = 75


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        host, port: where the sidecar listens; port 0 takes a free one.
        engine_url: where the engine answers.
        api_key: what callers of the sidecar need; None: nothing.
        engine_api_key: what the engine needs; None: nothing.
        limits: what the sidecar accepts.
        ready_timeout_s: how long an engine that is started here may take until it is ready.
        grace_s: how long requests in flight may go on after a signal, and the engine after them.
        workers: in how many processes the sidecar serves.
    """

    host: str
    port: int
    engine_url: str
    api_key: str | None = field(default=None, repr=False)
    engine_api_key: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
    ready_timeout_s: float = 1800.0
    grace_s: float = 20.0
    workers: int = 1

    def of_worker(self, place: int) -> Settings:
        """Those of one worker: what is limited for all of them together, it has its share of."""

        def share(total: int) -> int:
            return (total + place) // self.workers

        limits = self.limits
        return replace(
            self,
            limits=replace(
                limits,
                max_in_flight=share(limits.max_in_flight),
                max_held_bytes=share(limits.max_held_bytes),
            ),
        )


class Server(uvicorn.Server):
    """The sidecar before its engine; it leaves signals to who runs it, which has more to end.

    Args:
        settings: how to serve.
        siblings: the other workers, where there are any.
        http: the class of connections; None is that of the limits.
    """

    def __init__(
        self,
        settings: Settings,
        siblings: Siblings | None = None,
        http: type[asyncio.Protocol] | None = None,
    ) -> None:
        return_large_blocks()
        self.engine, self.metrics = Engine(settings.engine_url, api_key=settings.engine_api_key), Metrics()
        app = create_app(
            self.engine,
            limits=settings.limits,
            api_key=settings.api_key,
            metrics=self.metrics,
            siblings=siblings,
        )
        super().__init__(
            uvicorn.Config(
                app,
                http=http or http_protocol(settings.limits),
                ws="none",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(settings.grace_s)),
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are."""
        yield

    def stop(self) -> None:
        """End once what is in flight has; a second time: now."""
        self.force_exit = self.should_exit
        self.should_exit = True

    async def take(self, connection: socket.socket) -> None:
        """Serve a connection that another process has accepted."""

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]  # as uvicorn does
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        await asyncio.get_running_loop().connect_accepted_socket(protocol, connection)
