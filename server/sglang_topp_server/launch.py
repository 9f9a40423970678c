"""Processes: the sidecar in this one, the engine in a tree of its own, and the end of both."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress

from sglang_topp.errors import InvalidInputError, PatchError, ServerError, TransportError
from sglang_topp_server.engine_status import Phase
from sglang_topp_server.serving import Server, Settings
from sglang_topp_server.start_sglang import KEY_VARIABLE
from sglang_topp_server.workers import Workers

__all__ = ["check_free", "engine_command", "engine_environment", "run", "url_of"]

_POLL_S = 0.1
_UNTIL_THE_ENGINE_LISTENS = range(10_000, 22_000)
# What the keeper needs beyond the engine's grace: to kill, reap and exit.
_KEEPER_S = 30.0
_STDERR = 2
# When one of its processes has died, SGLang first sleeps for 5 s, and where others of them still run it waits
# for a minute more, to collect diagnostics; until then its callers wait with it.
_DIAGNOSTICS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")


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

    Linux hands ports from 32768 on to whoever connects, and an engine listens half a minute after this: for
    port 0 it is one below those, as is the one 10,000 above it, which SGLang may take too.

    Raises:
        InvalidInputError: something does; an engine started there would fail, and the sidecar would talk
            to a stranger meanwhile.
    """
    candidates = [port] if port else random.sample(_UNTIL_THE_ENGINE_LISTENS, 100)
    for candidate in candidates[:-1]:
        with suppress(InvalidInputError):
            return _check_free(host, candidate)
    return _check_free(host, candidates[-1])


def _check_free(host: str, port: int) -> int:
    with _listen(host, port):
        return port


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
    stopping = asyncio.Event()
    keeper: Process | None = None

    def on_signal() -> None:
        if stopping.is_set():
            server.stop()
            if keeper is not None and keeper.returncode is None:
                keeper.terminate()
        stopping.set()

    server: _Alone | Workers = _Alone(settings) if settings.workers == 1 else Workers(settings)
    listener = _listen(settings.host, settings.port)
    url = url_of(settings.host, listener.getsockname()[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    if command is not None:
        keeper = await _start_keeper(command, settings)
    serving = asyncio.create_task(server.serve(listener))
    attending = asyncio.create_task(_attend(server, keeper, settings, url))
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
        server.stop()
        await asyncio.gather(serving, attending, return_exceptions=True)
        if keeper is not None:
            await _end_keeper(keeper, settings.grace_s)


class _Alone:
    """The sidecar in this process, as `Workers` is it in several."""

    def __init__(self, settings: Settings) -> None:
        self._server = Server(settings)

    @property
    def engine(self) -> tuple[Phase, str]:
        status = self._server.engine.status
        return status.phase, status.reason

    @property
    def has_started(self) -> bool:
        return True

    async def started(self) -> None:
        return

    async def serve(self, listener: socket.socket) -> None:
        await self._server.serve(sockets=[listener])

    def stop(self) -> None:
        self._server.stop()


async def _attend(server: _Alone | Workers, keeper: Process | None, settings: Settings, url: str) -> None:
    """Say where the servers are, once the engine is ready if it is ours, and raise when that one ends."""
    if keeper is None:
        await server.started()
        print(f"sglang-topp sidecar at {url} (engine: {settings.engine_url})", flush=True)
        await asyncio.Event().wait()
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.ready_timeout_s
    ended = asyncio.create_task(keeper.wait())
    while (seen := server.engine)[0] != "ready":
        phase, reason = seen
        if ended.done():
            raise ServerError(
                f"the engine ended with exit status {ended.result()} before it was ready;"
                " its own words are above"
            )
        if phase == "unpatched":
            raise PatchError(reason)
        if not server.has_started:
            deadline = loop.time() + settings.ready_timeout_s
        if loop.time() > deadline:
            raise TransportError(
                f"not ready after {settings.ready_timeout_s:g} s (--ready-timeout-s): {reason}"
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
