"""Benchmark of the sidecar between a client and a fake engine: throughput and processor time.

The fake engine answers immediately, or takes 20 ms per token, as a GPU might. At 20 ms per token, there are
two tables: one with samples of equal length, which end together, and one with samples of different lengths.
The engine, the sidecars, and the client are processes on one machine and share its cores.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.fake_engine import MEAN_SET, run_fake_engine
from benchmarks.harness.paired_timing import compare, compare_counts
from sglang_topp_client import AsyncRolloutClient

__all__ = ["run"]

IN_FLIGHT = 256
SAMPLES = 1024
TOKEN_S = 0.02
MEAN_TOKENS = 128
PROMPT_TOKENS = 64
TARGET_TOGETHER, TARGET = 0.95, 0.98
SHORT, LONG = 32, 512
DIRECT, TWO, SIDECAR = "directly to the engine", "through two sidecars", "through one sidecar"


@dataclass(frozen=True)
class _Servers:
    """The addresses of an engine and of the two sidecars that call the engine."""

    engine: str
    sidecar: str
    sidecar_pid: int
    second_sidecar: str


def run() -> None:
    cores = f"mean set {MEAN_SET}, {os.cpu_count()} cores for all processes"
    with _servers() as servers:
        for tokens in (SHORT, LONG):
            title = f"that takes no time, {IN_FLIGHT} in flight, {SAMPLES} samples x {tokens} tokens, {cores}"
            _compare(title, servers, [tokens] * SAMPLES, in_flight=IN_FLIGHT)
        _show_cost(servers)
    paced = f"of {TOKEN_S * 1e3:.0f} ms a token"
    with _servers(token_s=TOKEN_S) as servers:
        together = f"{SAMPLES} samples x {MEAN_TOKENS} tokens, which end together"
        title = f"{paced}, {IN_FLIGHT} in flight, {together}, {cores}"
        _compare(title, servers, [MEAN_TOKENS] * SAMPLES, in_flight=IN_FLIGHT, target=TARGET_TOGETHER)
    with _servers(token_s=TOKEN_S, max_running=IN_FLIGHT) as servers:
        lengths = np.random.default_rng(0).integers(1, 2 * MEAN_TOKENS, SAMPLES).tolist()
        title = f"{paced} that runs {IN_FLIGHT} of {SAMPLES} samples x 1 to {max(lengths)} tokens, {cores}"
        _compare(title, servers, lengths, in_flight=SAMPLES, target=TARGET)


def _compare(
    title: str, servers: _Servers, lengths: Sequence[int], *, in_flight: int, target: float | None = None
) -> None:
    sidecars = [servers.sidecar, servers.second_sidecar]
    urls = {DIRECT: [servers.engine], TWO: sidecars, SIDECAR: sidecars[:1]}
    compare(
        f"sidecar: an engine {title}",
        {label: _all(at, lengths, in_flight) for label, at in urls.items()},
        rounds=5,
        target=target,
        picture="sidecar_overhead",
    )


def _show_cost(servers: _Servers) -> None:
    """Print the client's and the sidecar's processor times, each per sample and per token.

    The time per sample and the time per token are computed from two runs. The number of tokens per sample is
    `SHORT` in one run, and `LONG` in the other run.
    """
    cost: dict[str, float] = {}
    for label, url, clock in (
        ("client, directly", servers.engine, time.process_time),
        ("client, through the sidecar", servers.sidecar, time.process_time),
        ("the sidecar", servers.sidecar, lambda: _cpu_s(servers.sidecar_pid)),
    ):
        per_sample = {
            tokens: _per_sample(_all([url], [tokens] * SAMPLES, IN_FLIGHT), clock) for tokens in (SHORT, LONG)
        }
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


def _all(urls: Sequence[str], lengths: Sequence[int], in_flight: int) -> Callable[[], object]:
    """Return a function that generates one sample per entry of `lengths`.

    `in_flight` is the maximum number of samples that run at the same time.
    """

    async def go() -> None:
        async with AsyncRolloutClient(urls, max_connections=in_flight) as client:
            prompts = [[i, *range(PROMPT_TOKENS - 1)] for i in range(SAMPLES)]
            params = [{"max_new_tokens": tokens} for tokens in lengths]
            rollouts = await client.generate(prompts, params, top_logprobs_p=0.95, progress=False)
        assert [len(rollout.output_ids) for rollout in rollouts] == list(lengths)

    return lambda: asyncio.run(go())


@contextmanager
def _servers(*, token_s: float = 0.0, max_running: int = SAMPLES) -> Iterator[_Servers]:
    with (
        run_fake_engine(token_s=token_s, max_running=max_running) as engine,
        _run_sidecar(engine) as (sidecar, pid),
        _run_sidecar(engine) as (second, _),
    ):
        yield _Servers(engine, sidecar, pid, second)


@contextmanager
def _run_sidecar(engine: str) -> Iterator[tuple[str, int]]:
    """Run a sidecar, and yield its address and process id."""
    command = [sys.executable, "-m", "sglang_topp_server.cli.main", "sidecar", "--port", "0"]
    process = subprocess.Popen([*command, "--engine-url", engine], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        yield next(word for word in words if word.startswith("http")), process.pid
    finally:
        process.terminate()
        process.wait()


def _cpu_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
