"""Part 4: two servers that are killed now and then and restarted, without a lost sample."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx

from tests.engine.start_servers import free_port
from tests.soak.checked_callers import Callers, require_idle
from tests.soak.report import Report
from tests.soak.serve_process import Ports, Server, serve, wait_until

__all__ = ["run_engines"]

_SGLANG_ARGUMENTS = ("--max-total-tokens", "2048", "--chunked-prefill-size", "128")
_AT_ONCE = 24
_KILLED = ("scheduler", "main", "parent")


class _Reborn:
    """A server that restarts at the same address."""

    def __init__(self, model: Path, log: Path) -> None:
        self._model, self._log = model, log
        self._ports = Ports(free_port(), free_port())
        self._stack = ExitStack()
        self.server: Server

    async def __aenter__(self) -> _Reborn:
        starting = serve(self._model, self._log, *_SGLANG_ARGUMENTS, ports=self._ports)
        self.server = await asyncio.to_thread(self._stack.enter_context, starting)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stack.close)


async def run_engines(model: Path, folder: Path, *, seconds: float, count: int, seed: int) -> Report:
    """Run until the time has passed or the number of requests is reached. One server is always alive."""
    report = Report("two engines")
    async with AsyncExitStack() as stack:
        names = ("first", "second")
        starting = (stack.enter_async_context(_Reborn(model, folder / f"{name}.log")) for name in names)
        both = await asyncio.gather(*starting)
        sidecars, engines = ([each.server.sidecar for each in both], [each.server.engine for each in both])
        callers = Callers(report, seed, sidecars, engines, max_retries=4)
        stack.push_async_callback(callers.close)
        until = time.monotonic() + seconds

        async def caller() -> None:
            while time.monotonic() < until and report.requests < count:
                await callers.one()

        calling = asyncio.gather(*(caller() for _ in range(_AT_ONCE)))
        operator = asyncio.create_task(_operate(callers, both, calling))
        await calling
        await operator
        for each in both:
            await require_idle(each.server, report)
    if not report.outcomes["killed: scheduler"]:
        report.fault("no engine was killed")
    return report


async def _operate(callers: Callers, both: list[_Reborn], calling: asyncio.Future[object]) -> None:
    """Kill and restart one server, wait until it gets requests, and then do the same with the other one."""
    number = 0
    while True:
        await asyncio.wait({calling}, timeout=callers.rng.uniform(2, 8))
        if calling.done():
            return
        await callers.stop_all()
        await _wait_for_work(both, calling, callers.report)
        if calling.done():
            return
        victim, role = both[number % 2], _KILLED[number // 2 % len(_KILLED)]
        number += 1
        victim.server.role(role).kill(signal.SIGKILL)
        callers.report.outcomes[f"killed: {role}"] += 1
        callers.report.left_running += await victim.server.left_running()
        await victim.__aexit__()
        await victim.__aenter__()


async def _wait_for_work(both: list[_Reborn], calling: asyncio.Future[object], report: Report) -> None:
    """Wait until each server has requests. A restarted one gets some after at most 8 seconds."""

    async def all_work() -> bool:
        return calling.done() or all([await _is_asked(each.server) for each in both])

    if not await wait_until(all_work):
        report.fault("a server that is there again is not asked")


async def _is_asked(server: Server) -> bool:
    try:
        return await server.num_running() > 0
    except httpx.HTTPError:
        return False
