"""Start and stop the real SGLang, gateways, and sidecars."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import httpx

from sglang_topp_server.process.launch import check_free
from tests.engine.fork_server import ForkedProcess, ForkServer

__all__ = [
    "START_LIMIT_S",
    "Engine",
    "chunks_of",
    "free_port",
    "num_prefilled",
    "read_events",
    "run_engine",
    "run_gateway",
    "run_sidecar",
    "stop_group",
    "with_forks",
]

START_LIMIT_S = 400
_EVENT = b"data: "
_taken_ports: set[int] = set()

fork_server: ForkServer | None = None
"""Set by the tests' session. Without it every engine starts afresh."""


class Engine:
    """A running SGLang server."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | ForkedProcess, log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log
        # SGLang closes a connection that is idle for 5 s.
        self.http = httpx.Client(base_url=url, timeout=180, limits=httpx.Limits(keepalive_expiry=3))

    def post(self, **body: Any) -> httpx.Response:
        return self.http.post("/generate", json=body)

    def generate(self, **body: Any) -> Any:
        """Return the parsed answer. Any status but 200 fails the test."""
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """Return the chunks of a streamed answer."""
        answer = self.post(**body, stream=True)
        assert answer.status_code == 200, answer.text
        return chunks_of(answer.content)


def chunks_of(streamed: bytes) -> list[dict[str, Any]]:
    """Return the chunks of a streamed answer.

    Lines end at newlines alone. A generated text may contain other characters at which `str.splitlines` and
    httpx's `iter_lines` would split.
    """
    events = [line.removeprefix(_EVENT) for line in streamed.split(b"\n") if line.startswith(_EVENT + b"{")]
    return [json.loads(event) for event in events]


async def read_events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the chunks of an answer while it is streamed, unparsed."""
    rest: list[bytes] = []
    async for part in answer.aiter_bytes():
        first, *others = part.split(b"\n")
        rest.append(first)
        for other in others:
            line = b"".join(rest)
            rest = [other]
            if line.startswith(_EVENT + b"{"):
                yield line.removeprefix(_EVENT)


def num_prefilled(engine: Engine) -> int:
    """Return the number of prompt tokens that the engine has prefilled, from its log."""
    found = re.findall(r"Prefill batch.*?#new-token: (\d+)", engine.log.read_text(errors="replace"))
    return sum(map(int, found))


def with_forks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which every SGLang server forks its processes, whatever command starts it."""
    folders = [str(Path(__file__).with_name("sglang_forks")), environment.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, folders))}


def free_port() -> int:
    """Return a port for a server that listens up to half a minute later. No port is returned twice."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8  # pytest's workers share no port
    while (port := check_free("127.0.0.1", 0)) in _taken_ports or port % 8 != worker:
        pass
    _taken_ports.add(port)
    return port


def stop_group(process: subprocess.Popen[bytes] | ForkedProcess) -> None:
    """End a process that leads its own session, and all processes of its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)


@contextmanager
def run_engine(
    model: Path,
    log: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    module: Sequence[str] = (),
) -> Iterator[Engine]:
    """Run SGLang on a free loopback port, serving `model` in float32.

    The engine is forked if `ForkServer.can_fork` allows it, and starts afresh otherwise. An engine that
    starts afresh forks its other processes if `ForkServer.can_fork_processes` allows it.

    Args:
        model: the model's folder.
        log: the file for the engine's output.
        arguments: more arguments of `sglang.launch_server`.
        env: changes to this process's environment.
        module: runs in place of `sglang.launch_server`, with these first arguments.
    """
    port = free_port()
    options = ["--model-path", str(model), "--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
    options += ["--mem-fraction-static", "0.2"]
    options.append("--sleep-on-idle")  # several engines share the cores with the tests
    if "--max-total-tokens" not in arguments:
        options += ["--max-total-tokens", "16384"]
    with log.open("wb") as output:
        process = _start_sglang([*options, *arguments], env or {}, output, module)
    engine = Engine(f"http://127.0.0.1:{port}", process, log)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                if engine.http.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"SGLang did not start:\n{log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.5)
        yield engine
    finally:
        engine.http.close()
        stop_group(process)


def _start_sglang(
    arguments: Sequence[str], env: Mapping[str, str], output: IO[bytes], module: Sequence[str]
) -> subprocess.Popen[bytes] | ForkedProcess:
    if not module and fork_server is not None and fork_server.can_fork(arguments, env):
        return fork_server.start(arguments, env, output)
    forks = fork_server is not None and fork_server.can_fork_processes()
    module = module or (["tests.engine.fork_server", "launch"] if forks else ["sglang.launch_server"])
    return subprocess.Popen(
        [sys.executable, "-m", *module, *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **env},
        start_new_session=True,
    )


@contextmanager
def run_gateway(log: Path, *workers: str, disaggregated: Sequence[str] = ()) -> Iterator[str]:
    """Run the gateway `smg`. Yield its address once it has found all workers healthy.

    Args:
        log: the file for the gateway's output.
        workers: the engines' addresses.
        disaggregated: a prefill server, its bootstrap port, and a decode server instead of `workers`.
    """
    port = free_port()
    command = [str(Path(sys.executable).with_name("smg")), "launch"]
    if disaggregated:
        prefill, bootstrap_port, decode = disaggregated
        command += ["--pd-disaggregation", "--prefill", prefill, bootstrap_port, "--decode", decode]
        workers = (prefill, decode)
    else:
        command += ["--worker-urls", *workers]
    command += ["--host", "127.0.0.1", "--port", str(port), "--worker-startup-check-interval", "1"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    command += ["--policy", "round_robin"]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while _num_workers(url) != len(workers):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"smg did not start:\n{log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.5)
        yield url
    finally:
        stop_group(process)


def _num_workers(gateway: str) -> int:
    try:
        workers = httpx.get(f"{gateway}/workers", timeout=30).json()["workers"]
    except httpx.TransportError:
        return 0
    return sum(worker["is_healthy"] for worker in workers)


@contextmanager
def run_sidecar(engine_url: str) -> Iterator[str]:
    """Run `sglang-topp sidecar` for an engine or a gateway. Yield its address, ready or not."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "sidecar"]
    command += ["--engine-url", engine_url, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "sidecar at" in process.stdout.readline()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
