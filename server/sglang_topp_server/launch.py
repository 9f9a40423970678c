"""Processes: the sidecar in this one, the engine in a tree of its own, and the end of both."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import uvicorn

from sglang_topp.errors import InvalidInputError, PatchError, ServerError, TransportError
from sglang_topp_server.app import create_app
from sglang_topp_server.connection import http_protocol
from sglang_topp_server.engine import Engine
from sglang_topp_server.heap import return_large_blocks
from sglang_topp_server.limits import Limits
from sglang_topp_server.start_sglang import KEY_VARIABLE

__all__ = ["Settings", "check_free", "engine_command", "engine_environment", "run", "url_of"]

_POLL_S = 0.1
# Longer than clients and load balancers keep idle connections, so that they are the ones to close them.
_KEEP_ALIVE_S = 75
# What the keeper needs beyond the engine's grace: to kill, reap and exit.
_KEEPER_S = 30.0
_STDERR = 2
# When one of its processes has died, SGLang first sleeps for 5 s, and where others of them still run it waits
# for a minute more, to collect diagnostics; until then its callers wait with it.
_DIAGNOSTICS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")


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
    """

    host: str
    port: int
    engine_url: str
    api_key: str | None = field(default=None, repr=False)
    engine_api_key: str | None = field(default=None, repr=False)
    limits: Limits = field(default_factory=Limits)
    ready_timeout_s: float = 1800.0
    grace_s: float = 20.0


class _Server(uvicorn.Server):
    """A uvicorn that leaves signals to `run`, which has more to end than the server."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def engine_command(model_path: str, host: str, port: int, extra: Sequence[str]) -> list[str]:
    """The command that starts SGLang; the patch set comes in through its entry point, the key through the
    environment.

    Args:
        model_path: the model.
        host, port: where the engine is to listen.
        extra: SGLang's own arguments, passed on as they are.
    """
    command = [sys.executable, "-m", "sglang_topp_server.start_sglang", "--model-path", model_path]
    return [*command, "--host", host, "--port", str(port), *extra]


def engine_environment(environment: Mapping[str, str], api_key: str | None) -> dict[str, str]:
    """What the engine finds in its environment: this one's, with the engine's key or none, and without
    the diagnostics of a crash, unless they are asked for there.

    Args:
        environment: this process's.
        api_key: what the engine is to ask of its callers, or None.
    """
    changed = {**dict.fromkeys(_DIAGNOSTICS, "0"), **environment}
    changed.pop(KEY_VARIABLE, None)
    return changed if api_key is None else {**changed, KEY_VARIABLE: api_key}


def url_of(host: str, port: int) -> str:
    """Where a server that listens there is reached from this machine."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def check_free(host: str, port: int) -> int:
    """The port if nothing listens there, or for port 0 one where nothing does.

    Raises:
        InvalidInputError: something does; an engine started there would fail, and the sidecar would talk
            to a stranger meanwhile.
    """
    with _listen(host, port) as probe:
        return int(probe.getsockname()[1])


async def run(settings: Settings, command: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then end what was started; a second signal skips the grace.

    Args:
        settings: how to serve.
        command: starts the engine, which lives and dies with the sidecar; None: it runs elsewhere.

    Raises:
        InvalidInputError: the sidecar's port is taken.
        PatchError: the engine that was started is not patched.
        TransportError: it was not ready in time.
        ServerError: it ended by itself, or the sidecar did.
    """
    return_large_blocks()
    engine = Engine(settings.engine_url, api_key=settings.engine_api_key)
    app = create_app(engine, limits=settings.limits, api_key=settings.api_key)
    server = _Server(
        uvicorn.Config(
            app,
            http=http_protocol(settings.limits),
            ws="none",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, round(settings.grace_s)),
        )
    )
    stopping = asyncio.Event()
    keeper: Process | None = None

    def on_signal() -> None:
        if stopping.is_set():
            server.force_exit = True
            if keeper is not None and keeper.returncode is None:
                keeper.terminate()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)

    listener = _listen(settings.host, settings.port)
    url = url_of(settings.host, listener.getsockname()[1])
    if command is not None:
        keeper = await _start_keeper(command, settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    attending = asyncio.create_task(_attend(engine, keeper, settings, url))
    signalled = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({signalled, serving, attending}, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            return
        for task in (attending, serving):
            if task.done():
                task.result()
        raise ServerError("the sidecar stopped by itself; its own words are above")
    finally:
        stopping.set()
        attending.cancel()
        server.should_exit = True
        await asyncio.gather(serving, attending, return_exceptions=True)
        if keeper is not None:
            await _end_keeper(keeper, settings.grace_s)


async def _attend(engine: Engine, keeper: Process | None, settings: Settings, url: str) -> None:
    """Say where the servers are, once the engine is ready if it is ours, and raise when that one ends."""
    if keeper is None:
        print(f"sglang-topp sidecar at {url} (engine: {settings.engine_url})", flush=True)
        await asyncio.Event().wait()
        return
    deadline = asyncio.get_running_loop().time() + settings.ready_timeout_s
    ended = asyncio.create_task(keeper.wait())
    while engine.status.phase != "ready":
        if ended.done():
            raise ServerError(
                f"the engine ended with exit status {ended.result()} before it was ready;"
                " its own words are above"
            )
        if engine.status.phase == "unpatched":
            raise PatchError(engine.status.reason)
        if asyncio.get_running_loop().time() > deadline:
            raise TransportError(
                f"not ready after {settings.ready_timeout_s:g} s (--ready-timeout-s): {engine.status.reason}"
            )
        await asyncio.wait({ended}, timeout=_POLL_S)
    print(f"sglang-topp is ready: sidecar {url} engine {settings.engine_url}", flush=True)
    raise ServerError(f"the engine ended with exit status {await ended}; its own words are above")


async def _start_keeper(command: Sequence[str], settings: Settings) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sglang_topp_server.keeper",
        str(settings.grace_s),
        *command,
        env=engine_environment(os.environ, settings.engine_api_key),
        stdin=PIPE,
        # Standard output carries the line that says where the servers are, and nothing else.
        stdout=_STDERR,
        # A Ctrl-C in the terminal is for this process, which then ends the engine in order.
        start_new_session=True,
    )


async def _end_keeper(keeper: Process, grace_s: float) -> None:
    assert keeper.stdin is not None
    keeper.stdin.write(b".")
    keeper.stdin.close()
    try:
        await asyncio.wait_for(keeper.wait(), grace_s + _KEEPER_S)
    except TimeoutError:
        raise ServerError(f"the engine's processes (keeper {keeper.pid}) do not end") from None


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise InvalidInputError(f"cannot listen on {host} port {port}: {error}") from None
