"""Launch the sidecar in this process and the engine under a supervisor process, and stop both on a signal."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import uvicorn

from sglang_topp.errors import InvalidInputError, PatchError, ServerError, TransportError
from sglang_topp.malloc_trim import return_large_blocks_at_once
from sglang_topp_server.api.app import create_app
from sglang_topp_server.engine import EngineClient
from sglang_topp_server.process.sglang_with_env_key import KEY_VARIABLE
from sglang_topp_server.settings import Settings

_POLL_S = 0.1
_ENGINE_PORT_RANGE = range(10_000, 22_000)
# After the engine's grace period, the supervisor has this many seconds to kill and reap the engine's
# processes.
_SUPERVISOR_GRACE_S = 30.0
_STDERR = 2
_ENGINE_ENV_DEFAULTS = {
    # If a grammar forbids every token, SGLang's scheduler crashes by default. With
    # SGLANG_SANITIZE_NAN_LOGITS, SGLang ends only the request whose grammar forbids every token.
    "SGLANG_SANITIZE_NAN_LOGITS": "1",
    # SGLang's crash diagnostics delay the exit of a crashed engine, and callers wait meanwhile. After one of
    # SGLang's processes has died, SGLang sleeps for 5 s to collect diagnostics. If other SGLang processes
    # still run after the crash, SGLang sleeps for another minute.
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}

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
                # uvicorn would use httptools where it is installed, which keeps headers of any length, and
                # drops the body of a request that offers an upgrade, as Java's client does.
                http="h11",
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


def engine_command(model_path: str, host: str, port: int, extra: Sequence[str]) -> list[str]:
    """Return the command that starts SGLang.

    The command needs no option for the plugin, because SGLang loads installed plugins automatically. Nor does
    it need one for the engine's API key: it runs SGLang through the module `sglang_with_env_key`, which reads
    the key from the environment.

    Args:
        model_path: a path or model name that SGLang accepts.
        host, port: the engine's address.
        extra: SGLang's own arguments, passed on unchanged.
    """
    command = [
        sys.executable,
        "-m",
        "sglang_topp_server.process.sglang_with_env_key",
        "--model-path",
        model_path,
    ]
    return [*command, "--host", host, "--port", str(port), *extra]


def engine_environment(environment: Mapping[str, str], api_key: str | None) -> dict[str, str]:
    """Return the engine's environment: a copy of `environment` with a few changed variables.

    `KEY_VARIABLE` is set to `api_key`, or removed if `api_key` is None. SGLang's check for NaN logits is
    turned on. SGLang's crash diagnostics are turned off. If `environment` already sets a variable of the NaN
    check or of the crash diagnostics, the variable keeps its value.

    Args:
        environment: this process's environment.
        api_key: the key that the engine requires from its callers, or None.
    """
    changed = {**_ENGINE_ENV_DEFAULTS, **environment}
    changed.pop(KEY_VARIABLE, None)
    return changed if api_key is None else {**changed, KEY_VARIABLE: api_key}


def url_of(host: str, port: int) -> str:
    """Return the URL at which this machine reaches a server that listens on `host` and `port`."""
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}"


def check_free(host: str, port: int) -> int:
    """Return `port` if no process listens on it; for port 0, return a free port.

    If `port` is 0, the result is from 10,000 to 21,999. SGLang may also use a second port, whose number is
    the engine's port plus 10,000. The engine starts to listen about half a minute after its launch. Until
    then, both ports must stay free. Linux gives outgoing connections only ports from 32,768 on, so no
    outgoing connection takes one of the engine's ports.

    Raises:
        InvalidInputError: a process listens on the port. An engine started on a taken port would fail, and
            the sidecar would talk to the wrong server.
    """
    candidates = [port] if port else random.sample(_ENGINE_PORT_RANGE, 100)
    for candidate in candidates[:-1]:
        with suppress(InvalidInputError), listen(host, candidate):
            return candidate
    with listen(host, candidates[-1]):
        return candidates[-1]


async def run(settings: Settings, command: Sequence[str] | None = None) -> None:
    """Serve until SIGINT or SIGTERM, then stop the sidecar and the engine.

    A second SIGINT or SIGTERM skips the grace period.

    Args:
        settings: the sidecar's settings.
        command: the command that starts the engine, or None if the engine runs elsewhere. If `run` starts the
            engine, `run` also stops the engine.

    Raises:
        InvalidInputError: the sidecar's port is taken.
        PatchError: the started engine is not patched.
        TransportError: the started engine was not ready in time.
        ServerError: the engine or the sidecar ended before `run` received a signal, or the engine's processes
            did not stop.
    """
    stopping = asyncio.Event()
    supervisor: Process | None = None

    def on_signal() -> None:
        if stopping.is_set():
            server.stop()
            if supervisor is not None and supervisor.returncode is None:
                supervisor.terminate()
        stopping.set()

    server = Server(settings)
    listener = listen(settings.host, settings.port, reader_timeout_s=settings.limits.io_timeout_s)
    url = url_of(settings.host, listener.getsockname()[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    if command is not None:
        supervisor = await _start_supervisor(command, settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    monitoring = asyncio.create_task(_wait_until_ready(server, supervisor, settings, url))
    signalled = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({signalled, serving, monitoring}, return_when=asyncio.FIRST_COMPLETED)
        if signalled.done():
            return
        for task in (monitoring, serving):
            if task.done():
                task.result()
        raise ServerError("the sidecar stopped by itself; see its output above")
    finally:
        stopping.set()
        monitoring.cancel()
        server.stop()
        await asyncio.gather(serving, monitoring, return_exceptions=True)
        if supervisor is not None:
            await _stop_supervisor(supervisor, settings.grace_s)


async def _wait_until_ready(server: Server, supervisor: Process | None, settings: Settings, url: str) -> None:
    """Print the servers' addresses once the engine is ready. Raise an error if the engine ends, ready or not.

    If `supervisor` is None, print the sidecar's address immediately, and wait until this task is canceled.
    """
    if supervisor is None:
        print(f"sglang-topp sidecar at {url} (engine: {settings.engine_url})", flush=True)
        await asyncio.Event().wait()
        return
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.ready_timeout_s
    ended = asyncio.create_task(supervisor.wait())
    while (status := server.engine.status).phase != "ready":
        if ended.done():
            raise ServerError(
                f"the engine ended with exit status {ended.result()} before it was ready;"
                " see its output above"
            )
        if status.phase == "unpatched":
            raise PatchError(status.reason)
        if loop.time() > deadline:
            raise TransportError(
                f"not ready after {settings.ready_timeout_s:g} s (--ready-timeout-s): {status.reason}"
            )
        await asyncio.wait({ended}, timeout=_POLL_S)
    print(f"sglang-topp is ready: sidecar {url} engine {settings.engine_url}", flush=True)
    raise ServerError(f"the engine ended with exit status {await ended}; see its output above")


async def _start_supervisor(command: Sequence[str], settings: Settings) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sglang_topp_server.process.engine_supervisor",
        str(settings.grace_s),
        *command,
        env=engine_environment(os.environ, settings.engine_api_key),
        stdin=PIPE,
        # The engine writes to stderr, because stdout carries only the line with the servers' addresses.
        stdout=_STDERR,
        # On Ctrl-C, the terminal sends SIGINT only to processes in the terminal's session. The sidecar's
        # process gets SIGINT from the terminal, and tells the supervisor to stop the engine. The supervisor
        # and the engine run in another session, and get no SIGINT.
        start_new_session=True,
    )


async def _stop_supervisor(supervisor: Process, grace_s: float) -> None:
    assert supervisor.stdin is not None
    if not supervisor.stdin.is_closing():  # after a second signal, the supervisor may have ended
        supervisor.stdin.write(b".")
        supervisor.stdin.close()
    try:
        await asyncio.wait_for(supervisor.wait(), grace_s + _SUPERVISOR_GRACE_S)
    except TimeoutError:
        raise ServerError(f"the engine's processes (supervisor {supervisor.pid}) did not end") from None


def listen(host: str, port: int, *, reader_timeout_s: float | None = None) -> socket.socket:
    """Return a TCP socket that listens on `host` and `port`.

    Args:
        host, port: the address. Port 0 selects a free port.
        reader_timeout_s: seconds after which the kernel resets a connection if the peer does not read the
            data that was sent (Linux only). If None, the kernel keeps a connection whose peer does not read.

    Raises:
        InvalidInputError: another process listens on the address, or `host` is not an address of this
            machine.
    """
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except OSError as error:
        raise InvalidInputError(f"cannot listen on {host} port {port}: {error}") from None
    if reader_timeout_s is not None and sys.platform == "linux":
        # Each accepted connection inherits TCP_USER_TIMEOUT from the listening socket. Without
        # TCP_USER_TIMEOUT, uvicorn would wait forever for a peer that does not read.
        milliseconds = round(reader_timeout_s * 1000)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener
