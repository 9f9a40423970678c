"""Part 2: each process is killed with 32 requests in flight, and every caller gets an error."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from sglang_topp.errors import SglangToppError
from sglang_topp_client import AsyncRolloutClient
from tests.engine.candidate_set_checks import check_rollout
from tests.engine.start_servers import run_sidecar
from tests.soak.process_inspection import Process, tree_of
from tests.soak.report import Report
from tests.soak.serve_process import Server, serve, wait_until

__all__ = ["SGLANG_ARGUMENTS", "run_kills"]

# All requests run at once, and none finishes before the kill.
SGLANG_ARGUMENTS = ("--max-total-tokens", "16384")
_IN_FLIGHT = 32
_LONG = {"max_new_tokens": 480, "ignore_eos": True}
_KNOWS_AT_ALL_S = 120.0


async def run_kills(model: Path, folder: Path) -> AsyncGenerator[Report, None]:
    """Yield a report for each killed process: of one server, of a sidecar alone, and of two engines.

    With two engines, no sample is lost.
    """
    with serve(model, folder / "kill-sidecar.log", *SGLANG_ARGUMENTS) as server:
        # The engine outlives the sidecar, and aborts the sidecar's requests.
        with run_sidecar(server.engine) as url:
            (alone,) = [each for each in tree_of(os.getpid()) if each.role == "sidecar"]
            report = await _kill("sidecar", alone, [url, url], server)
        if not await wait_until(lambda: _is_idle(server)):
            report.fault("the engine still runs what the killed sidecar had asked for")
        async with AsyncRolloutClient(server.sidecar) as client:
            await client.generate("still there", {"max_new_tokens": 2}, top_logprobs_p=0.9)
        yield report
        yield await _kill_in(server, "parent")
    with (
        serve(model, folder / "first.log", *SGLANG_ARGUMENTS) as first,
        serve(model, folder / "second.log", *SGLANG_ARGUMENTS) as second,
    ):
        yield await _kill_one_of_two(first, second)
    for role in ("scheduler", "main", "detokenizer", "supervisor"):
        with serve(model, folder / f"kill-{role}.log", *SGLANG_ARGUMENTS) as server:
            yield await _kill_in(server, role)


async def _kill_in(server: Server, role: str) -> Report:
    """Kill one of the server's processes. All others must end too."""
    report = await _kill(role, server.role(role), [server.sidecar, server.engine], server)
    report.left_running = await server.left_running()
    return report


async def _kill(role: str, victim: Process, urls: list[str], server: Server) -> Report:
    report = Report(f"kill {role}", requests=_IN_FLIGHT)
    killed_at: float | None = None

    async def caller(client: AsyncRolloutClient, i: int) -> None:
        try:
            async with asyncio.timeout(_KNOWS_AT_ALL_S):
                if i % 4 < 2:
                    await client.generate("x" * (1 + i), _LONG, top_logprobs_p=0.9)
                else:
                    async for _ in client.stream("x" * (1 + i), _LONG, top_logprobs_p=0.9):
                        pass
            report.fault("a request was answered that was to be in flight")
        except SglangToppError as error:
            report.outcomes[type(error).__name__] += 1
            if killed_at is None:
                report.failed(error, "before the kill")
            else:
                report.knew_s = max(report.knew_s or 0.0, time.monotonic() - killed_at)
        except Exception as error:
            report.failed(error, client)

    clients = [AsyncRolloutClient(url, max_retries=0) for url in urls]
    callers = [asyncio.create_task(caller(clients[i % 2], i)) for i in range(_IN_FLIGHT)]

    async def all_run() -> bool:
        return await server.num_running() >= _IN_FLIGHT

    if not await wait_until(all_run):
        report.fault(f"never had {_IN_FLIGHT} requests in flight")
    victim.kill(signal.SIGKILL)
    killed_at = time.monotonic()
    await asyncio.gather(*callers)
    for client in clients:
        await client.close()
    return report


async def _kill_one_of_two(lives: Server, dies: Server) -> Report:
    """Clients of both engines get all of their samples."""
    report = Report("kill one of two", requests=_IN_FLIGHT)

    async def caller(client: AsyncRolloutClient, i: int) -> None:
        try:
            async with asyncio.timeout(_KNOWS_AT_ALL_S):
                (rollout,) = await client.generate("x" * (1 + i), _LONG, top_logprobs_p=0.9)
            check_rollout(rollout, 0.9)
            report.outcomes["whole"] += len(rollout.output_ids) == _LONG["max_new_tokens"]
        except Exception as error:
            report.failed(error, client)

    clients = [
        AsyncRolloutClient([lives.sidecar, dies.sidecar]),
        AsyncRolloutClient([lives.engine, dies.engine]),
    ]
    callers = [asyncio.create_task(caller(clients[i % 2], i)) for i in range(_IN_FLIGHT)]

    async def both_run() -> bool:
        return min(await lives.num_running(), await dies.num_running()) >= _IN_FLIGHT // 4

    if not await wait_until(both_run):
        report.fault("the requests were not spread over both")
    dies.role("scheduler").kill(signal.SIGKILL)
    await asyncio.gather(*callers)
    for client in clients:
        await client.close()
    if report.outcomes["whole"] != _IN_FLIGHT:
        report.fault(f"{report.outcomes['whole']} of {_IN_FLIGHT} samples came whole")
    report.left_running = await dies.left_running()
    return report


async def _is_idle(server: Server) -> bool:
    return await server.num_running() == 0
