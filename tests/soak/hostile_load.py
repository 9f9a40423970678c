"""Part 3: hostile callers run beside normal ones, whose answers must continue."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import numpy as np

from sglang_topp_client import AsyncRolloutClient
from tests.engine.candidate_set_checks import check_rollout
from tests.soak import hostile_callers
from tests.soak.process_inspection import Memory
from tests.soak.report import Report
from tests.soak.serve_process import Server

__all__ = ["SGLANG_ARGUMENTS", "run_abuse"]

SGLANG_ARGUMENTS = ("--max-total-tokens", "16384")
_NORMAL_CALLERS = 4
_NORMAL_P = 0.9
# A slower answer counts as interrupted.
_LONGEST_S = 30.0
_LEAST_S = 10.0


async def run_abuse(server: Server, *, seconds: float) -> AsyncGenerator[Report, None]:
    """Yield a report without hostile callers, and one for each kind of them. Each takes an equal time."""
    kinds: list[tuple[str, Callable[[Server, Report], Awaitable[None]] | None]] = [
        ("no abuse", None),
        *((abuser.__name__.replace("_", " "), abuser) for abuser in hostile_callers.ALL),
    ]
    share_s = max(_LEAST_S, seconds / len(kinds))
    for name, abuser in kinds:
        report = Report(name)
        async with Memory(server.process.pid) as memory:
            await _beside(server, report, abuser, share_s)
        for role, mib in memory.peak_mib().items():
            if mib > 1:
                report.outcomes[f"MiB at most in {role}"] = round(mib)
        if server.process.poll() is not None:
            report.fault("the server is gone")
        yield report
        if server.process.poll() is not None:
            return


async def _beside(
    server: Server, report: Report, abuser: Callable[[Server, Report], Awaitable[None]] | None, share_s: float
) -> None:
    """Run normal callers for some time, or until the hostile caller has finished."""
    latencies_s: list[float] = []
    until = time.monotonic() + share_s
    is_over = asyncio.Event()

    async def abuse() -> None:
        while abuser is not None and time.monotonic() < until and server.process.poll() is None:
            await abuser(server, report)
        await asyncio.sleep(max(0.0, until - time.monotonic()))
        is_over.set()

    async def normal(client: AsyncRolloutClient, i: int) -> None:
        while not is_over.is_set() and server.process.poll() is None:
            start = time.monotonic()
            report.requests += 1
            try:
                (rollout,) = await client.generate(
                    f"normal {i}",
                    {"max_new_tokens": 8, "ignore_eos": True},
                    top_logprobs_p=_NORMAL_P,
                    timeout_s=_LONGEST_S,
                )
                check_rollout(rollout, _NORMAL_P)
                report.outcomes["normal answers"] += 1
            except Exception as error:
                report.failed(error, "a normal request")
                await asyncio.sleep(0.5)
            latencies_s.append(time.monotonic() - start)

    async with AsyncRolloutClient(server.sidecar, kind="sidecar", max_retries=0) as client:
        await asyncio.gather(abuse(), *(normal(client, i) for i in range(_NORMAL_CALLERS)))
    if latencies_s:
        report.p99_s = float(np.quantile(latencies_s, 0.99))
