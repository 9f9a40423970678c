"""Start a real `sglang-topp serve`, inspect its processes, and stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.engine.start_servers import START_LIMIT_S, free_port
from tests.soak.process_inspection import Process, alive, tree_of

__all__ = ["Ports", "Server", "serve", "wait_until"]

_END_LIMIT_S = 60.0


@dataclass(frozen=True)
class Ports:
    """The ports of a server."""

    sidecar: int
    engine: int


class Server:
    """A running `sglang-topp serve`."""

    def __init__(self, process: subprocess.Popen[str], sidecar: str, engine: str, log: Path) -> None:
        self.process, self.sidecar, self.engine, self.log = process, sidecar, engine, log
        self.tree = tree_of(process.pid)

    def role(self, name: str) -> Process:
        """Return the only process in that role."""
        (found,) = [process for process in self.tree if process.role == name]
        return found

    async def num_running(self) -> int:
        """Return the number of requests that the engine reports, running or waiting."""
        async with httpx.AsyncClient(timeout=30) as http:
            loads = (await http.get(f"{self.engine}/v1/loads")).json()["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    async def left_running(self, within_s: float = _END_LIMIT_S) -> int:
        """Return how many of its processes still run after some seconds, and kill them."""
        deadline = time.monotonic() + within_s
        while (left := [each for each in self.tree if alive(each)]) and time.monotonic() < deadline:
            self.process.poll()
            await asyncio.sleep(0.1)
        for each in left:
            each.kill(signal.SIGKILL)
        return len(left)


@contextmanager
def serve(model: Path, log: Path, *sglang: str, ports: Ports | None = None) -> Iterator[Server]:
    """Run the patched SGLang and the sidecar for `model`. Kill all of their processes at the end."""
    ports = ports or Ports(free_port(), free_port())
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "serve", "--model-path", str(model)]
    command += ["--port", str(ports.sidecar), "--engine-port", str(ports.engine)]
    command += ["--ready-timeout-s", str(START_LIMIT_S)]
    command += ["--", "--dtype", "float32", "--mem-fraction-static", "0.2", "--sleep-on-idle", *sglang]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # The model is small. On few cores, threads that wait for each other in each layer would slow down
            # the callers and SGLang's other processes.
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process,
    ):
        server = None
        try:
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if "ready:" not in words:
                raise RuntimeError(f"serve did not start:\n{log.read_text(errors='replace')[-4000:]}")
            server = Server(process, words[words.index("sidecar") + 1], words[words.index("engine") + 1], log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            for each in server.tree if server else []:
                each.kill(signal.SIGKILL)


async def wait_until(condition: object, within_s: float = 60.0) -> bool:
    """Return whether an awaitable condition became true in time."""
    assert callable(condition)
    deadline = time.monotonic() + within_s
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
