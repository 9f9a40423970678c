"""The uvicorn server that runs the sidecar's application."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from sglang_topp.malloc_trim import return_large_blocks_at_once
from sglang_topp_server.api.app import create_app
from sglang_topp_server.engine.client import EngineClient
from sglang_topp_server.settings import Settings

__all__ = ["Server"]

# Seconds after which uvicorn closes an idle connection. A request fails if uvicorn closes the connection just
# as the request arrives. Most clients and load balancers have shorter keep-alive timeouts, so they close an
# idle connection before uvicorn does.
_KEEP_ALIVE_S = 75


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
        """Skip uvicorn's signal handlers, because `launch.run` handles signals."""
        yield

    def stop(self) -> None:
        """Stop the server after the requests in flight have ended, or after the grace period.

        A second call stops the server at once.
        """
        self.force_exit = self.should_exit
        self.should_exit = True
