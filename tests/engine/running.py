"""Start the real SGLang from its package, as its own process group, and end it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from sglang_topp_server.launch import check_free

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
]

START_LIMIT_S = 400
_EVENT = b"data: "
_given: set[int] = set()


class Engine:
    """A running SGLang server."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.url = url
        self.process = process
        self.log = log
        self.http = httpx.Client(base_url=url, timeout=180)

    def post(self, **body: Any) -> httpx.Response:
        return self.http.post("/generate", json=body)

    def generate(self, **body: Any) -> Any:
        """The parsed answer; anything but a 200 fails the test."""
        answer = self.post(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        answer = self.post(**body, stream=True)
        assert answer.status_code == 200, answer.text
        return chunks_of(answer.content)


def chunks_of(streamed: bytes) -> list[dict[str, Any]]:
    """The chunks of a streamed answer.

    Its lines end at newlines alone: a generated text may hold other characters that end one for
    `str.splitlines` and httpx's `iter_lines`.
    """
    events = [line.removeprefix(_EVENT) for line in streamed.split(b"\n") if line.startswith(_EVENT + b"{")]
    return [json.loads(event) for event in events]


async def read_events(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The chunks of an answer that is being streamed, not parsed."""
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
    """Tokens that the engine has computed of prompts, by its log."""
    found = re.findall(r"Prefill batch.*?#new-token: (\d+)", engine.log.read_text(errors="replace"))
    return sum(map(int, found))


def free_port() -> int:
    """One for a server that listens half a minute later; no port twice."""
    while (port := check_free("127.0.0.1", 0)) in _given:
        pass
    _given.add(port)
    return port


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in its own session, and everything that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            continue


@contextmanager
def run_engine(
    model: Path,
    log: Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
) -> Iterator[Engine]:
    """SGLang serving `model` in float32 on a free loopback port."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--mem-fraction-static", "0.2"]
    command.append("--sleep-on-idle")  # several engines share the cores with the tests
    if "--max-total-tokens" not in arguments:
        command += ["--max-total-tokens", "16384"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
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


@contextmanager
def run_gateway(log: Path, *workers: str, disaggregated: Sequence[str] = ()) -> Iterator[str]:
    """The gateway `smg` before these workers; its address, once all of them are known to it.

    Args:
        log: where it writes.
        workers: engines that do all of a request.
        disaggregated: instead, a prefill server, its bootstrap port and a decode server.
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
    """`sglang-topp sidecar` before an engine, or a gateway; its address, ready or not."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_topp_server.cli", "sidecar"]
    command += ["--engine-url", engine_url, "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "sidecar at" in process.stdout.readline()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
