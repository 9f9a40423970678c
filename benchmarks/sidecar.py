"""What the sidecar costs between client and engine, before an engine that takes no time, and one at a GPU's
pace.

Stand-in, sidecar and client are processes of one machine and share its cores.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from benchmarks.engine_stand_in import MEAN_SET, run_stand_in
from benchmarks.harness import compare, compare_counts
from sglang_topp_client import AsyncRolloutClient
from sglang_topp_client.sidecar_api import RolloutsExchange

__all__ = ["run"]

IN_FLIGHT = 256
SAMPLES = 1024
TOKEN_S = 0.02
PROMPT_TOKENS = 64
TARGET = 0.97
SHORT, LONG = 32, 512
STRAIGHT, TWO, SIDECAR = "straight to the engine", "through it with --workers 2", "through the sidecar"


def run() -> None:
    cores = f"{os.cpu_count()} cores for all processes"
    with _servers() as (engine, sidecar, two, pid):
        for tokens in (SHORT, LONG):
            compare(
                f"sidecar: an engine that takes no time, {IN_FLIGHT} in flight, {SAMPLES} samples x {tokens}"
                f" tokens, mean set {MEAN_SET}, {cores}",
                {STRAIGHT: _all(engine, tokens), TWO: _all(two, tokens), SIDECAR: _all(sidecar, tokens)},
                rounds=5,
                picture="sidecar",
            )
        _show_cost(engine, sidecar, pid)
    tokens = 128
    with _servers(token_s=TOKEN_S) as (engine, sidecar, two, _):
        compare(
            f"sidecar: an engine of {TOKEN_S * 1e3:.0f} ms a token, {IN_FLIGHT} in flight, {SAMPLES} samples"
            f" x {tokens} tokens ({IN_FLIGHT / TOKEN_S:,.0f} tokens/s), mean set {MEAN_SET}, {cores}",
            {STRAIGHT: _all(engine, tokens), TWO: _all(two, tokens), SIDECAR: _all(sidecar, tokens)},
            rounds=5,
            target=TARGET,
            picture="sidecar",
        )


def _show_cost(engine: str, sidecar: str, pid: int) -> None:
    """Processor time in the sidecar and in the client, per sample and per token: what stays of it when
    `SHORT` samples and `LONG` ones are compared."""
    cost: dict[str, float] = {}
    for label, url, clock in (
        ("client, straight", engine, time.process_time),
        ("client, through the sidecar", sidecar, time.process_time),
        ("the sidecar", sidecar, lambda: _cpu_s(pid)),
    ):
        per_sample = {tokens: _per_sample(_all(url, tokens), clock) for tokens in (SHORT, LONG)}
        per_token = (per_sample[LONG] - per_sample[SHORT]) / (LONG - SHORT)
        cost[f"{label}: per token"] = per_token * 1e6
        cost[f"{label}: per sample"] = (per_sample[SHORT] - SHORT * per_token) * 1e6
    compare_counts("sidecar: processor time", "us", cost)


def _per_sample(work: Callable[[], object], clock: Callable[[], float]) -> float:
    work()
    start = clock()
    for _ in range(3):
        work()
    return (clock() - start) / (3 * SAMPLES)


def _all(url: str, tokens: int) -> Callable[[], object]:
    async def go() -> None:
        is_sidecar = httpx.get(f"{url}/info").status_code == 200
        calls = IN_FLIGHT // (RolloutsExchange.samples_per_call if is_sidecar else 1)
        async with AsyncRolloutClient(url, max_connections=calls) as client:
            prompts = [[i, *range(PROMPT_TOKENS - 1)] for i in range(SAMPLES)]
            params = {"max_new_tokens": tokens}
            rollouts = await client.generate(prompts, params, top_logprobs_p=0.95, progress=False)
        assert len(rollouts) == SAMPLES
        assert all(len(rollout.output_ids) == tokens for rollout in rollouts)

    return lambda: asyncio.run(go())


@contextmanager
def _servers(*, token_s: float = 0.0) -> Iterator[tuple[str, str, str, int]]:
    """The addresses of an engine, a sidecar and one of two workers before it; the first sidecar's process."""
    with (
        run_stand_in(token_s=token_s) as engine,
        _run_sidecar(engine) as (sidecar, pid),
        _run_sidecar(engine, "--workers", "2") as (two, _),
    ):
        yield engine, sidecar, two, pid


@contextmanager
def _run_sidecar(engine: str, *options: str) -> Iterator[tuple[str, int]]:
    """Its address and its process."""
    command = [sys.executable, "-m", "sglang_topp_server.cli", "sidecar", "--port", "0", *options]
    process = subprocess.Popen([*command, "--engine-url", engine], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        yield next(word for word in words if word.startswith("http")), process.pid
    finally:
        process.terminate()
        process.wait()


def _cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has taken."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
